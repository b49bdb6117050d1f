"""One run of the workload on a rank, and what a rank does between two votes.

Nothing here may raise between votes: what goes wrong on a rank becomes its next tally.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from fi_flags import logs
from fi_flags.ballots import Tally
from fi_flags.errors import RanksError
from fi_flags.plan import Action, Plan
from fi_flags.ranks import Meeting, Talk
from fi_flags.shadow import Comparison, Timed, compare
from fi_flags.table import Entries, op_of, serving_digest
from fi_flags.tuner import KEEP_GROUP, Counts, OnStep, Pass, Snapshot, Tuner
from fi_flags.workloads import Workload

__all__ = ["Crew", "Run", "attempt", "give_back", "vote"]


@dataclass(frozen=True)
class Crew:
    """What a strategy works with on this rank.

    Attributes:
        meeting: The world's conversation, heartbeats and watchdog.
        talk: The tuning group's conversation.
        before: What the tuner held before the warm-up.
    """

    meeting: Meeting
    talk: Talk
    tuner: Tuner
    before: Snapshot | None
    workload: Workload
    log: BoundLogger
    on_step: OnStep | None = None

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self.talk.rank


class Run:
    """One run of the workload on this rank: what it did, and what serves it afterwards."""

    def __init__(self, crew: Crew, plan: Plan) -> None:
        self._crew = crew
        self._plan = plan
        self._on_step = crew.on_step
        self._counts = Counts()
        self._seen: Pass | None = None
        self._seconds = 0.0
        self._digest = ""
        self._dead = ""
        self._shadow = Comparison()
        self.cause: Exception | None = None
        self.served: Entries = {}

    def go(self, *, tune: bool, alone: bool) -> None:
        """Run the workload under FlashInfer's autotune; a failure is told to the group at once."""
        crew = self._crew
        # A failure on a loaded table is the group's own affair, which it may mend.
        trial = self._plan.action is Action.WARM
        crew.meeting.at("run")
        group = crew.meeting.ranks.process_group if self._plan.sync else None
        began = time.perf_counter()
        seen: Pass | None = None
        try:
            with (
                crew.meeting.inside(trial=trial),
                crew.tuner.run(
                    tune=tune,
                    skip_ops=self._plan.skip_ops,
                    group=group if alone else KEEP_GROUP,
                    on_step=self._step,
                    opens_itself=getattr(crew.workload, "tunes_itself", False),
                ) as seen,
            ):
                crew.workload.run()
            self._seen = seen
        except Exception as error:  # noqa: BLE001 - it becomes this rank's tally
            self.cause = error
            self._dead = crew.tuner.dead()
            crew.meeting.fail(error, trial=trial and not self._dead)
        self._seconds = round(time.perf_counter() - began, 3)
        with attempt():  # for the trace only
            self._trace(seen)

    def _trace(self, seen: Pass | None) -> None:
        for one in seen.tuned if seen else ():
            call = seen.form.file_key(one.site[0]) if seen and one.site else ""
            name, details = op_of(call) or "tuning", {"call": call, "tactics": one.tactics}
            self._crew.meeting.timeline.add("profile", name, one.began, one.ended, **details)

    def unload(self, stored: Entries) -> None:
        """Forget what was loaded and not asked for; after ``note_served``."""
        self._crew.tuner.unload(stored.keys() - self.served.keys())

    def count(self) -> None:
        """Take note of what the run loaded, tuned and missed; before anything is settled."""
        if self._seen is not None:
            self._counts = self._crew.tuner.counts(self._seen)

    def note_served(self, also: Iterable[str]) -> None:
        """Settle what the workload looked up, and take note of what serves it and ``also``.

        Where nothing is cached nothing is settled either: what serves stays as it was tuned.
        """
        if self._seen is None:
            return
        tuner = self._crew.tuner
        if self._plan.action is not Action.UNCACHED:
            if "settle" not in self._plan.without:
                tuner.settle(self._seen)
            tuner.give_up(self._seen)
        self.served = tuner.export(self._seen, also)
        self._digest = serving_digest(self.served)
        missing = tuner.counts(self._seen).missing
        self._counts = dataclasses.replace(
            self._counts, missing=missing, failed=min(missing, self._counts.failed)
        )

    def compare(self, stored: Entries) -> None:
        """Hold a stored table against what serves now; after ``note_served``."""
        if self._seen is not None:
            form = self._seen.form
            timed = [
                Timed([form.file_key(key) for key in one.site], one.ended - one.began, one.times)
                for one in self._seen.tuned
            ]
            self._shadow = compare(self.served, stored, timed)

    def calls(self) -> list[tuple[str, ...]]:
        """The calls of the run, each as the file keys of all runners that could serve it."""
        return [] if self._seen is None else self._seen.calls()

    def tally(self, error: str = "") -> Tally:
        """What this rank votes about its run, and about what it did with the result."""
        if self.cause is not None:
            error = f"{type(self.cause).__name__}: {self.cause}"
        counts = dataclasses.asdict(self._counts)
        counts["loaded"] += counts.pop("held")
        return Tally(
            rank=self._crew.rank,
            host=self._crew.meeting.ranks.host,
            ok=not error,
            ran=self.cause is None,
            aborted=self._crew.meeting.aborted,
            dead=self._dead,
            error=error,
            digest="" if error else self._digest,
            entries=len(self.served),
            seconds=self._seconds,
            shadow=self._shadow,
            **counts,
        )

    def _step(self, op: str, done: int, total: int) -> None:
        self._crew.meeting.progress(op, done, total)
        if self._on_step is not None:
            try:
                self._on_step(op, done, total)
            except Exception as error:  # noqa: BLE001 - who draws a bar must not stop a start
                self._on_step = None
                why = f"{type(error).__name__}: {error}"
                self._crew.log.warning(logs.NO_PROGRESS, why=why)


def vote(crew: Crew, tally: Tally) -> list[Tally]:
    """Exchange tallies within the group."""
    return [Tally.from_json(fields) for fields in crew.talk.vote(tally.to_json())]


@dataclass
class Attempt:
    error: str = ""


@contextlib.contextmanager
def attempt() -> Iterator[Attempt]:
    """Do something that may fail between two votes: the failure becomes this rank's tally."""
    tried = Attempt()
    try:
        yield tried
    except RanksError:
        raise  # the conversation itself is broken: there is no next vote
    except Exception as error:  # noqa: BLE001 - invariant 2: no exception leaves between votes
        tried.error = f"{type(error).__name__}: {error}"


def give_back(crew: Crew, held: Snapshot | None) -> None:
    """Put back what the tuner held, after a vote: where even that fails, go on with what is there.

    The group's votes must stay in step; what a rank then serves is compared in the next one.
    """
    with attempt() as tried:
        if held is not None:
            crew.tuner.give_back(held)
    if tried.error:
        crew.log.warning(logs.NOT_GIVEN_BACK, why=tried.error)
