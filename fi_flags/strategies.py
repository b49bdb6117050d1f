"""The two ways to warm a group up, behind one protocol.

Per-rank: every rank tunes what it runs, and all meet. Leader/worker: one table for the group; the
leader owns it, every rank contributes to it, and all serve the same tactics.

Between two votes nothing may raise: what goes wrong on a rank becomes its next tally, and what the
group does next follows from all tallies (``plan.py``). Only the loss of a rank ends it sooner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from structlog.stdlib import BoundLogger

from fi_flags import logs
from fi_flags.ballots import Tally
from fi_flags.decision import Reason
from fi_flags.errors import RanksError, WorkloadError
from fi_flags.exchange import exchange
from fi_flags.plan import Action, Next, Plan, after_run, all_loaded
from fi_flags.ranks import Meeting, Talk
from fi_flags.report import Outcome, TableReport
from fi_flags.settings import OnFailure
from fi_flags.store import Store
from fi_flags.table import (
    Entries,
    Status,
    Table,
    Verdict,
    merge,
    serving_digest,
    split_ops,
)
from fi_flags.tuner import KEEP_GROUP, Counts, OnStep, Pass, Snapshot, Tuner
from fi_flags.workloads import Workload

__all__ = ["Crew", "LeaderWorker", "PerRank", "Result", "Strategy"]


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


@dataclass(frozen=True)
class Result:
    """What a strategy came to: the plan as it ended, and the tallies of all ranks."""

    outcome: Outcome
    plan: Plan
    tallies: Sequence[Tally]
    table: TableReport | None = None


class Strategy(Protocol):
    """Carries a plan out; every rank of the group calls it with the same plan."""

    def carry_out(self, crew: Crew, plan: Plan) -> Result:
        """Warm this rank up together with its group.

        Raises:
            RanksError: A rank was lost, or is stuck.
            WorkloadError: The workload failed on some rank, and the plan says to raise.
        """
        ...


@dataclass
class PerRank:
    """Every rank tunes alone, nothing touches the disk, then all meet: what vLLM does today."""

    def carry_out(self, crew: Crew, plan: Plan) -> Result:
        """Run, and vote; the vote is the barrier, and carries a failure to every rank."""
        run = _Run(crew, plan)
        run.go(tune=True, alone=False)
        with _attempt():  # counts are for the report only
            run.count()
        tallies = _vote(crew, run.tally())
        if after_run(plan, tallies) is Next.FAIL:
            return _failed(crew, plan, tallies, run)
        return Result(Outcome.UNCACHED, plan, tallies)


@dataclass
class LeaderWorker:
    """One table for the group, on disk, and the same tactics on every rank.

    Attributes:
        store: Where the table lives on this rank's machine.
        found: What was found there before vote 1.
        stamps: FlashInfer's environment stamps, equal on all ranks.
        about: What the table says of its making, beside its entries.
    """

    store: Store
    found: Verdict
    stamps: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    def carry_out(self, crew: Crew, plan: Plan) -> Result:
        """Load, run, merge where ranks differ, publish."""
        stored: Entries = {}
        undo: Snapshot | None = None
        if plan.action is Action.WARM:
            plan, stored, undo = self._load(crew, plan)
        run, tallies, error = self._run(crew, plan, stored)
        following = after_run(plan, tallies)
        aside: Path | None = None
        if following is Next.RETUNE:
            plan, aside = self._distrust(crew, plan, tallies, undo)
            stored = {}
            run, tallies, error = self._run(crew, plan, stored)
            following = after_run(plan, tallies)
        if following is Next.FAIL:
            if any(t.dead for t in tallies) and plan.action is Action.WARM:
                self._set_aside(crew, plan, f"a run on it left a GPU unusable: {_told(tallies)}")
            else:
                self._acquit(crew, aside)
            return _failed(crew, plan, tallies, run)
        if following is Next.MERGE:
            refused, tallies = self._merge(crew, plan, run, error)
            if refused:
                plan = dataclasses.replace(
                    plan, action=Action.UNCACHED, reason=Reason.CACHE_UNUSABLE, why=refused
                )
                return Result(Outcome.UNCACHED, plan, tallies)
        outcome = _outcome(plan, tallies)
        if outcome is Outcome.UNTUNED:
            return Result(outcome, plan, [dataclasses.replace(t, digest="") for t in tallies])
        table = self._publish(crew, plan, outcome, run, tallies, stored)
        return Result(outcome, plan, tallies, table)

    def _run(self, crew: Crew, plan: Plan, stored: Entries) -> tuple[_Run, Sequence[Tally], str]:
        """Run the workload and vote on it; also what kept this rank from saying what it serves."""
        run = _Run(crew, plan)
        run.go(tune=crew.rank in plan.tuners, alone=True)
        with _attempt() as attempt:
            run.count()
            run.note_served(split_ops(stored, plan.skip_ops)[0])
        # Ranks that could not say what they serve differ from all others, so a merge follows.
        return run, _vote(crew, run.tally(attempt.error)), attempt.error

    def _distrust(
        self, crew: Crew, plan: Plan, tallies: Sequence[Tally], undo: Snapshot | None
    ) -> tuple[Plan, Path | None]:
        """After a loaded table failed its first run: give it back, and set the file aside."""
        _give_back(crew, undo)
        why = f"a run on the table of {plan.stored.place} failed: {_told(tallies)}"
        aside = self._set_aside(crew, plan, why)
        plan = dataclasses.replace(plan.without_table(why), retuned=True)
        if crew.talk.first:
            crew.log.warning(logs.RETUNING, action=plan.action.value, why=why)
        return plan, aside

    def _set_aside(self, crew: Crew, plan: Plan, why: str) -> Path | None:
        """Move this disk's table aside, where that is for this rank to do; never raises."""
        if not (plan.publish and crew.rank in plan.publishers and self.found.table is not None):
            return None
        aside: Path | None = None
        with _attempt() as attempt:
            aside = self.store.quarantine("failed_run")
        if aside is not None:
            self.found = Verdict(Status.ABSENT)
            crew.log.warning(logs.QUARANTINED, moved_to=str(aside), why=why)
        elif attempt.error:
            path = str(self.store.path)
            crew.log.warning(logs.NOT_QUARANTINED, path=path, why=attempt.error)
        return aside

    def _acquit(self, crew: Crew, aside: Path | None) -> None:
        """The workload failed without the table too, so the table comes back."""
        if aside is not None:
            with _attempt() as attempt:
                self.store.bring_back(aside)
            path, why = str(self.store.path), attempt.error or "the workload fails without it too"
            crew.log.warning(logs.BROUGHT_BACK, path=path, why=why)

    def _load(self, crew: Crew, plan: Plan) -> tuple[Plan, Entries, Snapshot | None]:
        """Bring the table to every rank and load it; vote 2 says whether that worked."""
        crew.meeting.at("load")
        undo: Snapshot | None = None
        own = self.found.table.entries if self.found.table else {}
        stored: Entries = {}
        with _attempt() as attempt:
            stored = own
            if plan.exchange:
                stored = exchange(crew.talk, plan.leader, own, expected=plan.stored.digest)
            wanted, _ = split_ops(stored, plan.skip_ops)
            undo = crew.tuner.load(wanted, self.stamps)
        host, error = crew.meeting.ranks.host, attempt.error
        tally = Tally(rank=crew.rank, host=host, ok=not error, error=error)
        refused = all_loaded(_vote(crew, tally))
        if refused:
            _give_back(crew, undo)
            return plan.without_table(f"the table could not be loaded: {refused}"), {}, None
        return plan, stored, undo

    def _merge(self, crew: Crew, plan: Plan, run: _Run, error: str) -> tuple[str, Sequence[Tally]]:
        """Bring what the ranks tuned together, so that all serve the same; vote 4."""
        crew.meeting.at("merge")
        undo: Snapshot | None = None
        with _attempt() as attempt:
            merged = exchange(crew.talk, plan.leader, run.served, sites=run.calls(), error=error)
            undo = crew.tuner.load(merged, self.stamps)
            run.note_served(merged)
        tallies = _vote(crew, run.tally(attempt.error))
        refused = all_loaded(tallies)
        if not refused and len({t.digest for t in tallies}) > 1:
            refused = "the ranks serve different tactics after a merge"
        if refused:
            _give_back(crew, undo)
        return refused, tallies

    def _publish(
        self,
        crew: Crew,
        plan: Plan,
        outcome: Outcome,
        run: _Run,
        tallies: Sequence[Tally],
        stored: Entries,
    ) -> TableReport | None:
        """Write the table where it is not yet; a failure is one warning for each disk."""
        if not run.served and not stored:
            if crew.talk.first and any(tally.failed for tally in tallies):
                crew.log.warning(logs.NOT_KEPT, path="", why="no tactic of any profile worked")
            elif crew.talk.first:
                crew.log.info(logs.NOTHING_TO_TUNE)
            return None
        entries = merge([run.served, stored])
        kept: bool | None = None
        if crew.rank in plan.publishers:
            kept = self.found.table is not None and self.found.table.entries == entries
            if plan.publish and not kept:
                crew.meeting.at("publish")
                about = self._about(crew, plan, outcome, tallies)

                def aside(moved: Path, why: str) -> None:
                    crew.log.warning(logs.QUARANTINED, moved_to=str(moved), why=why)

                try:
                    self.store.publish(Table(entries, self.stamps, about), aside)
                    kept = True
                except Exception as error:  # noqa: BLE001 - the others have left: nothing may raise
                    why = f"{type(error).__name__}: {error}"
                    crew.log.warning(logs.NOT_KEPT, path=str(self.store.path), why=why)
        return TableReport(str(self.store.path), len(entries), tallies[0].digest, kept)

    def _about(
        self, crew: Crew, plan: Plan, outcome: Outcome, tallies: Sequence[Tally]
    ) -> dict[str, Any]:
        recorded = plan.stored.cold_seconds
        spent = max(tally.seconds for tally in tallies)
        tuned = {Outcome.COLD: spent, Outcome.RETUNED: spent, Outcome.TOPPED_UP: recorded + spent}
        return {
            **self.about,
            "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "host": crew.meeting.ranks.host,
            "ranks": len(plan.members),
            "cold_seconds": round(tuned.get(outcome, recorded), 3),
        }


