"""What lies under a cache directory, and whether it is sound: for people, not for starts.

Soundness is judged by the file alone. Whether a table fits this machine is for a start to say.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from fi_flags.shadow import history_path, summary
from fi_flags.store import QUARANTINED, Store
from fi_flags.table import Status, Verdict, op_of

__all__ = ["Doomed", "Shelved", "look_at", "tables", "to_prune"]

_DAY_S = 86400.0


@dataclass(frozen=True)
class Shelved:
    """One table's place, and what is there.

    Attributes:
        path: The table's file; status ``absent`` if only tables that were set aside are left.
        bytes: The file's size.
        quarantined: The files that were set aside from this place, oldest first.
        on_trial: Whether a marker stands beside it: a start runs on it for the first time, or died.
    """

    path: Path
    found: Verdict
    bytes: int = 0
    quarantined: tuple[Path, ...] = ()
    on_trial: bool = False
    ops: dict[str, int] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether a start whose environment it fits would use it."""
        return self.found.status is Status.OK

    def to_json(self) -> dict[str, Any]:
        """The place in a row of ``cache list``."""
        table = self.found.table
        about = table.about if table else {}
        environment, workload, group = (*self.path.parts[-3:-1], self.path.stem)
        return {
            "environment": environment,
            "workload": workload,
            "group": group,
            "path": str(self.path),
            "status": self.found.status.value,
            "why": self.found.why,
            "bytes": self.bytes,
            "entries": len(table.entries) if table else 0,
            "digest": about.get("digest", ""),
            "written": about.get("written"),
            "cold_seconds": table.cold_seconds if table else 0.0,
            "on_trial": self.on_trial,
            "quarantined": [path.name for path in self.quarantined],
        }

    def details(self) -> dict[str, Any]:
        """The place as ``cache show`` has it: with stamps, our own block, and entries by op."""
        table = self.found.table
        return {
            **self.to_json(),
            "shadow": summary(self.path),
            "stamps": table.stamps if table else {},
            "about": table.about if table else {},
            "ops": self.ops,
        }


def look_at(path: Path) -> Shelved:
    """What is at a table's place; whatever is wrong with it is its verdict."""
    store = Store(path)
    found = store.read({})
    try:
        size = path.lstat().st_size
    except OSError:
        size = 0
    entries = found.table.entries if found.table else {}
    return Shelved(
        path=path,
        found=found,
        bytes=size,
        quarantined=tuple(sorted(store.quarantined())),
        on_trial=path.with_suffix(".trial").exists(),
        ops=dict(sorted(Counter(op_of(key) or key for key in entries).items())),
    )


def tables(cache_dir: Path) -> list[Shelved]:
    """Every table's place under a cache directory, those that only have tables set aside too."""
    shelf = cache_dir / "v1"
    places = set(shelf.glob("*/*/*.json"))
    for aside in shelf.glob(f"*/*/*.json{QUARANTINED}*"):
        places.add(aside.with_name(aside.name.partition(QUARANTINED)[0]))
    return [look_at(path) for path in sorted(places)]


@dataclass(frozen=True)
class Doomed:
    """A file that pruning removes: what it is, and how old in days."""

    path: Path
    what: str
    days: float
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """The file as ``cache prune`` has it."""
        return {
            "path": str(self.path),
            "what": self.what,
            "days": round(self.days, 1),
            "bytes": self.bytes,
        }


def to_prune(
    places: Sequence[Shelved],
    *,
    older_than: float | None = None,
    quarantined: bool = False,
    flashinfer: SpecifierSet | None = None,
) -> list[Doomed]:
    """The files that all criteria choose.

    Args:
        places: What ``tables`` found.
        older_than: Days since a file was written.
        quarantined: Only what was set aside; else that, and tables too.
        flashinfer: The FlashInfer versions whose tables may go. What was set aside counts by the
            version in the name of its directory, as does a table that cannot be read.
    """
    return [
        doomed
        for place in places
        if flashinfer is None or _made_by(place, flashinfer)
        for doomed in _files(place, tables_too=not quarantined)
        if older_than is None or doomed.days > older_than
    ]


def _made_by(place: Shelved, wanted: SpecifierSet) -> bool:
    table = place.found.table
    named = place.path.parts[-3].partition("-")[0]
    try:
        version = Version(str(table.stamps.get("flashinfer_version")) if table else named)
    except InvalidVersion:  # nobody's to remove by version
        return False
    return wanted.contains(version, prereleases=True)


def _files(place: Shelved, *, tables_too: bool) -> Iterator[Doomed]:
    found = [(path, "set aside") for path in place.quarantined]
    if tables_too and place.path.is_file():
        found.append((place.path, place.found.status.value))
        found += [(one, "its history") for one in [history_path(place.path)] if one.is_file()]
    for path, what in found:
        try:
            stat = path.lstat()
        except OSError:  # someone else was quicker
            continue
        yield Doomed(path, what, (time.time() - stat.st_mtime) / _DAY_S, stat.st_size)
