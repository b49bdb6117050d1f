"""Two nodes on one machine: network namespaces with addresses, host names and disks of their own.

What is real: torchrun on each, one rendezvous, the store and gloo over their link. What is not:
they share a kernel and a file system, so a node's disk is a directory that only its ranks get.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

LIMIT_S: Final = 60.0
_IP: Final = shutil.which("ip") or "ip"
_PORT: Final = 29400
_ADDRESS: Final = "10.77.0.{}"


def _ip(*words: str) -> None:
    subprocess.run([_IP, *words], check=True, capture_output=True, text=True, timeout=10)


@contextlib.contextmanager
def two_nodes(place: Path) -> Iterator[list[Node]]:
    """Two namespaces with a link between them; nothing of them is left behind.

    Raises:
        OSError: The machine has no `ip`, or may not make them; the error says which.
    """
    names = [f"fi{os.getpid()}x{n}" for n in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = [f"fi{n}v{os.getpid() % 100000}" for n in range(2)]
        link = ["link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name"]
        _ip(*link, ends[1], "netns", names[1])
        nodes = [Node(n, names[n], ends[n], place / f"disk{n}") for n in range(2)]
        for node in nodes:
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", node.link)
            for device in (node.link, "lo"):
                _ip("-n", node.namespace, "link", "set", device, "up")
        command = [*nodes[0].inside, "true"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
        yield nodes
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", name)


@dataclass
class Node:
    """One of them."""

    number: int
    namespace: str
    link: str
    disk: Path
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return _ADDRESS.format(self.number + 1)

    @property
    def inside(self) -> list[str]:
        """What a command begins with that runs on this node."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname node{self.number}; exec "$@"', "sh"]
        return [_IP, "netns", "exec", self.namespace, *named]

    def tables(self) -> list[Path]:
        return sorted(self.disk.rglob("*.json"))

    def cut_off(self) -> None:
        _ip("-n", self.namespace, "link", "set", self.link, "down")


@dataclass
class Ended:
    """How one node's launcher ended, and what its ranks said."""

    code: int | None
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [line for line in self.err.splitlines() if line.startswith("{")]
        return [event for line in lines if (event := json.loads(line))["event"] == name]


@dataclass
class Start:
    """One start of a program on both nodes; the launchers run meanwhile."""

    nodes: Sequence[Node]
    place: Path
    program: Sequence[str] = ("-m", "fi_flags")
    restarts: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place.mkdir()
        self._running = [self._launch(node) for node in self.nodes]

    def _launch(self, node: Node) -> subprocess.Popen[bytes]:
        settings = {
            "PERSISTENT_CACHE": "on",
            "AUTOTUNE_CACHE_DIR": str(node.disk),
            "FLAGS_LOG": "json",
            **self.settings,
            **node.settings,
        }
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "LANG")
                if name in os.environ}  # fmt: skip
        environ = {
            **kept,
            **{f"VLLM_FLASHINFER_{name}": value for name, value in settings.items()},
            "GLOO_SOCKET_IFNAME": node.link,
            "OMP_NUM_THREADS": "1",
        }
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "nodes"]
        meeting = ["--rdzv-endpoint", f"{self.nodes[0].address}:{_PORT}"]
        hosts = ["--rdzv-conf", f"is_host={int(node.number == 0)},timeout=30"]
        size = ["--nnodes", str(len(self.nodes)), "--nproc-per-node", "1"]
        more = ["--local-addr", node.address, "--max-restarts", str(self.restarts)]
        job = ["warmup", "--device", "cpu", "--tokens", "16", "--json"]
        with self._file(node, "out").open("wb") as out, self._file(node, "err").open("wb") as err:
            return subprocess.Popen(
                [*node.inside, *launcher, *size, *rendezvous, *meeting, *hosts, *more,
                 *self.program, *job],
                env=environ, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def _file(self, node: Node, stream: str) -> Path:
        return self.place / f"node{node.number}.{stream}"

    def so_far(self, number: int) -> Ended:
        node = self.nodes[number]
        out, err = (self._file(node, s).read_text(errors="replace") for s in ("out", "err"))
        return Ended(self._running[number].poll(), out, err)

    def until(self, condition: Callable[[], object], what: str, limit: float = LIMIT_S) -> None:
        """Wait for a condition, or fail with what the nodes said so far."""
        until = time.monotonic() + limit
        while not condition():
            said = [self.so_far(node.number).err[-1500:] for node in self.nodes]
            assert time.monotonic() < until, f"no {what} within {limit} s: {said}"
            time.sleep(0.05)

    def ended(self) -> list[Ended]:
        """Wait for both launchers, and say how they ended."""
        self.until(lambda: all(one.poll() is not None for one in self._running), "end")
        return [self.so_far(node.number) for node in self.nodes]

    def stop(self) -> None:
        for one in self._running:
            # The launcher's ranks are in sessions of their own; its namespace names them all.
            one.kill()
        for node in self.nodes:
            pids = subprocess.run(
                [_IP, "netns", "pids", node.namespace], capture_output=True, text=True, check=False
            )
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
        for one in self._running:
            one.wait(timeout=10)


@contextlib.contextmanager
def start(nodes: Sequence[Node], place: Path, **options: Any) -> Iterator[Start]:
    """A start whose processes end with the block, whatever happens."""
    started = Start(nodes, place / f"start{time.monotonic_ns()}", **options)
    try:
        yield started
    finally:
        started.stop()


def why_not() -> str:
    """Why this machine cannot make two nodes, or an empty text."""
    if missing := [tool for tool in ("ip", "unshare", "hostname") if not shutil.which(tool)]:
        return f"no {', '.join(missing)} here"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_nodes(Path()):
            return ""
    except OSError as error:
        return f"network namespaces cannot be made: {error}"