class _Run:
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
        try:
            with (
                crew.meeting.inside(trial=trial),
                crew.tuner.run(
                    tune=tune,
                    skip_ops=self._plan.skip_ops,
                    group=group if alone else KEEP_GROUP,
                    on_step=self._step,
                ) as seen,
            ):
                crew.workload.run()
            self._seen = seen
        except Exception as error:  # noqa: BLE001 - it becomes this rank's tally
            self.cause = error
            self._dead = crew.tuner.dead()
            crew.meeting.fail(error, trial=trial and not self._dead)
        self._seconds = round(time.perf_counter() - began, 3)

    def count(self) -> None:
        """Take note of what the run loaded, tuned and missed; before anything is settled."""
        if self._seen is not None:
            self._counts = self._crew.tuner.counts(self._seen)

    def note_served(self, also: Entries) -> None:
        """Settle what the workload looked up, and take note of what serves it and ``also``."""
        if self._seen is None:
            return
        tuner = self._crew.tuner
        if "settle" not in self._plan.without:
            tuner.settle(self._seen)
        self.served = tuner.export(self._seen, also)
        self._digest = serving_digest(self.served)
        missing = tuner.counts(self._seen).missing
        self._counts = dataclasses.replace(
            self._counts, missing=missing, failed=min(missing, self._counts.failed)
        )

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


