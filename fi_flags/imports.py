"""Tables from elsewhere: bundles, and the per-rank files that vLLM and SGLang keep.

A bundle says where its tables belong. A per-rank file says its environment only, so it waits, with
others of its set, until a start in that environment finds no table of its own and adopts what its
calls hit.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TypeAlias

from fi_flags.bundle import MAX_BUNDLE_BYTES, is_bundle, place_of, unpack, unplaced
from fi_flags.shadow import history_path
from fi_flags.store import Store, read_regular, write_whole
from fi_flags.table import (
    MAX_BYTES,
    Entries,
    Status,
    Table,
    Verdict,
    content_digest,
    judge,
    merge,
    parse,
)

Bundled: TypeAlias = dict[str, tuple[bytes, Verdict]]

__all__ = ["Taken", "adoptable", "import_files"]

WAITING: Final = "imported"
"""The directory, in a workload's place, of tables that wait for a start which they fit."""

_MOST_WAITING = 64
# vLLM 0.32 and 0.33: autotune_configs_dp0_rank3.json; SGLang: rank_tp3_pp0_dp0.json, or with a
# device's name behind it. Other files of FlashInfer's own format are taken too, one by one.
_RANK_FILE = re.compile(r"autotune_configs(_dp\d+_rank\d+)?\.json|rank_tp\d+_pp\d+_dp\d+\w*\.json")


@dataclass(frozen=True)
class Taken:
    """What became of one file, or one table of a bundle.

    Attributes:
        source: The file, and for a bundle the table in it.
        action: ``taken``, ``there`` (the same table is there already) or ``refused``.
        path: Where it is now, if it was taken.
        why: Why it was refused.
        moved_to: Where the table went that it took the place of.
    """

    source: str
    action: str
    path: str = ""
    entries: int = 0
    why: str = ""
    moved_to: str = ""


def import_files(cache_dir: Path, sources: Sequence[Path], *, force: bool) -> list[Taken]:
    """Take tables over into a cache directory.

    Args:
        cache_dir: Where they go.
        sources: Bundles, files in FlashInfer's format, and directories in which vLLM or SGLang keep
            theirs.
        force: Whether another table in a table's place may be set aside for it.
    """
    done: list[Taken] = []
    sets: dict[tuple[Path, str], list[tuple[Path, Table]]] = {}
    for path in _files(sources):
        found = _read(path)
        if isinstance(found, Table):
            place = place_of(found, WAITING, "")
            sets.setdefault((path.parent, place), []).append((path, found))
        elif isinstance(found, dict):
            done += _take_bundle(cache_dir, path, found, force=force)
        else:
            done.append(Taken(str(path), "refused", why=found))
    for ranks in sets.values():
        done += _take_ranks(cache_dir, sorted(ranks, key=lambda one: _numbers(one[0])))
    return done


def _read(path: Path) -> Table | Bundled | str:
    """A per-rank table, the tables of a bundle, or why it is neither."""
    try:
        data = read_regular(path, MAX_BUNDLE_BYTES)
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError) as error:
        if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
            return "there are no per-rank files of vLLM or SGLang in this directory"
        return f"it cannot be read: {error}"
    try:
        return unpack(data) if is_bundle(data) else _of_rank(data)
    except ValueError as error:
        return f"neither a bundle nor a table in FlashInfer's format: {error}"


def _files(sources: Sequence[Path]) -> Iterator[Path]:
    """The files that sources stand for; a directory is searched."""
    for source in sources:
        found = [source]
        with contextlib.suppress(OSError):  # reading it will say what is wrong
            if source.is_dir():
                found = [path for path in source.rglob("*.json") if _RANK_FILE.fullmatch(path.name)]
        # A directory without any is refused as the directory that it is.
        yield from sorted(found) or [source]


def _numbers(path: Path) -> tuple[list[int], str]:
    """What sorts rank 10 after rank 9."""
    return [int(text) for text in re.findall(r"\d+", path.name)], path.name


def _of_rank(data: bytes) -> Table:
    """A table in FlashInfer's format, whoever wrote it.

    Raises:
        ValueError: It is none, is empty, or does not say where it was made.
    """
    table = parse(data)
    if not table.entries:
        raise ValueError("no entries")
    unsaid = unplaced(table)
    if unsaid:
        raise ValueError(unsaid)
    if table.about:  # one of ours: then it must be sound
        found = judge(data, {})
        if found.table is None:
            raise ValueError(found.why)
    return table


