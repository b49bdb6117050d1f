"""A rank's thread: it beats, watches the others, and brings the rank out of the model if it must.

The judgement of who is lost is in ``watch.py``; here it is acted upon.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from fi_flags.errors import RanksError
from fi_flags.watch import Deadlines, Failure, Watch, activity, progress_of
from fi_flags.wire import Wire

__all__ = ["FAILURE", "GONE", "PARTING_S", "EndProcess", "Pulse", "Tell", "post_first"]

FAILURE = "failure"
GONE = "gone"
_ABORT_S = 5.0
PARTING_S = 2.0


class Tell(Protocol):
    """Receives what a pulse has to say: ``waiting``, ``tuning``, ``peer_failed``, ``ended``."""

    def __call__(self, event: str, **fields: Any) -> None: ...  # noqa: ANN401, D102


class EndProcess(Protocol):
    """Ends this process with an exit code; ``os._exit`` but in tests."""

    def __call__(self, status: int, /) -> object: ...  # noqa: D102


def post_first(wire: Wire, key: str, failure: Failure) -> Failure:
    """Post a failure unless the group has one already; return the one that counts."""
    return Failure.of(wire.compare_set(key, "", json.dumps(dataclasses.asdict(failure))))


class Pulse:
    """This rank's thread: beats, watches, and brings the rank out of the model if it must.

    Attributes:
        state: What the next heartbeats say; replaced whole, so that no lock is needed.
        waiting: Keys that this rank waits for now, by the rank that owes them.
        aborted: Whether the watchdog broke torch's groups, which nothing mends.
        trial: Where this rank's group posts a failure that it may mend by itself, while it may.
        peers: The ranks of this one's tuning group.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        host: str,
        wire: Wire,
        deadlines: Deadlines,
        tell: Tell,
        end_process: EndProcess,
    ) -> None:
        self.state: dict[str, Any] = {"phase": "join"}
        self.waiting: dict[int, str] = {}
        self._rank = rank
        self._host = host
        self._wire = wire
        self._deadlines = deadlines
        self._teller = tell
        self._end_process = end_process
        self.trial = ""
        self._failure: Failure | None = None
        self._tried: Failure | None = None
        self._gone: Failure | None = None
        self._inside = False
        self.aborted = False
        self.peers = frozenset(range(world))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._beats = 0
        self._began = self._reported = time.monotonic()
        self._grace_from: float | None = None
        self._grace_progress: tuple[Any, ...] = ()
        sees_all = rank == 0 and world > 1
        watched = range(world) if sees_all else [0]
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
    def watch(self, trial: str = "") -> Iterator[None]:
        """Allow the watchdog to act: the main thread is inside the model.

        Args:
            trial: Where the group posts a failure that need not concern other groups.
        """
        self._grace_from = None
        self.trial = trial
        self._inside = True
        try:
            yield
        finally:
            with self._lock:  # never ended half-way out
                self._inside = False
                if trial:
                    # All may come out and try again, and then this failure was nothing.
                    self.trial, self._tried = "", None

    def close(self, deserted: str = "") -> None:
        """Say good-bye, or why this rank deserts its group, and stop."""
        self._stop.set()
        self._thread.join(timeout=self._deadlines.tick + 1.0)
        self._wire.hurry(PARTING_S)
        with contextlib.suppress(RuntimeError):
            self._post(**({"ended": deserted} if deserted else {"left": True}))
        self._wire.close()

    def _tell(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - a Tell
        with contextlib.suppress(Exception):  # a server's log handler must not stop the watch
            self._teller(event, **fields)

    def _run(self) -> None:
        while not self._stop.wait(self._deadlines.tick):
            try:
                self._post()
                self._look()
                self._report()
            except RuntimeError as error:  # torch's DistError family
                self._give_up((0,), f"the ranks' store does not answer: {error}")
            except Exception as error:  # noqa: BLE001 - a silent pulse would look like a dead rank
                self._give_up((self._rank,), f"its pulse stopped: {type(error).__name__}: {error}")
            if self._inside and (self._failed() or self._gone):
                self._bring_out()

    def _failed(self) -> Failure | None:
        return self._failure or self._tried

    def _give_up(self, ranks: tuple[int, ...], cause: str) -> None:
        self._gone = Failure("lost", ranks, "", str(self.state["phase"]), cause.splitlines()[0])

    def _post(self, **more: Any) -> None:  # noqa: ANN401 - JSON
        self._beats += 1
        beat = {**self.state, "host": self._host, "n": self._beats, **more}
        if self.waiting:
            beat["waiting"] = True
        self._wire.set(f"beat/{self._rank}", json.dumps(beat))

    def _look(self) -> None:
        if self._failure is None and self._wire.check([FAILURE]):
            self._failure = Failure.of(self._wire.get(FAILURE))
        trial = self.trial
        if trial and self._tried is None and self._wire.check([trial]):
            tried = Failure.of(self._wire.get(trial))
            with self._lock:
                self._tried = tried if self.trial else None
        if self._gone is None and self._wire.check([GONE]):
            self._gone = Failure.of(self._wire.get(GONE))
        now = time.monotonic()
        # Once there, a heartbeat stays; asking for all at once spares a large group the many calls.
        new = sorted(self._watch.ranks - self._watch.heard.keys())
        if new and not self._wire.check([f"beat/{rank}" for rank in new]):
            new = [rank for rank in new if self._wire.check([f"beat/{rank}"])]
        here = sorted({*self._watch.heard, *new})
        beats = self._wire.multi_get([f"beat/{rank}" for rank in here]) if here else []
        for rank, beat in zip(here, beats, strict=True):
            self._watch.hear(rank, json.loads(beat), now)
        if self._gone is None:
            gone = self._watch.judge(now, failed=self._failed() is not None)
            if gone is not None:
                self._gone = post_first(self._wire, GONE, gone)

    def _report(self) -> None:
        now = time.monotonic()
        if self._rank != 0 or now - self._reported < self._deadlines.report:
            return
        self._reported = now
        waiting = self.waiting
        fields = {**self.state, "seconds": round(now - self._began, 1)}
        if waiting:
            late = [rank for rank, key in waiting.items() if not self._wire.check([key])]
            doing = {
                str(rank): f"{heard.beat.get('phase')}{activity(heard.beat)}"
                for rank in late[:8]
                if (heard := self._watch.heard.get(rank))
            }
            if late:
                self._tell("waiting", ranks=late, doing=doing, **fields)
        else:
            self._tell("tuning", **fields)

    def _bring_out(self) -> None:
        """Bring this rank out of the model: a peer that failed will not meet it there again."""
        cause = self._gone or self._failed()
        if cause is None:
            return
        if self._deadlines.patient and self._gone is None and not self.peers & set(cause.ranks):
            return  # another group goes on untuned; should this one need it, that is a standstill
        now = time.monotonic()
        progress = progress_of(self.state)
        if self._grace_from is None:
            self._tell("peer_failed", cause=cause.describe(), grace=self._deadlines.grace)
            self._grace_from, self._grace_progress = now, progress
        if self._deadlines.patient and progress != self._grace_progress:
            self._grace_from, self._grace_progress = now, progress
        if self._deadlines.grace is None or now - self._grace_from < self._deadlines.grace:
            return
        with self._lock:
            if not self._is_inside():
                return
            self.aborted = _default_group() is not None
        self._abort_groups()
        with self._lock:
            if not self._is_inside():
                return
            self._wire.hurry(PARTING_S)
            said = f"its watchdog ended it, since {cause.describe()}"
            self._tell("ended", cause=cause.describe(), exit_code=RanksError.exit_code)
            with contextlib.suppress(RuntimeError):
                self._post(ended=said)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            self._end_process(RanksError.exit_code)
            self._inside = False  # only where ending a process is a test's own function

    def _is_inside(self) -> bool:
        return self._inside  # the main thread changes it meanwhile

    def _abort_groups(self) -> None:
        """Abort torch's default group; NCCL wakes up from that, gloo does not."""
        thread = threading.Thread(target=_abort_default_group, daemon=True)
        thread.start()  # an abort can hang itself
        give_up = time.monotonic() + min(_ABORT_S, self._deadlines.grace or 0.0)
        while self._inside and time.monotonic() < give_up:
            time.sleep(0.02)


def _default_group() -> Any:  # noqa: ANN401 - torch's, if torch is there
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def _abort_default_group() -> None:
    with contextlib.suppress(Exception):
        _default_group().abort()