def _vote(crew: Crew, tally: Tally) -> list[Tally]:
    return [Tally.from_json(fields) for fields in crew.talk.vote(tally.to_json())]


@dataclass
class _Attempt:
    error: str = ""


@contextlib.contextmanager
def _attempt() -> Iterator[_Attempt]:
    """Do something that may fail between two votes: the failure becomes this rank's tally."""
    attempt = _Attempt()
    try:
        yield attempt
    except RanksError:
        raise  # the conversation itself is broken: there is no next vote
    except Exception as error:  # noqa: BLE001 - invariant 2: no exception leaves between votes
        attempt.error = f"{type(error).__name__}: {error}"


def _give_back(crew: Crew, held: Snapshot | None) -> None:
    """Put back what the tuner held, after a vote: where even that fails, go on with what is there.

    The group's votes must stay in step; what a rank then serves is compared in the next one.
    """
    with _attempt() as attempt:
        if held is not None:
            crew.tuner.give_back(held)
    if attempt.error:
        crew.log.warning(logs.NOT_GIVEN_BACK, why=attempt.error)


def _failed(crew: Crew, plan: Plan, tallies: Sequence[Tally], run: _Run) -> Result:
    """Every rank came back out, and some failed: raise on all, or serve untuned on all."""
    failed = [t for t in tallies if not t.ran]
    text = _told(tallies)
    if run.cause is not None:
        crew.meeting.fail(run.cause)  # a failed trial concerned this group alone until now
    trial = plan.action is Action.WARM
    first = (crew.meeting.first_failure(trial=True) if trial else None) or (
        crew.meeting.first_failure()
    )
    if first is not None and not set(first.ranks) <= set(plan.members):
        # Another group's failure may be why torch's groups broke here; ours is told all the same.
        text, first = f"{text}; before that, {first.describe()}", None
    message = f"the workload failed: {first.describe() if first else text}"
    if plan.action is Action.WARM:
        message += f"; it ran on the table {plan.stored.place}, which may be to blame"
    if plan.on_failure is OnFailure.UNTUNED and not any(t.aborted or t.dead for t in tallies):
        _give_back(crew, crew.before)
        plan = dataclasses.replace(plan, action=Action.UNTUNED, why=message)
        return Result(Outcome.UNTUNED, plan, [tally.given_back() for tally in tallies])
    raise WorkloadError(
        message,
        hint="every rank stops, since the others cannot go on without it",
        ranks=[t.rank for t in failed],
        cause=text,
    ) from run.cause


def _told(tallies: Sequence[Tally]) -> str:
    """What the ranks said that failed."""
    return "; ".join(f"rank {t.rank} ({t.host}): {t.error}" for t in tallies if not t.ran)


def _outcome(plan: Plan, tallies: Sequence[Tally]) -> Outcome:
    if plan.retuned and plan.action is Action.COLD:
        return Outcome.RETUNED
    if plan.action is Action.WARM:
        return Outcome.TOPPED_UP if any(t.tuned for t in tallies) else Outcome.WARM
    return Outcome.COLD if plan.action is Action.COLD else Outcome.UNTUNED