def _take_ranks(cache_dir: Path, ranks: Sequence[tuple[Path, Table]]) -> list[Taken]:
    """One table of a set of per-rank files: for each call the lowest rank's tactic."""
    entries = merge(table.entries for _, table in ranks)
    about: dict[str, Any] = {
        "imported": [str(path.absolute()) for path, _ in ranks],
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    table = Table(entries, ranks[0][1].stamps, about)
    place = cache_dir / place_of(table, WAITING, content_digest(entries)[:16])
    there = place.is_file() and Store(place).read(table.stamps).status is Status.OK
    action, why = "there" if there else "taken", ""
    data = table.render()
    if len(data) > MAX_BYTES:
        action, why = "refused", f"together they have {len(data)} bytes, more than {MAX_BYTES}"
    elif not there:
        try:
            _make(cache_dir, place.parent)
            write_whole(place, data)
        except (OSError, ValueError) as error:
            action, why = "refused", _unwritten(cache_dir, error)
    return [
        Taken(str(path), action, "" if why else str(place), len(one.entries), why)
        for path, one in ranks
    ]


def _take_bundle(cache_dir: Path, path: Path, tables: Bundled, *, force: bool) -> list[Taken]:
    done = []
    for place, (content, found) in tables.items():
        source = f"{path}:{place}"
        if found.table is None:
            done.append(Taken(source, "refused", why=found.why or found.status.value))
            continue
        done.append(_put(cache_dir, place, source, content, found.table, force=force))
    return done


def _make(cache_dir: Path, directory: Path) -> None:
    """Make a directory below the cache directory.

    Raises:
        OSError: It cannot be made.
        ValueError: A link leads out of the cache directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not directory.resolve().is_relative_to(cache_dir.resolve()):
        raise ValueError(f"{directory} leads out of the cache directory")


def _unwritten(cache_dir: Path, error: Exception) -> str:
    where = f"the cache directory {cache_dir} cannot be written: " * isinstance(error, OSError)
    return f"{where}{error}"


def _put(
    cache_dir: Path, place: str, source: str, content: bytes, table: Table, *, force: bool
) -> Taken:
    """Write a table where none is; what is there and is another makes way only if it must."""
    size, store = len(table.entries), Store(cache_dir / place)
    try:
        _make(cache_dir, store.path.parent)
        action, moved = _written(store, content, table, force=force)
    except (OSError, ValueError) as error:
        return Taken(source, "refused", entries=size, why=_unwritten(cache_dir, error))
    return Taken(source, action, str(store.path), size, moved_to=moved)


def _written(store: Store, content: bytes, table: Table, *, force: bool) -> tuple[str, str]:
    with store.locked():
        moved: Path | None = None
        if os.path.lexists(store.path):
            there = store.read(table.stamps)
            if there.table is not None and there.table.entries == table.entries:
                return "there", ""
            if not force:
                size = len(there.table.entries) if there.table else 0
                found = f"{there.status.value}, {size} entries"
                raise ValueError(f"another table is there ({found}): {store.path}; see --force")
            moved = store.quarantine("replaced")
        try:
            write_whole(store.path, content)
        except OSError:
            if moved is not None:
                store.bring_back(moved)
            raise
        with contextlib.suppress(OSError):  # it was of the table that is no longer here
            history_path(store.path).unlink(missing_ok=True)
    return "taken", str(moved or "")


def _newest(directory: Path) -> list[Path]:
    found: list[tuple[float, Path]] = []
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError):  # someone pruned it
            found.append((path.lstat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)[:_MOST_WAITING]]


def adoptable(store: Store, stamps: Mapping[str, str]) -> tuple[Verdict, tuple[Path, ...]]:
    """What imported tables of an environment offer a start that has no table of its own.

    Args:
        store: The start's own place, where no table is.
        stamps: The environment.

    Returns:
        One table of them all, the newest first, and the files; ``absent`` where there is none.
    """
    waiting = store.path.parent.parent / WAITING
    sound: list[tuple[str, str, Path, Entries]] = []
    for path in _newest(waiting):
        table = Store(path).read(stamps).table
        if table is not None:
            sound.append((str(table.about.get("written")), path.name, path, table.entries))
    if not sound:
        return Verdict(Status.ABSENT), ()
    sound.sort(reverse=True)
    entries = merge(one[3] for one in sound)
    paths = tuple(one[2] for one in sound)
    about = {"digest": content_digest(entries)}
    why = f"imported: {', '.join(path.name for path in paths)}"
    return Verdict(Status.IMPORTED, Table(entries, dict(stamps), about), why), paths
