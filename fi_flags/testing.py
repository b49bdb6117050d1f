"""For tests of what uses this package: the flag for a block, and ranks that are threads.

Importing it costs neither torch nor pytest. The pytest plug-in `pytest_plugin.py` offers the
override as fixtures.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from fi_flags.errors import RanksError
from fi_flags.layers import OVERRIDE, Inputs
from fi_flags.ranks import Ranks
from fi_flags.settings import FlashInferSettings
from fi_flags.tuner import tuner_per_thread

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["override", "run_ranks"]

T = TypeVar("T")


@contextmanager
def override(**settings: object) -> Iterator[None]:
    """Set the flag and its knobs for a block, or for a function that this decorates.

    They win over every other source, explicit arguments too, wherever settings are read: by
    `warm_up`, `flashinfer_autotune`, `settings_or_off` and `FlashInferSettings`. The environment
    stays as it is. Blocks nest; the inner one wins, and None lets the other sources speak again.

    It holds in this thread and in ranks of `run_ranks`, not in other threads or processes.

    Args:
        settings: By name, as `FlashInferSettings` has them: `persistent_cache="on"`.

    Raises:
        SettingsError: On entry, for a value that is not accepted or a setting that does not exist.
    """
    token = OVERRIDE.set({**OVERRIDE.get(), **settings})
    try:
        FlashInferSettings(Inputs(environ={}, dotenv=None, places=()))
        yield
    finally:
        OVERRIDE.reset(token)


def run_ranks(
    world: int, work: Callable[[Ranks], T], *, timeout: float = 60.0, name: str = "world"
) -> list[T]:
    """Run a function on ranks of one group, which are threads over an in-memory store.

    Each rank has an AutoTuner of its own, fresh, as after a restart of its process, and sees what
    the caller has overridden. `autotune_abort_peers` is off unless the caller has overridden it,
    because ending a rank would end the process of the test. A workload on a CPU needs
    `tuner.wall_clock` around this call.

    Args:
        world: How many ranks.
        work: What each rank runs; it is given its `Ranks`.
        timeout: Seconds that all ranks together may take.
        name: The group's name.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        RanksError: A rank raised; it is the first that did, and its error is the cause.
        TimeoutError: Ranks did not end, and none raised; they are named, and left running.
    """
    with tuner_per_thread(), override(**{"autotune_abort_peers": False, **OVERRIDE.get()}):
        results, errors = attempt(in_memory(world, name), work, timeout)
    missing = [str(rank) for rank in range(world) if rank not in {**results, **errors}]
    late = f"not ended within {timeout:g} s: ranks {', '.join(missing)}" if missing else ""
    for rank, error in errors.items():
        text = f"rank {rank} raised {type(error).__name__}: {error}"
        raise RanksError(text, hint=late, ranks=[rank], phase="run") from error
    if late:
        raise TimeoutError(late)
    return [results[rank] for rank in range(world)]


def in_memory(world: int, name: str = "world", store: Store | None = None) -> list[Ranks]:
    """The ranks of a group over one in-memory store, each as if on a host of its own."""
    if world == 1:
        return [Ranks(name=name, host="host0")]
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # noqa: PLC0415

    shared = HashStore() if store is None else store
    return [Ranks(rank, world, shared, name=name, host=f"host{rank}") for rank in range(world)]


def attempt(
    group: Sequence[Ranks], work: Callable[[Ranks], T], timeout: float
) -> tuple[dict[int, T], dict[int, BaseException]]:
    """Run a function on each rank in a thread that sees the caller's context variables.

    Returns:
        By rank, what it returned, and what it raised in the order of time; a rank that has not
        ended within the timeout is in neither.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def go(ranks: Ranks) -> None:
        try:
            results[ranks.rank] = work(ranks)
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            errors[ranks.rank] = error

    deadline = time.monotonic() + timeout
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(go, ranks),
            name=f"{ranks.name}-{ranks.rank}",
            daemon=True,
        )
        for ranks in group
    ]
    # A thread that waits for the interpreter asks for it this often; hundreds of them would keep
    # each other from ever doing anything else.
    kept = sys.getswitchinterval()
    sys.setswitchinterval(max(kept, len(group) * 1e-3))
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        sys.setswitchinterval(kept)
    return dict(results), dict(errors)
