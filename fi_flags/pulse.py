"""Heartbeats, the judgement of who is lost, and the watchdog: one thread a rank.

Each rank posts a heartbeat with its phase, op and profiles done. Rank 0 watches all others, the
others watch rank 0, so the cost is linear. A rank counts as

- absent, if it never came within the join deadline;
- lost, if its heartbeat has not changed for the silence deadline (or soon after a failure), or if
  it said that it was ended;
- stuck, if it lives, but neither it nor any other rank made progress for the standstill deadline,
  and of those that do not wait for a vote it is furthest behind.

Ages are measured on the watcher's own clock, so the machines' clocks need not agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fi_flags.errors import RanksError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from fi_flags.ranks import Ranks

__all__ = ["FAILURE", "GONE", "Deadlines", "EndProcess", "Failure", "Pulse", "Tell", "post_first"]

FAILURE = "failure"
GONE = "gone"
_SILENT_AFTER_FAILURE_S = 10.0
_ABORT_S = 5.0


class Tell(Protocol):
    """Receives what a pulse has to say: ``waiting``, ``tuning``, ``peer_failed``, ``ended``."""

    def __call__(self, event: str, **fields: Any) -> None: ...  # noqa: ANN401, D102


class EndProcess(Protocol):
    """Ends this process with an exit code; ``os._exit`` but in tests."""

    def __call__(self, status: int, /) -> object: ...  # noqa: D102


@dataclass(frozen=True)
class Deadlines:
    """How long a rank waits for others, in seconds.

    Attributes:
        join: For a rank to show up.
        silence: A rank whose heartbeat is older is lost.
        standstill: Where no rank makes progress for this long, the one furthest behind is stuck.
        report: How often rank 0 says what it does or whom it waits for.
        grace: How long a rank may stay inside the model after a peer failed; None: for ever.
        patient: Whether progress inside the model starts the grace anew.
    """

    join: float = 600.0
    silence: float = 600.0
    standstill: float = 3600.0
    report: float = 30.0
    grace: float | None = 5.0
    patient: bool = False

    @property
    def tick(self) -> float:
        """How often the pulse beats, in seconds."""
        return max(0.02, min(1.0, self.join / 5, self.silence / 5, self.standstill / 5))


@dataclass(frozen=True)
class Failure:
    """What went wrong in a group: on which ranks, where, and why."""

    kind: str  # "failed", or "absent", "lost", "stuck"
    ranks: tuple[int, ...]
    host: str
    phase: str
    cause: str

    @classmethod
    def of(cls, text: bytes) -> Failure:
        """Read a failure as it was posted."""
        fields = json.loads(text)
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})

    def describe(self) -> str:
        """One line that names the ranks, the host, the phase and the cause."""
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        where = f" ({self.host})" if self.host else ""
        verb = {"failed": "failed", "absent": "did not join", "lost": "was lost"}
        return f"{who}{where} {verb.get(self.kind, 'is stuck')} in phase {self.phase}: {self.cause}"


def post_first(wire: Store, key: str, failure: Failure) -> Failure:
    """Post a failure unless the group has one already; return the one that counts."""
    return Failure.of(wire.compare_set(key, "", json.dumps(dataclasses.asdict(failure))))


@dataclass
class _Heard:
    """A rank's last heartbeat, when it last changed, and when its progress last changed."""

    beat: dict[str, Any]
    at: float
    moved: float


