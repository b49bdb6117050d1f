"""The trial of a stored table: which starts loaded it, and did not live through their first run.

Some tactics do not raise: they take the process down, and the next start would load them again.
So who loads a table first puts a marker beside it, holds a lock, and takes the marker away after
the first run. A marker whose lock is free was left by a start that died. The lock says who lives, a
process id could not: containers restart with the same ids, and a volume is shared by hosts.

Nothing here raises for what is wrong with a disk: without a marker a table is on no trial.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from filelock import FileLock

from fi_flags.store import Store, read_regular, write_whole

__all__ = ["DEATHS", "Trial"]

DEATHS: Final = 2
"""So many starts in a row that died on a table condemn it."""

# Ranks of one start look at a marker for a moment each; an engine that lives holds it for long.
_LOOK_S = 1.0


@dataclass(frozen=True)
class _Marker:
    """What a marker file says.

    Attributes:
        digest: Of the table on trial.
        starts: How many starts ran on it, or where it was set aside without it, and none to an end.
        aside: The name of the file to which it was moved, if it was.
        acquitted: Whether a start without it died as well, so that it was not to blame.
    """

    digest: str = ""
    starts: int = 0
    aside: str = ""
    acquitted: bool = False


class Trial:
    """The marker of one table, as one rank sees it.

    Attributes:
        aside: Where the table on trial was moved, by this start or by one that died.
    """

    def __init__(self, store: Store) -> None:
        self.aside: Path | None = None
        self._store = store
        self._path = store.path.with_suffix(".trial")
        self._lock = FileLock(store.path.with_suffix(".trial.lock"))
        self._held = False
        self._marker = _Marker()

    def recover(self) -> bool:
        """Bring a table back that was set aside, if a start without it died as well.

        Before vote 1, on every rank that could load it; the first to come does it.

        Returns:
            Whether this rank brought it back.
        """
        if not self._path.exists() or not self._take(_LOOK_S):
            return False
        back = False
        try:
            found = self._marker
            if found.aside and found.starts:
                with contextlib.suppress(FileNotFoundError):  # someone pruned it
                    back = self._store.bring_back(self._store.path.with_name(found.aside))
                self._write(_Marker(found.digest, acquitted=True) if back else _Marker())
        except OSError:
            pass
        finally:
            self.leave()
        return back

    def begin(self, digest: str) -> int:
        """Put the marker beside a table that is about to be loaded.

        Returns:
            How many starts in a row died on it; ``DEATHS`` or more: it must not be loaded.
        """
        if not self._take(0.0):
            return 0
        known = self._marker if self._marker.digest == digest else _Marker(digest)
        self._write(dataclasses.replace(known, starts=known.starts + 1, aside=""))
        return 0 if known.acquitted else known.starts

    def begin_without(self) -> None:
        """Note a start that tunes afresh, if an earlier one set the table aside."""
        if self._path.exists() and self._take(0.0) and self._marker.aside:
            self.aside = self._store.path.with_name(self._marker.aside)
            self._write(dataclasses.replace(self._marker, starts=self._marker.starts + 1))

    def withdraw(self) -> None:
        """The table is not loaded after all: the marker says what it said before ``begin``."""
        if self._held:
            self._write(dataclasses.replace(self._marker, starts=self._marker.starts - 1))
            self.leave()

    def set_aside(self, aside: Path, *, tuning: bool) -> None:
        """Note that the table on trial was moved away.

        Args:
            aside: Where it is now.
            tuning: Whether this very start goes on without it.
        """
        self.aside = aside
        if self._held:
            self._write(_Marker(self._marker.digest, starts=int(tuning), aside=aside.name))

    def end(self) -> None:
        """The start lived: take the marker away."""
        if self._held:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self.leave()

    def leave(self) -> None:
        """Let go of the lock, and leave the marker as it is."""
        if self._held:
            self._held = False
            self._lock.release()

    @contextlib.contextmanager
    def ending(self, leaves: type[BaseException]) -> Iterator[None]:
        """Take the marker away when the block ends, or this process is asked to stop.

        Args:
            leaves: An exception that counts as a death: a rank was lost in the block.
        """
        try:
            with _when_terminated(self.end):
                yield
        except leaves:
            self.leave()
            raise
        finally:
            self.end()

    def _take(self, seconds: float) -> bool:
        """Hold the lock and read the marker; False where another holds it, or there can be none."""
        try:
            self._lock.acquire(timeout=seconds)
        except (OSError, NotImplementedError):  # Timeout is one
            return False
        self._held = True
        self._marker = _read(self._path)
        return True

    def _write(self, marker: _Marker) -> None:
        self._marker = marker
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(dataclasses.asdict(marker)).encode("ascii"))


def _read(path: Path) -> _Marker:
    """A marker; one that is not there, or that nobody of us wrote, says nothing."""
    try:
        fields = json.loads(read_regular(path, 4096))
        marker = _Marker(**fields)
    except (OSError, ValueError, TypeError, RecursionError):
        return _Marker()
    kinds = {field.name: type(field.default) for field in dataclasses.fields(_Marker)}
    sound = all(type(value) is kinds[name] for name, value in fields.items())
    return marker if sound and Path(marker.aside).name == marker.aside else _Marker()


@contextlib.contextmanager
def _when_terminated(act: Callable[[], object]) -> Iterator[None]:
    """Act when the process is asked to stop (SIGTERM), before what else it does then."""
    earlier = signal.getsignal(signal.SIGTERM)
    # None: a handler that is not Python's, which could not be called from here.
    if threading.current_thread() is not threading.main_thread() or earlier in (
        None,
        signal.SIG_IGN,
    ):
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        act()
        if callable(earlier):
            earlier(number, frame)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, earlier)
