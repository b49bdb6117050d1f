"""What a start in shadow mode finds out: whether a stored table says what was tuned just now.

It is evidence for turning the cache on, so a short history of it stands beside the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fi_flags.store import Store, read_regular, write_whole
from fi_flags.table import Entries, rival_key, spelt

__all__ = ["Comparison", "Timed", "compare", "history", "history_path", "remember", "summary"]

_KEPT = 100
_COUNTS = ("compared", "equal", "different", "slower", "missing")
_AS_FAST = 1.05
_MAX_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Comparison:
    """A stored table against what was tuned just now; counts are keys of all ranks that had one.

    Attributes:
        compared: Keys that were tuned now.
        equal: Those for which the table has the same runner and tactic.
        different: Those for which it has another; where two tactics are as fast, either may win.
        slower: Those of the different whose stored tactic was more than 5 % slower now, or was not
            among those that were timed.
        missing: Those for which it has none.
        saved_seconds: How long tuning took for the keys that the table has, on the slowest rank: a
            start that loads it is so much shorter.
    """

    compared: int = 0
    equal: int = 0
    different: int = 0
    slower: int = 0
    missing: int = 0
    saved_seconds: float = 0.0

    @property
    def agreed(self) -> bool:
        """Whether a start that loads the table tunes nothing and serves tactics as fast."""
        return self.compared > 0 and not self.slower and not self.missing

    @classmethod
    def together(cls, parts: Iterable[Comparison]) -> Comparison | None:
        """What the ranks found, as one; None where none had a table to compare with."""
        parts = [part for part in parts if part.compared]
        if not parts:
            return None
        counts = {name: sum(getattr(part, name) for part in parts) for name in _COUNTS}
        return cls(**counts, saved_seconds=max(part.saved_seconds for part in parts))

    def to_json(self) -> dict[str, Any]:
        """The comparison for reports and logs."""
        return {**dataclasses.asdict(self), "agreed": self.agreed}


@dataclass(frozen=True)
class Timed:
    """How one call was tuned.

    Attributes:
        names: The file keys of the runners that could serve it.
        seconds: How long that took.
        times: Milliseconds of each tactic that ran, by ``table.spelt``.
    """

    names: Sequence[str]
    seconds: float
    times: Mapping[str, float]

    def as_fast(self, stored: Entries, entry: Sequence[Any]) -> bool:
        """Whether the tactic that a table has for this call is as fast as the one chosen now."""
        there = next((stored[name] for name in self.names if name in stored), None)
        if there is None:
            return False
        chosen, other = (self.times.get(spelt(one[0], one[1])) for one in (entry, there))
        return chosen is not None and other is not None and other <= _AS_FAST * chosen


def compare(tuned: Entries, stored: Entries, timed: Sequence[Timed]) -> Comparison:
    """Hold a stored table against what one rank tuned.

    Args:
        tuned: What serves the rank's calls now.
        stored: The table's entries.
        timed: The calls that were tuned.
    """
    rivals = {rival_key(key) for key in stored}
    calls = {name: one for one in timed for name in one.names}
    missing = {key for key in tuned if rival_key(key) not in rivals}
    equal = {key for key, entry in tuned.items() if stored.get(key, [])[:2] == entry[:2]}
    different = tuned.keys() - missing - equal
    slower = [
        key for key in different if key not in calls or not calls[key].as_fast(stored, tuned[key])
    ]
    saved = sum(one.seconds for one in timed if any(name in stored for name in one.names))
    return Comparison(
        compared=len(tuned),
        equal=len(equal),
        different=len(different),
        slower=len(slower),
        missing=len(missing),
        saved_seconds=round(saved, 3),
    )


def history_path(table: Path) -> Path:
    """Where the history of a table's shadow starts stands."""
    return table.with_suffix(".shadow")


def history(table: Path) -> list[dict[str, Any]]:
    """The shadow starts beside a table, oldest first; what cannot be read counts as none."""
    try:
        return _starts(read_regular(history_path(table), _MAX_BYTES))
    except (OSError, ValueError):
        return []


def _starts(data: bytes) -> list[dict[str, Any]]:
    try:
        starts = json.loads(data)
    except (ValueError, RecursionError):
        return []
    return [one for one in starts if _is_start(one)] if isinstance(starts, list) else []


def remember(store: Store, found: Comparison, **more: str) -> None:
    """Add a start to the history; the newest hundred are kept.

    Raises:
        OSError: It cannot be written.
    """
    with store.locked():
        place = history_path(store.path)
        earlier: list[dict[str, Any]] = []
        with contextlib.suppress(ValueError):  # larger than any of ours
            if place.is_file() and not place.is_symlink():
                earlier = _starts(read_regular(place, _MAX_BYTES))
        starts = [*earlier, {**more, **found.to_json()}][-_KEPT:]
        write_whole(place, json.dumps(starts, indent=1).encode("ascii"))


def summary(table: Path) -> dict[str, Any] | None:
    """What the history says, in numbers; None where no start was compared."""
    starts = history(table)
    if not starts:
        return None
    return {
        "starts": len(starts),
        "agreed": sum(one["agreed"] for one in starts),
        **{name: sum(one[name] for one in starts) for name in _COUNTS},
        "last": starts[-1],
    }


def _is_start(one: object) -> bool:
    if not isinstance(one, dict):
        return False
    kinds = {name: type(value) for name, value in Comparison().to_json().items()}
    return all(
        type(one.get(name)) is kind or (kind is float and type(one.get(name)) is int)
        for name, kind in kinds.items()
    )