@dataclass
class Watch:
    """Who was heard when, and what follows from it; pure but for the times it is given."""

    deadlines: Deadlines
    ranks: frozenset[int]
    began: float
    sees_all: bool = True
    heard: dict[int, _Heard] = field(default_factory=dict)

    def hear(self, rank: int, beat: dict[str, Any], now: float) -> None:
        """Take note of a heartbeat as it was read at a time."""
        last = self.heard.get(rank)
        if last is None:
            self.heard[rank] = _Heard(beat, now, now)
            return
        if _progress(beat) != _progress(last.beat):
            last.moved = now
        if beat != last.beat:
            last.at = now
        last.beat = beat

    def judge(self, now: float, *, failed: bool) -> Failure | None:
        """The worst that can be said of the watched ranks at a time, if anything."""
        absent = sorted(self.ranks - self.heard.keys())
        if absent and now - self.began > self.deadlines.join:
            cause = f"not heard within {self.deadlines.join:g} s; is fi_flags on for that rank?"
            return Failure("absent", tuple(absent), "", "join", cause)
        silence = self.deadlines.silence
        if failed:
            silence = min(silence, _SILENT_AFTER_FAILURE_S)
        for rank, last in sorted(self.heard.items()):
            phase, host = str(last.beat.get("phase")), str(last.beat.get("host"))
            if last.beat.get("left"):
                continue
            if last.beat.get("ended"):
                return Failure("lost", (rank,), host, phase, str(last.beat["ended"]))
            if now - last.at > silence:
                cause = f"last heard {now - last.at:.1f} s ago{_doing(last.beat)}"
                return Failure("lost", (rank,), host, phase, cause)
        return self._stuck(now) if self.sees_all else None

    def _stuck(self, now: float) -> Failure | None:
        """Ranks that stand still, once nobody moves; of these the ones that are furthest behind.

        A rank in the model's all-reduce stands still for as long as a peer tunes, so one rank's
        progress excuses all; and when none is left, those that wait in there have done more than
        the one they wait for.
        """
        active = {
            rank: last
            for rank, last in sorted(self.heard.items())
            if not last.beat.get("left") and not last.beat.get("waiting")
        }
        if not active:
            return None
        standing = now - max(last.moved for last in active.values())
        if standing <= self.deadlines.standstill:
            return None
        least = min(last.beat.get("done", 0) for last in active.values())
        behind = {r: last for r, last in active.items() if last.beat.get("done", 0) == least}
        first = next(iter(behind.values())).beat
        cause = f"alive, but no progress for {standing:.1f} s{_doing(first)}"
        return Failure("stuck", tuple(behind), str(first.get("host")), str(first["phase"]), cause)


