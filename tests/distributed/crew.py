"""Real ranks: processes from a fork server that has torch and FlashInfer loaded already.

Every rank joins a real gloo group over a TCP store, warms a tiny decoder up, and leaves what it
came to in a JSON file. The test hosts the store, as ``torchrun``'s agent does.
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

LIMIT_S = 60.0


@dataclass(frozen=True)
class Fault:
    """What one rank does, and where: before the warm-up, or somewhere in it.

    Attributes:
        where: ``before``; the name of an op; ``after`` the forward; ``phase:run``, when that phase
            begins; or ``vote:2``, when that vote does.
        how: ``raise``, ``die``, ``kill`` or ``stall``.
    """

    rank: int
    where: str
    how: str

    def strike(self) -> None:
        if self.how == "raise":
            raise ValueError("boom")
        if self.how == "die":
            os._exit(139)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


@dataclass(frozen=True)
class Orders:
    """What a rank is to do; plain data, since it crosses processes."""

    rank: int
    world: int
    port: int
    results: Path
    settings: dict[str, Any]
    fault: Fault | None = None
    ops: tuple[str, ...] = ()
    grace: float = 0.5
    hosts_store: bool = False
    stages: int = 1


@dataclass
class Ended:
    """How a rank ended: its exit code, its result if it lived to give one, and its log."""

    exit_code: int | None
    result: dict[str, Any]
    log: str
    seconds: float = 0.0


@dataclass
class Crew:
    """A world of processes; with several stages, that many tuning groups of neighbours."""

    world: int
    place: Path
    settings: dict[str, Any] = field(default_factory=dict)
    each: Callable[[int], dict[str, Any]] = lambda _rank: {}
    limit: float = LIMIT_S
    stages: int = 1
    grace: float = 0.5

    def start(
        self,
        flag: str,
        *,
        fault: Fault | None = None,
        ops: Callable[[int], tuple[str, ...]] = lambda _rank: (),
        rank_0_hosts: bool = False,
        missing: tuple[int, ...] = (),
        abandoned: tuple[int, ...] = (),
    ) -> list[Ended]:
        """One start of all ranks; none may outlive the limit, but those that are abandoned."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

        began = time.monotonic()
        results = self.place / f"start{time.monotonic_ns()}"
        results.mkdir(parents=True)
        host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        given = {"persistent_cache": flag, "autotune_cache_dir": str(self.place / "tables")}
        context = _fork_server()
        ranks = [
            context.Process(
                target=work,
                args=(
                    Orders(
                        rank=rank,
                        world=self.world,
                        port=free_port(results) if rank_0_hosts else host.port,
                        results=results,
                        settings={**given, **self.settings, **self.each(rank)},
                        fault=fault,
                        ops=ops(rank),
                        hosts_store=rank_0_hosts and rank == 0,
                        grace=self.grace,
                        stages=self.stages,
                    ),
                ),
            )
            for rank in range(self.world)
            if rank not in missing
        ]
        for process in ranks:
            process.start()
        ends: dict[int, float] = {}
        numbers = [rank for rank in range(self.world) if rank not in missing]
        awaited = {n for n, rank in enumerate(numbers) if rank not in abandoned}
        while awaited - ends.keys() and time.monotonic() - began < self.limit:
            for number, process in enumerate(ranks):
                if number not in ends and not process.is_alive():
                    ends[number] = time.monotonic() - began
            time.sleep(0.02)
        late = sorted(awaited - ends.keys())
        for process in ranks:
            process.kill()
            process.join()
        assert not late, f"ranks {late} still ran after {self.limit} s: {_logs(results, late)}"
        return [
            Ended(
                process.exitcode,
                json.loads(_text(results / f"{rank}.json") or "{}"),
                _text(results / f"{rank}.log"),
                ends.get(number, self.limit),
            )
            for number, (rank, process) in enumerate(zip(numbers, ranks, strict=True))
        ]


