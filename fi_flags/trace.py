"""What every rank of a warm-up did when, as a trace that Chrome and Perfetto open.

Each rank keeps a timeline: its phases, its waits for others, and the profiles it tuned. Ranks may
be on machines whose clocks disagree, so times count from a moment that all ranks shared: the end
of vote 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["Timeline", "render"]

# What goes over the wire and into a viewer: a model of ten thousand profiles still fits.
_MOST_SPANS = 20_000
_ROWS: Final = {"phase": 0, "wait": 1, "profile": 2}
_NAMES: Final = ("phases", "waiting for others", "profiles tuned")


class Timeline:
    """What one rank did when; times are those of ``time.perf_counter``, in seconds."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self._left_out = 0
        self._phase, self._since = "join", time.perf_counter()
        self._zero = self._since

    def at(self, phase: str) -> None:
        """A phase begins here, and the one before it ends."""
        now = time.perf_counter()
        self.add("phase", self._phase, self._since, now)
        self._phase, self._since = phase, now

    def met(self) -> None:
        """All ranks are together at this moment: times count from here."""
        self._zero = time.perf_counter()

    def add(self, kind: str, name: str, began: float, ended: float, **details: Any) -> None:  # noqa: ANN401
        """Note a span of time.

        Args:
            kind: ``phase``, ``wait`` or ``profile``.
            name: What the viewer shows on it.
            began: A reading of ``time.perf_counter``.
            ended: Another.
            details: What the viewer shows beside it, as JSON.
        """
        if len(self._spans) >= _MOST_SPANS:
            self._left_out += 1
            return
        self._spans.append((kind, name, began, ended, details))

    def to_json(self, rank: int, host: str) -> dict[str, Any]:
        """The timeline up to now, as it goes over the wire; times are microseconds."""
        self.at(self._phase)
        return {
            "rank": rank,
            "host": host,
            "left_out": self._left_out,
            "spans": [
                [kind, name, round((began - self._zero) * 1e6), round((ended - began) * 1e6), more]
                for kind, name, began, ended, more in self._spans
            ],
        }


def render(timelines: Sequence[dict[str, Any]], about: dict[str, Any]) -> bytes:
    """A trace file in Chrome's JSON format: a process for each rank, a row for each kind of span.

    Args:
        timelines: What ``Timeline.to_json`` gave, one for each rank.
        about: What the file says of itself.
    """
    first = min((span[2] for one in timelines for span in one["spans"]), default=0)
    events: list[dict[str, Any]] = []
    for one in timelines:
        rank = one["rank"]
        name = f"rank {rank} ({one['host']})"
        events += [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
            *(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": text}}
                for row, text in enumerate(_NAMES)
            ),
        ]
        events += [
            {
                "ph": "X",
                "cat": kind,
                "name": text,
                "ts": ts - first,
                "dur": duration,
                "pid": rank,
                "tid": _ROWS[kind],
                "args": details,
            }
            for kind, text, ts, duration, details in one["spans"]
        ]
    left_out = sum(one["left_out"] for one in timelines)
    other = {**about, "spans_left_out": left_out}
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(document, separators=(",", ":")).encode("ascii")