def _progress(beat: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(beat.get(name) for name in ("phase", "op", "done", "waiting"))


def _doing(beat: Mapping[str, Any]) -> str:
    return f", at {beat['op']}, {beat['done']} profiles done" if "op" in beat else ""


class Pulse:
    """This rank's thread: beats, watches, and brings the rank out of the model if it must.

    Attributes:
        state: What the next heartbeats say; replaced whole, so that no lock is needed.
        waiting: Keys that this rank waits for now, by the rank that owes them.
    """

    def __init__(
        self,
        ranks: Ranks,
        wire: Store,
        deadlines: Deadlines,
        tell: Tell,
        end_process: EndProcess,
    ) -> None:
        self.state: dict[str, Any] = {"phase": "join"}
        self.waiting: dict[int, str] = {}
        self._ranks = ranks
        self._wire = wire
        self._deadlines = deadlines
        self._tell = tell
        self._end_process = end_process
        self._failure: Failure | None = None
        self._gone: Failure | None = None
        self._inside = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._beats = 0
        self._began = self._reported = time.monotonic()
        self._grace_from: float | None = None
        self._grace_progress: tuple[Any, ...] = ()
        sees_all = ranks.rank == 0 and ranks.world > 1
        watched = range(ranks.world) if sees_all else [0]
        self._watch = Watch(deadlines, frozenset(watched), self._began, sees_all)
        self._thread = threading.Thread(target=self._run, name="fi_flags-pulse", daemon=True)
        self._post()  # at once, so that a rank that waits already sees us join
        self._thread.start()

    def raise_if_gone(self) -> None:
        """Raise if a rank of the group is absent, lost or stuck.

        Raises:
            RanksError: It names the ranks, where and why, and the first failure before that.
        """
        gone = self._gone
        if gone is None:
            return
        text = gone.describe()
        if self._failure is not None and self._failure.ranks != gone.ranks:
            text += f"; before that, {self._failure.describe()}"
        raise RanksError(
            text,
            hint="look into that rank's own log, then restart all ranks",
            ranks=list(gone.ranks),
            phase=gone.phase,
            kind=gone.kind,
        )

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Allow the watchdog to act: the main thread is inside the model."""
        self._grace_from = None
        self._inside = True
        try:
            yield
        finally:
            with self._lock:  # never ended half-way out
                self._inside = False

    def close(self) -> None:
        """Say good-bye and stop."""
        self._stop.set()
        self._thread.join(timeout=self._deadlines.tick + 1.0)
        with contextlib.suppress(RuntimeError):
            self._post(left=True)

    def _run(self) -> None:
        while not self._stop.wait(self._deadlines.tick):
            try:
                self._post()
                self._look()
                self._report()
            except RuntimeError as error:  # torch's DistError family
                cause = f"the ranks' store does not answer: {error}".splitlines()[0]
                self._gone = Failure("lost", (0,), "", str(self.state["phase"]), cause)
            if self._inside and (self._failure or self._gone):
                self._bring_out()

    def _post(self, **more: Any) -> None:  # noqa: ANN401 - JSON
        self._beats += 1
        beat = {**self.state, "host": self._ranks.host, "n": self._beats, **more}
        if self.waiting:
            beat["waiting"] = True
        self._wire.set(f"beat/{self._ranks.rank}", json.dumps(beat))

    def _look(self) -> None:
        if self._failure is None and self._wire.check([FAILURE]):
            self._failure = Failure.of(self._wire.get(FAILURE))
        if self._gone is None and self._wire.check([GONE]):
            self._gone = Failure.of(self._wire.get(GONE))
        now = time.monotonic()
        here = [r for r in self._watch.ranks if self._wire.check([f"beat/{r}"])]
        beats = self._wire.multi_get([f"beat/{r}" for r in here]) if here else []
        for rank, beat in zip(here, beats, strict=True):
            self._watch.hear(rank, json.loads(beat), now)
        if self._gone is None:
            gone = self._watch.judge(now, failed=self._failure is not None)
            if gone is not None:
                self._gone = post_first(self._wire, GONE, gone)

    def _report(self) -> None:
        now = time.monotonic()
        if self._ranks.rank != 0 or now - self._reported < self._deadlines.report:
            return
        self._reported = now
        waiting = self.waiting
        fields = {**self.state, "seconds": round(now - self._began, 1)}
        if waiting:
            late = [rank for rank, key in waiting.items() if not self._wire.check([key])]
            doing = {
                str(rank): f"{heard.beat.get('phase')}{_doing(heard.beat)}"
                for rank in late[:8]
                if (heard := self._watch.heard.get(rank))
            }
            if late:
                self._tell("waiting", ranks=late, doing=doing, **fields)
        else:
            self._tell("tuning", **fields)

    def _bring_out(self) -> None:
        """Bring this rank out of the model: a peer that failed will not meet it there again."""
        cause = self._gone or self._failure
        if cause is None:
            return
        now = time.monotonic()
        progress = _progress(self.state)
        if self._grace_from is None:
            self._tell("peer_failed", cause=cause.describe(), grace=self._deadlines.grace)
            self._grace_from, self._grace_progress = now, progress
        if self._deadlines.patient and progress != self._grace_progress:
            self._grace_from, self._grace_progress = now, progress
        if self._deadlines.grace is None or now - self._grace_from < self._deadlines.grace:
            return
        self._abort_groups()
        with self._lock:
            if not self._inside:
                return
            said = f"its watchdog ended it, since {cause.describe()}"
            self._tell("ended", cause=cause.describe(), exit_code=RanksError.exit_code)
            with contextlib.suppress(RuntimeError):
                self._post(ended=said)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            self._end_process(RanksError.exit_code)
            self._inside = False  # only where ending a process is a test's own function

    def _abort_groups(self) -> None:
        """Abort torch's default group; NCCL wakes up from that, gloo does not."""
        thread = threading.Thread(target=_abort_default_group, daemon=True)
        thread.start()  # an abort can hang itself
        give_up = time.monotonic() + min(_ABORT_S, self._deadlines.grace or 0.0)
        while self._inside and time.monotonic() < give_up:
            time.sleep(0.02)


def _abort_default_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    with contextlib.suppress(Exception):
        distributed.group.WORLD.abort()
