"""What a start in shadow mode finds out: whether a stored table says what was tuned just now.

It is evidence for turning the cache on, so a short history of it stands beside the table.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fi_flags.store import Store, read_regular, write_whole
from fi_flags.table import Entries, rival_key

__all__ = ["Comparison", "compare", "history", "history_path", "remember", "summary"]

_KEPT = 100
_MAX_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Comparison:
    """A stored table against what was tuned just now; counts are keys of all ranks that had one.

    Attributes:
        compared: Keys that were tuned now.
        equal: Those for which the table has the same runner and tactic.
        different: Those for which it has another; where two tactics are as fast, either may win.
        missing: Those for which it has none.
        saved_seconds: How long tuning took for the keys that the table has, on the slowest rank: a
            start that loads it is so much shorter.
    """

    compared: int = 0
    equal: int = 0
    different: int = 0
    missing: int = 0
    saved_seconds: float = 0.0

    @property
    def agreed(self) -> bool:
        """Whether a start that loaded the table would serve what this one serves."""
        return self.compared > 0 and self.equal == self.compared

    @classmethod
    def together(cls, parts: Iterable[Comparison]) -> Comparison | None:
        """What the ranks found, as one; None where none had a table to compare with."""
        parts = [part for part in parts if part.compared]
        if not parts:
            return None
        counts = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("compared", "equal", "different", "missing")
        }
        return cls(**counts, saved_seconds=max(part.saved_seconds for part in parts))

    def to_json(self) -> dict[str, Any]:
        """The comparison for reports and logs."""
        return {**dataclasses.asdict(self), "agreed": self.agreed}


def compare(
    tuned: Entries, stored: Entries, timed: Iterable[tuple[Sequence[str], float]]
) -> Comparison:
    """Hold a stored table against what one rank tuned.

    Args:
        tuned: What serves the rank's calls now.
        stored: The table's entries.
        timed: For each call that was tuned, the file keys of the runners that could serve it, and
            the seconds that took.
    """
    rivals: defaultdict[str, int] = defaultdict(int)
    for key in stored:
        rivals[rival_key(key)] += 1
    equal = sum(key in stored and stored[key][:2] == entry[:2] for key, entry in tuned.items())
    missing = sum(not rivals.get(rival_key(key)) for key in tuned)
    return Comparison(
        compared=len(tuned),
        equal=equal,
        different=len(tuned) - equal - missing,
        missing=missing,
        saved_seconds=round(
            sum(seconds for names, seconds in timed if any(name in stored for name in names)), 3
        ),
    )


def history_path(table: Path) -> Path:
    """Where the history of a table's shadow starts stands."""
    return table.with_suffix(".shadow")


def history(table: Path) -> list[dict[str, Any]]:
    """The shadow starts beside a table, oldest first; what cannot be read counts as none."""
    try:
        starts = json.loads(read_regular(history_path(table), _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    return [one for one in starts if _is_start(one)] if isinstance(starts, list) else []


def remember(store: Store, found: Comparison, **more: str) -> None:
    """Add a start to the history; the newest hundred are kept.

    Raises:
        OSError: It cannot be written.
    """
    with store.locked():
        starts = [*history(store.path), {**more, **found.to_json()}][-_KEPT:]
        write_whole(history_path(store.path), json.dumps(starts, indent=1).encode("ascii"))


def summary(table: Path) -> dict[str, Any] | None:
    """What the history says, in numbers; None where no start was compared."""
    starts = history(table)
    if not starts:
        return None
    names = ("compared", "equal", "different", "missing")
    return {
        "starts": len(starts),
        "agreed": sum(one["agreed"] for one in starts),
        **{name: sum(one[name] for one in starts) for name in names},
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
