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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from fi_flags.errors import FlagsError, RanksError
from fi_flags.pulse import FAILURE, GONE, PARTING_S, EndProcess, Pulse, Tell, post_first
from fi_flags.roll import call_the_roll
from fi_flags.trace import Timeline
from fi_flags.watch import Deadlines, Failure
from fi_flags.wire import Wire, within

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = ["Meeting", "Ranks", "Talk"]

JSON: TypeAlias = Any

_LEFT = "left"
_LONGEST_NAME = 100
_CHUNK = 1024 * 1024  # a TCPStore refuses values over 8 MiB
_MAX_MESSAGE = 128 * 1024 * 1024
# How often a waiting rank looks; where many wait for one answer, it takes longer to come, and
# their looks add up.
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_PAUSE_PER_RANK_S = 1e-4


@dataclass(frozen=True)
class Ranks:
    """Who we are in a world, in which group we tune, and the store that the world's ranks share.

    Attributes:
        rank: This process's rank in the world.
        world: How many ranks the world has.
        store: The store that all its ranks share; None for a single rank.
        name: The world's name, equal on all its ranks, unlike that of any other on this store.
        group: The tuning group: ranks of the world that give the same name run the same ops, a
            pipeline stage's, say. The world's name if not given, so that all are one group.
        host: The name by which errors call this machine.
        process_group: The tuning group as torch's; only FlashInfer's timings ever use it.
    """

    rank: int = 0
    world: int = 1
    store: Store | None = None
    name: str = "world"
    group: str = ""
    host: str = field(default_factory=socket.gethostname)
    process_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of a world of {self.world}")
        if self.world > 1 and self.store is None:
            raise ValueError(f"a world of {self.world} ranks needs a store")
        if len(self.group) > _LONGEST_NAME:
            raise ValueError(f"a group's name of {len(self.group)} characters is over 100")
        if not self.group:
            object.__setattr__(self, "group", self.name)

    @classmethod
    def detect(cls, group: str = "", process_group: ProcessGroup | None = None) -> Ranks:
        """The world of ``torch.distributed`` if it is initialised, else a single rank.

        Args:
            group: The name of this rank's tuning group, where the world's ranks differ in what they
                run: ``"pp1"``, say.
            process_group: That group as torch's, if FlashInfer may average timings over it.
        """
        import torch.distributed as dist  # noqa: PLC0415 - importing fi_flags must not cost torch

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(group=group)
        # torch has no public accessor of the store that init_process_group made or was given.
        from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

        return cls(
            dist.get_rank(),
            dist.get_world_size(),
            _get_default_store(),
            group=group,
            process_group=process_group or (None if group else dist.group.WORLD),
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


class Talk:
    """The conversation of some ranks of a meeting; ranks are numbered as in the world.

    Every member calls ``vote``, ``share`` and ``gather`` in the same order. A wait ends with its
    answer or with a ``RanksError`` that names the ranks that did not come.

    Attributes:
        members: The ranks that take part, in ascending order; the first collects votes.
        votes: How many votes this rank took here.
        timeline: What this rank did when, its waits for others among it.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        wire: Wire,
        pulse: Pulse,
        timeline: Timeline,
        prefix: str = "",
    ) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.votes = 0
        self.timeline = timeline
        self._wire = wire
        self._pulse = pulse
        self._prefix = prefix
        self._steps = itertools.count()
        self._posted: list[tuple[int, str]] = []
        self._last_vote = 0

    @property
    def first(self) -> bool:
        """Whether this rank is the first of the members, who speaks for all."""
        return self.rank == self.members[0]

    @overload
    def vote(self, ballot: JSON) -> list[JSON]: ...

    @overload
    def vote(self, ballot: JSON, count: Callable[[list[JSON]], JSON]) -> JSON: ...

    def vote(self, ballot: JSON, count: Callable[[list[JSON]], JSON] | None = None) -> JSON:
        """Exchange one JSON value per member.

        Args:
            ballot: This rank's value.
            count: What the first member makes of all ballots, for all to receive: JSON as well. It
                spares a large group from reading everybody's ballot on every rank.

        Returns:
            What ``count`` made of the ballots; without it all of them, in the order of members.

        Raises:
            RanksError: A rank did not come; it is named, with when it was last heard.
        """
        self.votes += 1
        first = self.members[0]
        ballots = self.gather(first, ballot)
        counted = None if ballots is None else (count or _pack)(ballots)
        result = self.share(first, counted)
        self._last_vote = next(self._steps)
        return result if count else _unpack(result)

    def gather(self, to: int, value: JSON) -> list[JSON] | None:
        """Bring one JSON value per member to rank ``to``; the others receive None."""
        step = next(self._steps)
        if self.rank != to:
            self._post(step, f"{step}/{self.rank}", value)
            return None
        keys = {rank: f"{step}/{rank}" for rank in self.members if rank != to}
        found = self._receive(keys, readers=1) if keys else {}
        return [value if rank == to else found[rank] for rank in self.members]

    def share(self, source: int, value: JSON = None) -> JSON:
        """Bring the JSON value that rank ``source`` gives to all members."""
        step = next(self._steps)
        if len(self.members) == 1:
            return value
        if self.rank == source:
            self._post(step, str(step), value)
            return value
        return self._receive({source: str(step)}, readers=len(self.members) - 1)[source]

    def tidy(self) -> None:
        """Drop what every member has read by now."""
        for step, key in self._posted:
            # All members took part in a later vote, so all have read what came before it.
            if step < self._last_vote - 2:
                with contextlib.suppress(RuntimeError):
                    self._wire.delete_key(key)

    # -- the wire ---------------------------------------------------------------------------

    def _post(self, step: int, name: str, value: JSON) -> None:
        text = json.dumps(value, separators=(",", ":"))
        if len(text) > _MAX_MESSAGE:
            raise RanksError(f"a message of {len(text)} bytes is over {_MAX_MESSAGE}", phase=name)
        key = self._prefix + name
        parts = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
        with _store_errors():
            for number, part in enumerate(parts[1:], 1):
                self._wire.set(f"{key}/part{number}", part)
                self._posted.append((step, f"{key}/part{number}"))
            # The first part goes last: who sees it may read the others.
            self._wire.set(key, f"{len(parts)}:{parts[0]}")
        self._posted.append((step, key))

    def _receive(self, names: Mapping[int, str], readers: int) -> dict[int, JSON]:
        """The values that ranks posted, or owe, under these names; so many ranks wait for them."""
        keys = {rank: self._prefix + name for rank, name in names.items()}
        self._pulse.waiting = keys
        began = time.perf_counter()
        try:
            with _store_errors():
                self._await(list(keys.values()), readers)
                found = self._wire.multi_get(list(keys.values()))
                return {
                    rank: self._whole(keys[rank], part.decode())
                    for rank, part in zip(keys, found, strict=True)
                }
        finally:
            self._pulse.waiting = {}
            ranks = sorted(names)
            name = f"wait for rank {ranks[0]}" + (f" and {len(ranks) - 1} more" * (len(ranks) > 1))
            self.timeline.add("wait", name, began, time.perf_counter(), ranks=ranks[:64])

    def _await(self, keys: list[str], readers: int) -> None:
        pause = max(_SHORTEST_PAUSE_S, _PAUSE_PER_RANK_S * readers)
        longest = max(_LONGEST_PAUSE_S, 2 * pause)
        while not self._wire.check(keys):
            try:
                self._pulse.raise_if_gone()
            except RanksError:
                # A rank that left with an error may have answered in between.
                if self._wire.check(keys):
                    return
                raise
            time.sleep(pause)
            pause = min(1.5 * pause, longest)

    def _whole(self, key: str, part: str) -> JSON:
        count, _, first = part.partition(":")
        rest = [self._wire.get(f"{key}/part{n}").decode() for n in range(1, int(count))]
        return json.loads("".join([first, *rest]))


class Meeting(Talk):
    """One warm-up of a world: its conversation, heartbeats, and the watchdog."""

    def __init__(
        self, ranks: Ranks, deadlines: Deadlines, tell: Tell, end_process: EndProcess
    ) -> None:
        self.ranks = ranks
        self._deserted = ""
        self._others: list[Talk] = []
        with _store_errors():
            wire, pulse_wire = _open(ranks, deadlines, tell)
            try:
                pulse = Pulse(
                    ranks.rank, ranks.world, ranks.host, pulse_wire, deadlines, tell, end_process
                )
            except RuntimeError:
                for one in (wire, pulse_wire):
                    one.close()
                raise
        super().__init__(ranks.rank, range(ranks.world), wire, pulse, Timeline())

    def among(self, members: Sequence[int]) -> Talk:
        """The conversation of a part of the world, of which this rank is a member."""
        if tuple(members) == self.members:
            return self
        self._pulse.peers = frozenset(members)
        prefix = f"group/{self.ranks.group}/"
        talk = Talk(self.rank, members, self._wire, self._pulse, self.timeline, prefix)
        self._others.append(talk)
        return self._others[-1]

    @property
    def all_votes(self) -> int:
        """How many votes this rank took, in the world and in parts of it."""
        return self.votes + sum(talk.votes for talk in self._others)

    # -- being seen -------------------------------------------------------------------------

    def at(self, phase: str) -> None:
        """Say which phase this rank is in."""
        self._pulse.state = {"phase": phase}
        self.timeline.at(phase)

    def progress(self, op: str, done: int, total: int) -> None:
        """Say how far tuning has come: profiles done and known, all ops together."""
        self._pulse.state = {**self._pulse.state, "op": op, "done": done, "total": total}

    @contextlib.contextmanager
    def inside(self, *, trial: bool = False) -> Iterator[None]:
        """While inside the model: a peer's failure is posted at once, and may end this rank.

        Args:
            trial: Whether the group may mend a failure by itself; other groups do not hear of it.
        """
        with self._pulse.watch(self._trial if trial else ""):
            yield

    def fail(self, cause: BaseException, *, trial: bool = False) -> None:
        """Tell the world, or in a trial the own group, at once that this rank's workload failed."""
        with _store_errors():
            key = self._trial if trial else FAILURE
            post_first(self._wire, key, self._failure("failed", cause))

    @property
    def _trial(self) -> str:
        return f"{FAILURE}/{self.ranks.group}"

    @property
    def aborted(self) -> bool:
        """Whether the watchdog broke torch's groups to bring this rank out of the model."""
        return self._pulse.aborted

    def first_failure(self, *, trial: bool = False) -> Failure | None:
        """The first failure that any rank told the world of, or in a trial the group."""
        key = self._trial if trial else FAILURE
        with _store_errors():
            return Failure.of(self._wire.get(key)) if self._wire.check([key]) else None

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
        for talk in (self, *self._others):
            talk.tidy()
        self._wire.close()

    def _failure(self, kind: str, cause: BaseException) -> Failure:
        phase = str(self._pulse.state["phase"])
        return Failure(kind, (self.ranks.rank,), self.ranks.host, phase, _text(cause))


def _open(ranks: Ranks, deadlines: Deadlines, tell: Tell) -> tuple[Wire, Wire]:
    """Two connections to the world's store, for the conversation and for the pulse."""
    from torch.distributed import (  # type: ignore[attr-defined]  # noqa: PLC0415 - see detect
        HashStore,
        PrefixStore,
    )

    store: Any = ranks.store or HashStore()
    name = f"fi_flags/1/{ranks.name}"
    in_process = isinstance(store, HashStore)

    def connect() -> list[Any]:
        store.check([name])  # a dead store says so at once; a clone of it would try for long
        # Connections of our own, where torch can: a store serialises the calls on one connection.
        return [store.clone() if hasattr(store, "clone") else store for _ in range(2)]

    ours = connect() if in_process else within(deadlines.join, connect, "opening the store")

    def wire(one: Any) -> Wire:  # noqa: ANN401 - torch's
        return Wire(PrefixStore(name, one), deadlines.silence, direct=in_process)

    if ranks.world > 1:
        lobby = wire(ours[0])
        try:
            met = call_the_roll(lobby, ranks.rank, ranks.world, deadlines, _waiting(tell))
        finally:
            lobby.close()
        name = f"{name}/{met}"
    return wire(ours[0]), wire(ours[1])


def _waiting(tell: Tell) -> Callable[[list[int], float], object]:
    """What tells of a wait for ranks that have not come yet."""

    def said(ranks: list[int], seconds: float) -> None:
        with contextlib.suppress(Exception):  # a server's log handler must not stop a start
            tell("waiting", ranks=ranks, doing={}, phase="join", seconds=seconds)

    return said


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


def _pack(values: list[JSON]) -> JSON:
    """One value per rank, with what all objects share said once: in a large group, nearly all."""
    names = list(values[0]) if isinstance(values[0], dict) else []
    if not names or any(not isinstance(v, dict) or list(v) != names for v in values):
        return {"rows": values}
    same: dict[str, JSON] = {}
    each: dict[str, list[JSON]] = {}
    for name in names:
        column = [value[name] for value in values]
        # As text: to Python, 1, 1.0 and True are equal.
        if len({json.dumps(value) for value in column}) == 1:
            same[name] = column[0]
        else:
            each[name] = column
    return {"names": names, "same": same, "each": each, "count": len(values)}


def _unpack(packed: JSON) -> list[JSON]:
    if "rows" in packed:
        return list(packed["rows"])
    same, each = packed["same"], packed["each"]
    return [
        {name: same[name] if name in same else each[name][n] for name in packed["names"]}
        for n in range(packed["count"])
    ]
