"""Local ranks for the command line: torch's elastic launcher starts them, or ``torchrun`` did.

A rank gives back its report, or its error as an object, so that the launcher can say what
happened; only a rank that dies has nothing to say, and then its exit code is named.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from fi_flags.errors import DeviceError, FlagsError, RanksError
from fi_flags.facts import gather_facts
from fi_flags.logs import get_logger, setup_cli_logging
from fi_flags.settings import FlashInferSettings
from fi_flags.tuner import OnStep

__all__ = ["Job", "launch"]

_ELASTIC = "torch.distributed.elastic"


@dataclass(frozen=True)
class Job:
    """What each rank of the command runs; it travels to them by pickle, so it is plain data.

    Attributes:
        tokens: The most tokens in a forward of the CPU decoder.
        bar: Whether rank 0 draws a progress bar on standard error.
        trace: A file for what each rank did when, in place of what the settings say.
    """

    device: str = "auto"
    tokens: int = 256
    config: Path | None = None
    bar: bool = False
    trace: Path | None = None

    def settings(self) -> FlashInferSettings:
        """The settings that each rank reads for itself."""
        given: dict[str, Any] = {} if self.trace is None else {"autotune_trace": self.trace}
        return FlashInferSettings.load(config=self.config, **given)


def launch(job: Job, ranks: int, environ: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Warm up on local ranks, or as one rank of those that ``torchrun`` started.

    Returns:
        The report as JSON; None on a rank other than 0 under ``torchrun``.

    Raises:
        FlagsError: What a rank raised, or which rank died.
        DeviceError: The device asked for is not there.
    """
    environ = os.environ if environ is None else environ
    _check_device(job.device)
    if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ:
        report = _result([_rank(job, bound=True)])
        return report if environ["RANK"] == "0" else None
    if ranks == 1:
        return _result([_rank(job, bound=False)])
    return _result(_elastic(job, ranks))


def _check_device(device: str) -> None:
    if device == "cuda":
        facts = gather_facts()
        raise DeviceError(
            "--device cuda needs the CUDA decoder, which this version does not have",
            hint="use --device cpu",
            needed="cuda",
            found=facts.gpu or "no GPU",
        )


def _elastic(job: Job, ranks: int) -> list[dict[str, Any]]:
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    # The launcher logs a page of its own for each rank that ends early; our error says it better.
    for name in [n for n in logging.root.manager.loggerDict if n.startswith(_ELASTIC)]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _start_fork_server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    try:
        results: dict[int, dict[str, Any]] = elastic_launch(config, _forked)(job)
        return [results[rank] for rank in sorted(results)]
    except ChildFailedError as error:
        dead = {
            rank: f"exit code {failure.exitcode}"
            if failure.exitcode >= 0
            else failure.signal_name()
            for rank, failure in error.failures.items()
            if failure.exitcode != -signal.SIGTERM  # those the launcher ended afterwards
        }
        raise RanksError(
            "; ".join(f"rank {rank} ended with {how}" for rank, how in sorted(dead.items())),
            hint="the log above says what it did last",
            ranks=sorted(dead),
            phase="run",
        ) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None


def _start_fork_server() -> None:
    """Import torch and FlashInfer once for all ranks, in a process that ranks are forked from."""
    multiprocessing.set_forkserver_preload(["fi_flags.warmup", "fi_flags.workloads.cpu"])
    # A terminal's Ctrl-C reaches every process at once. The launcher answers it; a server that is
    # still importing must not answer with a traceback of its own, and it inherits what is ignored.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, answer)


def _forked(job: Job) -> dict[str, Any]:
    # The launcher passes a Ctrl-C on. Even inside a collective, where Python's own handler would
    # wait for its end, this rank dies at once; whatever it writes is renamed into place whole.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    return _rank(job, bound=True)


def _rank(job: Job, *, bound: bool) -> dict[str, Any]:
    """One rank's work; its error is part of the result."""
    import torch  # noqa: PLC0415 - only what runs a warm-up pays for torch
    import torch.distributed as dist  # noqa: PLC0415

    from fi_flags.tuner import wall_clock  # noqa: PLC0415
    from fi_flags.warmup import warm_up  # noqa: PLC0415

    torch.set_num_threads(1)  # small products: more threads cost more than they bring
    first = os.environ.get("RANK", "0") == "0" or not bound
    try:
        from fi_flags.workloads.cpu import CpuDecoder  # noqa: PLC0415

        settings = job.settings()
        with _bar(shown=job.bar and first) as on_step, setup_cli_logging(settings.flags_log):
            rank, world = _join(settings) if bound else (0, 1)
            decoder = CpuDecoder(tokens=job.tokens, rank=rank, world=world)
            with wall_clock():
                report = warm_up(decoder, settings=settings, on_step=on_step)
        return {"report": report.to_json()}
    except FlagsError as error:
        return {"error": error}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(settings: FlashInferSettings) -> tuple[int, int]:
    """Meet the launcher's other ranks, and make the gloo group that the decoder needs.

    torch would wait for a rank that never comes in silence and for half an hour; a vote of ours
    first names it within ``join_s``.
    """
    import torch.distributed as dist  # noqa: PLC0415 - see _rank

    from fi_flags.ranks import Ranks  # noqa: PLC0415
    from fi_flags.warmup import deadlines, teller  # noqa: PLC0415

    store, rank, world = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    tell = teller(get_logger(rank=rank))
    with Ranks(rank, world, store, name="launch").meet(deadlines(settings), tell=tell) as meeting:
        # The store may hold the addresses of ranks that a restart has ended.
        attempt = meeting.share(0, uuid.uuid4().hex if rank == 0 else None)
    prefixed = dist.PrefixStore(f"gloo/{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world)
    return rank, world


@contextlib.contextmanager
def _bar(*, shown: bool) -> Iterator[OnStep | None]:
    """A progress bar on standard error: op, profiles done of those known, elapsed."""
    if not shown:
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - ranks other than 0 draw nothing
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("profiles"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("tuning", total=None)

        def on_step(op: str, done: int, total: int) -> None:
            progress.update(task, description=op, completed=done, total=total)

        yield on_step


def _result(results: list[dict[str, Any]]) -> dict[str, Any]:
    for result in results:
        if "error" in result:
            raise result["error"]
    report: dict[str, Any] = results[0]["report"]
    return report
