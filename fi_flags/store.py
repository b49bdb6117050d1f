"""Tables on disk: where they live, how they are read, and how they are published whole.

Layout: ``<cache_dir>/v1/<environment>/<workload>/<group>.json``. Nothing here raises for what is
wrong with a file when reading; publishing raises ``OSError`` or ``TableError``, which a warm-up
turns into a warning.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock

from fi_flags.errors import TableError
from fi_flags.table import MAX_BYTES, Status, Table, Verdict, judge, merge

__all__ = [
    "QUARANTINED",
    "Store",
    "environment_name",
    "plain_identity",
    "read_regular",
    "workload_name",
    "write_whole",
]

_LOCK_S = 10.0
QUARANTINED = ".quarantined-"
_KEPT_ASIDE = 3


def environment_name(stamps: Mapping[str, str]) -> str:
    """A directory name for an environment: FlashInfer's version, the GPU, a digest of all stamps.

    Args:
        stamps: What FlashInfer writes into a table's ``_metadata``.
    """
    gpu = stamps.get("gpu", "unknown")
    return _file_name(stamps.get("flashinfer_version", "unknown"), gpu, _digest(stamps))


def plain_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as JSON has it, so that it names the same workload in every process.

    Raises:
        ValueError: Some value is not JSON, and its text holds an address of this process.
    """
    text = json.dumps(identity, default=str)
    if re.search(r" at 0x[0-9a-fA-F]{6,}", text):
        raise ValueError(f"the workload's identity differs from process to process: {text[:200]}")
    plain: dict[str, Any] = json.loads(text)
    return plain


def workload_name(name: str, identity: Mapping[str, Any]) -> str:
    """A directory name for a workload: its short name and a digest of its identity."""
    return _file_name(name, _digest(identity))


@dataclass(frozen=True)
class Store:
    """The place of one table.

    Attributes:
        path: The table's file.
    """

    path: Path

    @classmethod
    def at(cls, cache_dir: Path, environment: str, workload: str, group: str) -> Store:
        """The store of one environment, workload and group of ranks under cache_dir."""
        name = _file_name(group)
        if name != group:  # cut or cleaned, it may be the name of another group too
            name = _file_name(group, _digest({"group": group}))
        return cls(cache_dir / "v1" / environment / workload / f"{name}.json")

    def read(self, stamps: Mapping[str, str]) -> Verdict:
        """Read and judge the table; what is wrong with it is the verdict, never an exception."""
        try:
            data = read_regular(self.path, MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return Verdict(Status.ABSENT)
        except (OSError, ValueError) as error:
            return Verdict(Status.UNREADABLE, why=str(error))
        return judge(data, stamps)

    def writable(self) -> bool:
        """Whether publishing looks possible; nothing is created to find out."""
        place = self.path.parent
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        return place.is_dir() and os.access(place, os.W_OK | os.X_OK)

    def publish(
        self, table: Table, aside: Callable[[Path, str], object] = lambda _path, _why: None
    ) -> bool:
        """Write the table so that a reader sees the old file or the new one, whole.

        Entries of a sound table already there whose calls the new one does not answer are kept:
        another engine's keys, or ops that are skipped today. A file that cannot be used is moved
        aside, not overwritten; one of another environment is left alone.

        Args:
            table: What to write.
            aside: Told where a file that could not be used was moved, and why.

        Returns:
            True if the file was written, False if it already held these entries.

        Raises:
            OSError: The directory or file cannot be made, written, or renamed.
            TableError: A table of another environment is in the way.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.locked():
            found = self.read(table.stamps)
            if found.status is Status.FOREIGN:
                raise TableError(
                    f"{self.path} belongs to another environment: {found.why}",
                    hint="it was left as it is; name another VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
                    path=str(self.path),
                    status=found.status.value,
                )
            if found.table is not None:
                entries = merge([table.entries, found.table.entries])
                if entries == found.table.entries:
                    return False
                table = Table(entries, table.stamps, table.about)
            elif found.status is not Status.ABSENT:
                self._set_aside(found, aside)
            write_whole(self.path, table.render())
        return True

    def quarantine(self, why: str) -> Path | None:
        """Rename the table, so that it is not read again and not lost; the newest three are kept.

        Args:
            why: One word, for the name.

        Returns:
            Where it went, or None if no table was there.

        Raises:
            OSError: It cannot be renamed.
        """
        when = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = self.path.with_name(f"{self.path.name}{QUARANTINED}{when}-{why}")
        try:
            self.path.replace(aside)
        except FileNotFoundError:  # another was quicker
            return None
        # The time in their names makes names sort by age.
        for old in sorted(self.quarantined())[:-_KEPT_ASIDE]:
            with contextlib.suppress(OSError):
                old.unlink()
        return aside

    def quarantined(self) -> list[Path]:
        """The files that were moved aside from this table's place."""
        return list(self.path.parent.glob(f"{glob.escape(self.path.name)}{QUARANTINED}*"))

    def bring_back(self, aside: Path) -> bool:
        """Undo a quarantine, unless a table is in the place again.

        Raises:
            OSError: It cannot be renamed.
        """
        if os.path.lexists(self.path):
            return False
        aside.replace(self.path)
        return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers of this place out for as long as the block runs, where that works."""
        lock = FileLock(self.path.with_suffix(".lock"), timeout=_LOCK_S)
        try:
            lock.acquire()
        except (OSError, NotImplementedError):  # held (Timeout is one), not ours, not supported
            # It costs a merge at worst: the rename is atomic without a lock.
            yield
            return
        try:
            # Only who holds the lock writes here, so what lies about is from one who was killed.
            for leftover in self.path.parent.glob(f".{self.path.stem}.*.tmp"):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            yield
        finally:
            lock.release()

    def _set_aside(self, found: Verdict, aside: Callable[[Path, str], object]) -> None:
        if self.path.is_file() and not os.access(self.path, os.R_OK):
            raise TableError(
                f"{self.path} cannot be read: {found.why}",
                hint="it may be sound, so it was left as it is; mend its owner or its mode",
                path=str(self.path),
                status=found.status.value,
            )
        moved = self.quarantine(found.status.value)
        if moved is not None:
            aside(moved, found.why)


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: It cannot be read, or is a link.
        ValueError: It is something else than a file, or larger than ``most`` bytes.
    """
    # O_NOFOLLOW and O_NONBLOCK: neither a link nor a named pipe in a table's place may lead us on.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > most:
            raise ValueError(f"{found.st_size} bytes, more than {most}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most + 1)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, whole, even after a power cut.

    Raises:
        OSError: It cannot be written, or renamed.
    """
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.stem}.{os.getpid()}.", suffix=".tmp"
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            # mkstemp makes the file private; a table is for every rank and user of the volume.
            with contextlib.suppress(OSError):  # some mounts know no modes
                os.fchmod(descriptor, 0o644)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)  # noqa: PTH105 - tests make this very call fail
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108 - a plain string
        raise
    _fsync_directory(path.parent)


def _fsync_directory(directory: Path) -> None:
    # The rename itself must survive a power cut; some network mounts refuse to sync a directory.
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _file_name(*parts: str) -> str:
    # The digest part is what tells names apart; the others are for people, so they may be cut.
    return "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", part)[:40].lstrip(".") or "_" for part in parts)