def _arm(fault: Fault) -> None:
    """Let the fault strike when this process comes to its phase or vote."""
    from fi_flags.ranks import Meeting, Talk  # noqa: PLC0415

    kind, _, name = fault.where.partition(":")
    at, vote, votes = Meeting.at, Talk.vote, itertools.count(1)

    def at_or_strike(meeting: Meeting, phase: str) -> None:
        if (kind, name) == ("phase", phase):
            fault.strike()
        at(meeting, phase)

    def vote_or_strike(talk: Talk, *args: Any) -> Any:
        if kind == "vote" and next(votes) == int(name):
            fault.strike()
        return vote(talk, *args)

    Meeting.at, Talk.vote = at_or_strike, vote_or_strike  # type: ignore[method-assign, assignment]


def work(orders: Orders) -> None:  # noqa: C901 - one process, from end to end
    """One rank, in its own process."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from fi_flags import warmup  # noqa: PLC0415
    from fi_flags.errors import FlagsError  # noqa: PLC0415
    from fi_flags.ranks import Ranks  # noqa: PLC0415
    from fi_flags.settings import FlashInferSettings  # noqa: PLC0415
    from fi_flags.tuner import wall_clock  # noqa: PLC0415
    from fi_flags.workloads.cpu import OP_PREFIX, CpuDecoder  # noqa: PLC0415

    torch.set_num_threads(1)
    logging.basicConfig(filename=orders.results / f"{orders.rank}.log", level=logging.INFO)
    warmup._GRACE_S = orders.grace
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        orders.port,
        is_master=orders.hosts_store,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("torch", store),  # type: ignore[attr-defined]
        rank=orders.rank,
        world_size=orders.world,
    )
    fault = orders.fault if orders.fault and orders.fault.rank == orders.rank else None

    if fault:
        _arm(fault)

    def between(op: str) -> None:
        if fault and op == OP_PREFIX + fault.where:
            fault.strike()

    class Decoder(CpuDecoder):
        def run(self) -> None:
            super().run()
            if fault and fault.where == "after":
                fault.strike()

    size = orders.world // orders.stages
    decoder = Decoder.tiny(
        rank=orders.rank % size, world=size, between=between, extra_ops=orders.ops
    )
    ranks = None
    if orders.stages > 1:
        stage = orders.rank // size
        groups = [
            dist.new_group(list(range(n * size, (n + 1) * size))) for n in range(orders.stages)
        ]
        decoder.all_reduce = partial(dist.all_reduce, group=groups[stage])
        ranks = Ranks.detect(f"pp{stage}", groups[stage])
    result: dict[str, Any] = {}
    try:
        if fault and fault.where == "before":
            fault.strike()
        with wall_clock(repeat=2):
            report = warmup.warm_up(
                decoder, ranks=ranks, settings=FlashInferSettings(**orders.settings)
            )
        logits = decoder.forward()
        result = {"report": report.to_json(), "logits": logits.double().sum().item()}
        dist.barrier()  # the next collective pairs on all ranks
    except FlagsError as error:
        result = {"error": type(error).__name__, "message": str(error), "fields": error.fields}
    except ValueError as error:
        result = {"error": "ValueError", "message": str(error)}
    (orders.results / f"{orders.rank}.json").write_text(json.dumps(result))
    if "error" in result:
        os._exit(5)
    dist.destroy_process_group()


@cache
def _fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flashinfer.autotuner", "fi_flags.workloads.cpu", __name__])
    return context


@cache
def free_port(_start: Path) -> int:
    """One free port for each start."""
    import socket  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _logs(results: Path, ranks: list[int]) -> dict[int, str]:
    return {rank: _text(results / f"{rank}.log")[-2000:] for rank in ranks}


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    """A report's parts that all ranks must share."""
    return {name: report[name] for name in ("outcome", "plan", "ranks", "saved_seconds")}


__all__ = ["Crew", "Ended", "Fault", "without_times"]
