"""Votes and waits of a group of ranks, over a ``torch.distributed`` store.

A store, not a process group: the model's collectives and ours cannot be mixed up, no group has to
be made, every wait has its own deadline, and a rank that has not come is simply a missing key.
One code path serves TCP stores between processes and a ``HashStore`` between threads; a single
rank needs no store at all. Everything on the wire is JSON. Who lives is judged in ``watch.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from fi_flags.errors import FlagsError, RanksError
from fi_flags.pulse import FAILURE, GONE, PARTING_S, EndProcess, Pulse, Tell, post_first
from fi_flags.watch import Deadlines, Failure
from fi_flags.wire import Wire, within

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = ["Meeting", "Ranks"]

JSON: TypeAlias = Any

_LEFT = "left"
_CHUNK = 1024 * 1024  # a TCPStore refuses values over 8 MiB
_MAX_MESSAGE = 128 * 1024 * 1024


def _restart_count() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


@dataclass(frozen=True)
class Ranks:
    """Who we are in a group, and the store that its ranks share.

    Attributes:
        rank: This process's rank in the group.
        world: How many ranks the group has.
        store: The store that all ranks of the group share; None for a single rank.
        name: The group's name, equal on all its ranks and unlike that of any other group.
        host: The name by which errors call this machine.
        restart: How often the launcher has restarted these ranks.
        process_group: The same ranks as torch's group; only FlashInfer's timings ever use it.
    """

    rank: int = 0
    world: int = 1
    store: Store | None = None
    name: str = "world"
    host: str = field(default_factory=socket.gethostname)
    restart: int = field(default_factory=_restart_count)
    process_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of a world of {self.world}")
        if self.world > 1 and self.store is None:
            raise ValueError(f"a world of {self.world} ranks needs a store")

    @classmethod
    def detect(cls) -> Ranks:
        """The world of ``torch.distributed`` if it is initialised, else a single rank."""
        import torch.distributed as dist  # noqa: PLC0415 - importing fi_flags must not cost torch

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        # torch has no public accessor of the store that init_process_group made or was given.
        from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

        return cls(
            dist.get_rank(),
            dist.get_world_size(),
            _get_default_store(),
            process_group=dist.group.WORLD,
        )

    @contextlib.contextmanager
    def meet(
        self,
        deadlines: Deadlines,
        *,
        tell: Tell = lambda event, **fields: None,  # noqa: ARG005
        end_process: EndProcess = os._exit,
    ) -> Iterator[Meeting]:
        """Open this rank's side of one warm-up.

        Args:
            deadlines: How long to wait for others.
            tell: Receives the events of pulse.py, with fields.
            end_process: Called with exit code 4 when nothing else brings this rank out of the
                model after a peer failed.
        """
        meeting = Meeting(self, deadlines, tell, end_process)
        try:
            yield meeting
        except BaseException as error:
            meeting.desert(error)
            raise
        finally:
            meeting.close()


class Meeting:
    """One warm-up's conversation: votes, shared values, heartbeats, and the watchdog.

    Every rank calls ``vote``, ``share`` and ``gather`` in the same order. A wait ends with its
    answer or with a ``RanksError`` that names the ranks that did not come.

    Attributes:
        votes: How many votes this rank took.
    """

    def __init__(
        self, ranks: Ranks, deadlines: Deadlines, tell: Tell, end_process: EndProcess
    ) -> None:
        self.ranks = ranks
        self.votes = 0
        self._steps = itertools.count()
        self._posted: list[tuple[int, str]] = []
        self._last_vote = 0
        self._deserted = ""
        with _store_errors():
            first, second = within(deadlines.join, lambda: _open(ranks), "opening the store")
            self._wire = Wire(first, deadlines.silence)
            pulse_wire = Wire(second, deadlines.silence)
            try:
                self._pulse = Pulse(
                    ranks.rank, ranks.world, ranks.host, pulse_wire, deadlines, tell, end_process
                )
            except RuntimeError:
                for wire in (self._wire, pulse_wire):
                    wire.close()
                raise

    # -- speaking ---------------------------------------------------------------------------

    def vote(self, ballot: JSON) -> list[JSON]:
        """Exchange one JSON value per rank; every rank receives all, in the order of ranks.

        Raises:
            RanksError: A rank did not come; it is named, with when it was last heard.
        """
        self.votes += 1
        ballots = self.gather(0, ballot)
        result: list[JSON] = self.share(0, ballots)
        self._last_vote = next(self._steps)
        return result

    def gather(self, to: int, value: JSON) -> list[JSON] | None:
        """Bring one JSON value per rank to rank ``to``; the others receive None."""
        step = next(self._steps)
        mine, world = self.ranks.rank, self.ranks.world
        if mine != to:
            self._post(step, f"{step}/{mine}", value)
            return None
        keys = {rank: f"{step}/{rank}" for rank in range(world) if rank != to}
        return [value if rank == mine else self._receive(keys, rank) for rank in range(world)]

    def share(self, source: int, value: JSON = None) -> JSON:
        """Bring the JSON value that rank ``source`` gives to all ranks."""
        step = next(self._steps)
        if self.ranks.world == 1:
            return value
        if self.ranks.rank == source:
            self._post(step, str(step), value)
            return value
        return self._receive({source: str(step)}, source)

    # -- being seen -------------------------------------------------------------------------

    def at(self, phase: str) -> None:
        """Say which phase this rank is in."""
        self._pulse.state = {"phase": phase}

    def progress(self, op: str, done: int, total: int) -> None:
        """Say how far tuning has come: profiles done and known, all ops together."""
        self._pulse.state = {**self._pulse.state, "op": op, "done": done, "total": total}

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While inside the model: a peer's failure is posted at once, and may end this rank."""
        with self._pulse.watch():
            yield

    def fail(self, cause: BaseException) -> None:
        """Tell the group at once that this rank's workload failed."""
        with _store_errors():
            post_first(self._wire, FAILURE, self._failure("failed", cause))

    @property
    def aborted(self) -> bool:
        """Whether the watchdog broke torch's groups to bring this rank out of the model."""
        return self._pulse.aborted

    def first_failure(self) -> Failure | None:
        """The first failure that any rank told the group of, if any did."""
        with _store_errors():
            there = self._wire.check([FAILURE])
            return Failure.of(self._wire.get(FAILURE)) if there else None

    def desert(self, cause: BaseException) -> None:
        """Tell the group that this rank leaves with an error and will answer nothing more."""
        self._deserted = f"it left with {_text(cause)}"
        self._wire.hurry(PARTING_S)
        with contextlib.suppress(RuntimeError):
            post_first(self._wire, GONE, self._failure("lost", cause))

    def close(self) -> None:
        """Stop the pulse and drop what every rank has read by now.

        Rank 0 lets the others leave first, for a moment: it may host the store, and a caller that
        then exits at once would leave them with a dead store in place of the last answer.
        """
        self._wire.hurry(PARTING_S)
        self._pulse.close(self._deserted)
        with contextlib.suppress(RuntimeError):
            gone = self._wire.add(_LEFT, 1)
            until = time.monotonic() + PARTING_S
            while self.ranks.rank == 0 and gone < self.ranks.world and time.monotonic() < until:
                time.sleep(0.005)
                gone = self._wire.add(_LEFT, 0)
        for step, key in self._posted:
            # All ranks took part in a later vote, so all have read what came before it.
            if step < self._last_vote - 2:
                with contextlib.suppress(RuntimeError):
                    self._wire.delete_key(key)
        self._wire.close()

    def _failure(self, kind: str, cause: BaseException) -> Failure:
        phase = str(self._pulse.state["phase"])
        return Failure(kind, (self.ranks.rank,), self.ranks.host, phase, _text(cause))

    # -- the wire ---------------------------------------------------------------------------

    def _post(self, step: int, key: str, value: JSON) -> None:
        text = json.dumps(value, separators=(",", ":"))
        if len(text) > _MAX_MESSAGE:
            raise RanksError(f"a message of {len(text)} bytes is over {_MAX_MESSAGE}", phase=key)
        parts = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
        with _store_errors():
            for number, part in enumerate(parts[1:], 1):
                self._wire.set(f"{key}/part{number}", part)
                self._posted.append((step, f"{key}/part{number}"))
            # The first part goes last: who sees it may read the others.
            self._wire.set(key, f"{len(parts)}:{parts[0]}")
        self._posted.append((step, key))

    def _receive(self, keys: Mapping[int, str], rank: int) -> JSON:
        key = keys[rank]
        self._pulse.waiting = dict(keys)
        try:
            pause = 0.001
            with _store_errors():
                while not self._wire.check([key]):
                    try:
                        self._pulse.raise_if_gone()
                    except RanksError:
                        # A rank that left with an error may have answered in between.
                        if self._wire.check([key]):
                            break
                        raise
                    time.sleep(pause)
                    pause = min(pause * 1.5, 0.05)
                count, _, first = self._wire.get(key).decode().partition(":")
                rest = [self._wire.get(f"{key}/part{n}").decode() for n in range(1, int(count))]
        finally:
            self._pulse.waiting = {}
        return json.loads("".join([first, *rest]))


def _open(ranks: Ranks) -> tuple[Store, Store]:
    from torch.distributed import (  # type: ignore[attr-defined]  # noqa: PLC0415 - see detect
        HashStore,
        PrefixStore,
    )

    store: Any = ranks.store or HashStore()
    name = f"fi_flags/1/{ranks.name}/{ranks.restart}"
    # Each rank counts its own calls in the store, so a process needs no global counter, and ranks
    # that are one call apart wait for each other by name instead of misreading each other.
    call = store.add(f"{name}/calls/{ranks.rank}", 1)
    prefix = f"{name}/{call}"
    # Connections of our own, where torch can: a store serialises the calls on one connection.
    first, second = (store.clone() if hasattr(store, "clone") else store for _ in range(2))
    return PrefixStore(prefix, first), PrefixStore(prefix, second)


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Turn what a dead store raises into an error that says what it means."""
    try:
        yield
    except FlagsError:
        raise
    except RuntimeError as error:  # torch's DistError family
        raise RanksError(
            f"the ranks' store does not answer: {_text(error)}",
            hint="its server lives with the launcher or with rank 0: look there first",
            ranks=[0],
            phase="store",
        ) from error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]
