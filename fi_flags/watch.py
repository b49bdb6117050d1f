"""Who is absent, lost or stuck: judged from heartbeats, and pure but for the times it is given.

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

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Deadlines", "Failure", "Watch", "activity", "progress_of"]

_SILENT_AFTER_FAILURE_S = 10.0


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
        if progress_of(beat) != progress_of(last.beat):
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
                cause = f"last heard {now - last.at:.1f} s ago{activity(last.beat)}"
                return Failure("lost", (rank,), host, phase, cause)
        return self._stuck(now) if self.sees_all else None

    def _stuck(self, now: float) -> Failure | None:
        """Ranks that stand still, once nobody moves; of these the ones that are furthest behind.

        A rank in the model's all-reduce stands still for as long as a peer tunes, so one rank's
        progress excuses all; and when none is left, those that wait in there have done more than
        the one they wait for.
        """
        here = {r: last for r, last in sorted(self.heard.items()) if not last.beat.get("left")}
        active = {rank: last for rank, last in here.items() if not last.beat.get("waiting")}
        if not active and self.ranks == self.heard.keys():
            active = here  # all wait for each other, which no vote of ours should let happen
        if not active:
            return None
        standing = now - max(last.moved for last in active.values())
        if standing <= self.deadlines.standstill:
            return None
        least = min(last.beat.get("done", 0) for last in active.values())
        behind = {r: last for r, last in active.items() if last.beat.get("done", 0) == least}
        first = next(iter(behind.values())).beat
        cause = f"alive, but no progress for {standing:.1f} s{activity(first)}"
        return Failure("stuck", tuple(behind), str(first.get("host")), str(first["phase"]), cause)


def progress_of(beat: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must change in a heartbeat for its rank to have moved."""
    return tuple(beat.get(name) for name in ("phase", "op", "done", "waiting"))


def activity(beat: Mapping[str, Any]) -> str:
    """What a rank was doing by its heartbeat, to be added to a sentence."""
    return f", at {beat['op']}, {beat['done']} profiles done" if "op" in beat else ""
