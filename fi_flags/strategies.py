"""The two ways to warm a group up, behind one protocol.

Per-rank: every rank tunes what it runs, and all meet. Leader/worker: one table for the group; the
leader owns it, every rank contributes to it, and all serve the same tactics.

Between two votes nothing may raise: what goes wrong on a rank becomes its next tally, and what the
group does next follows from all tallies (``plan.py``). Only the loss of a rank ends it sooner.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

from fi_flags import logs
from fi_flags.ballots import Tally
from fi_flags.decision import Reason
from fi_flags.errors import RanksError, TableError, WorkloadError
from fi_flags.exchange import exchange
from fi_flags.home import Home
from fi_flags.plan import Action, Next, Plan, after_run, all_loaded
from fi_flags.report import Outcome, TableReport
from fi_flags.run import Crew, Run, attempt, give_back, vote
from fi_flags.settings import OnFailure
from fi_flags.shadow import Comparison, history_path, remember
from fi_flags.store import Store
from fi_flags.table import Entries, merge, split_ops
from fi_flags.trial import DEATHS, Trial
from fi_flags.tuner import Snapshot

__all__ = ["LeaderWorker", "PerRank", "Result", "Shadow", "Strategy"]


@dataclass(frozen=True)
class Result:
    """What a strategy came to: the plan as it ended, and the tallies of all ranks."""

    outcome: Outcome
    plan: Plan
    tallies: Sequence[Tally]
    table: TableReport | None = None
    shadow: Comparison | None = None


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
        run = Run(crew, plan)
        run.go(tune=True, alone=False)
        with attempt():  # counts are for the report only
            run.count()
        tallies = vote(crew, run.tally())
        if after_run(plan, tallies) is Next.FAIL:
            return _failed(crew, plan, tallies, run)
        return Result(Outcome.UNCACHED, plan, tallies)


@dataclass
class Shadow:
    """Per-rank as with the flag off; then hold the stored table against it, and refresh that.

    Attributes:
        home: The table's place on this rank's machine.
    """

    home: Home

    def carry_out(self, crew: Crew, plan: Plan) -> Result:
        """Run, compare and vote; what goes wrong with the table costs no more than its refresh."""
        run = Run(crew, plan)
        run.go(tune=True, alone=False)
        with attempt() as tried:
            run.count()
            run.note_served(())
            if plan.compare and self.home.found.table is not None:
                run.compare(self.home.found.table.entries)
        tallies = vote(crew, run.tally(tried.error))
        if after_run(plan, tallies) is Next.FAIL:
            return _failed(crew, plan, tallies, run)
        found = Comparison.together(tally.shadow for tally in tallies)
        table = None
        if plan.publish:
            table = self._refresh(crew, plan, run, tallies, tried.error)
            # Once a start, also where hosts share the disk: what it says is the whole group's.
            if found and crew.talk.first:
                self._remember(crew, found)
        return Result(Outcome.UNCACHED, plan, tallies, table, found)

    def _refresh(
        self, crew: Crew, plan: Plan, run: Run, tallies: Sequence[Tally], error: str
    ) -> TableReport | None:
        entries = run.served
        with attempt() as tried:
            if error or any(not t.ok for t in tallies) or len({t.digest for t in tallies}) > 1:
                crew.meeting.at("merge")
                sites = run.calls()
                entries = exchange(crew.talk, plan.leader, entries, sites=sites, error=error)
        if not tried.error:
            return self.home.publish(crew, plan, Outcome.UNCACHED, entries, tallies)
        if crew.talk.first:
            crew.log.warning(logs.NOT_KEPT, path=str(self.home.store.path), why=tried.error)
        return None

    def _remember(self, crew: Crew, found: Comparison) -> None:
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with attempt() as tried:
            remember(self.home.store, found, when=when, host=crew.meeting.ranks.host)
        if tried.error:
            path = str(history_path(self.home.store.path))
            crew.log.warning(logs.NOT_KEPT, path=path, why=tried.error)


@dataclass
class LeaderWorker:
    """One table for the group, on disk, and the same tactics on every rank.

    Attributes:
        home: The table's place on this rank's machine.
        trial: The marker beside it.
    """

    home: Home
    trial: Trial

    def carry_out(self, crew: Crew, plan: Plan) -> Result:
        """Load, run, merge where ranks differ, publish."""
        with self.trial.ending(leaves=RanksError):
            return self._carry_out(crew, plan)

    def _carry_out(self, crew: Crew, plan: Plan) -> Result:
        stored: Entries = {}
        undo: Snapshot | None = None
        if plan.action is Action.WARM:
            plan, stored, undo = self._load(crew, plan)
        elif plan.action is Action.COLD and self.home.kept_by(crew, plan):
            self.trial.begin_without()
        run, tallies, error = self._run(crew, plan, stored)
        following = after_run(plan, tallies)
        if following is Next.RETUNE:
            plan = self._distrust(crew, plan, tallies, undo)
            stored = {}
            run, tallies, error = self._run(crew, plan, stored)
            following = after_run(plan, tallies)
        if following is Next.FAIL:
            if any(t.dead for t in tallies) and plan.action is Action.WARM:
                why = f"a run on it left a GPU unusable: {_told(tallies)}"
                self._set_aside(crew, plan, "failed_run", why, tuning=False)
                self.trial.leave()
            else:
                self._acquit(crew)
            return _failed(crew, plan, tallies, run)
        self.trial.end()
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
        entries = run.served if plan.stored.imported else merge([run.served, stored])
        table = self.home.publish(crew, plan, outcome, entries, tallies)
        return Result(outcome, plan, tallies, table)

    def _run(self, crew: Crew, plan: Plan, stored: Entries) -> tuple[Run, Sequence[Tally], str]:
        """Run the workload and vote on it; also what kept this rank from saying what it serves."""
        run = Run(crew, plan)
        run.go(tune=crew.rank in plan.tuners, alone=True)
        with attempt() as tried:
            run.count()
            # Of imported tables only what the workload asked for becomes its own.
            also = () if plan.stored.imported else split_ops(stored, plan.skip_ops)[0]
            run.note_served(also)
            if plan.stored.imported:  # it was not on trial
                run.unload(stored)
        # Ranks that could not say what they serve differ from all others, so a merge follows.
        return run, vote(crew, run.tally(tried.error)), tried.error

    def _distrust(
        self, crew: Crew, plan: Plan, tallies: Sequence[Tally], undo: Snapshot | None
    ) -> Plan:
        """After a loaded table failed its first run: give it back, and set the file aside."""
        give_back(crew, undo)
        why = f"a run on the table of {plan.stored.place} failed: {_told(tallies)}"
        self._set_aside(crew, plan, "failed_run", why)
        plan = dataclasses.replace(plan.without_table(why), retuned=True)
        if crew.talk.first:
            crew.log.warning(logs.RETUNING, action=plan.action.value, why=why)
        return plan

    def _set_aside(
        self, crew: Crew, plan: Plan, word: str, why: str, *, tuning: bool = True
    ) -> None:
        """Move this disk's table aside, where that is for this rank to do; never raises."""
        if self.home.offered(plan) is None or not self.home.kept_by(crew, plan):
            return
        own = not self.home.imported
        with attempt() as tried:
            self.home.quarantine(word)
        for moved in self.home.aside.values():
            crew.log.warning(logs.QUARANTINED, moved_to=str(moved), why=why)
        if self.home.aside and own:
            self.trial.set_aside(self.home.aside[self.home.store.path], tuning=tuning)
        elif self.home.aside:
            self.trial.end()  # it knows of one place, the table's own
        elif tried.error:
            path = str(self.home.store.path)
            crew.log.warning(logs.NOT_QUARANTINED, path=path, why=tried.error)

    def _acquit(self, crew: Crew) -> None:
        """The workload failed without the table too, so the table comes back."""
        moved = dict(self.home.aside)
        if self.trial.aside is not None:  # perhaps by an earlier start, which died
            moved[self.home.store.path] = self.trial.aside
        for path, aside in moved.items():
            with attempt() as tried:
                Store(path).bring_back(aside)
            why = tried.error or "the workload fails without it too"
            crew.log.warning(logs.BROUGHT_BACK, path=str(path), why=why)

    def _load(self, crew: Crew, plan: Plan) -> tuple[Plan, Entries, Snapshot | None]:
        """Bring the table to every rank and load it; vote 2 says whether that worked."""
        crew.meeting.at("load")
        undo: Snapshot | None = None
        offered = self.home.offered(plan)
        own = offered.entries if offered else {}
        stored: Entries = {}
        deaths = 0
        with attempt() as tried:
            stored = own
            if plan.exchange:
                stored = exchange(crew.talk, plan.leader, own, expected=plan.stored.digest)
            deaths = self._begin_trial(crew, plan)
            if deaths >= DEATHS:
                raise TableError(f"{deaths} starts in a row died on {self.home.store.path}")
            wanted, _ = split_ops(stored, plan.skip_ops)
            undo = crew.tuner.load(wanted, self.home.stamps)
        host, error = crew.meeting.ranks.host, tried.error
        tally = Tally(rank=crew.rank, host=host, ok=not error, error=error)
        refused = all_loaded(vote(crew, tally))
        if not refused:
            return plan, stored, undo
        give_back(crew, undo)
        if deaths >= DEATHS:
            self._set_aside(crew, plan, "starts_died", error)
        else:
            self.trial.withdraw()
        return plan.without_table(f"the table could not be loaded: {refused}"), {}, None

    def _begin_trial(self, crew: Crew, plan: Plan) -> int:
        """Mark this disk's table as being tried; how many starts in a row died on it."""
        offered = self.home.offered(plan)
        if offered is None or not self.home.kept_by(crew, plan):
            return 0
        with contextlib.suppress(OSError):  # for an imported table there is no place as yet
            self.home.store.path.parent.mkdir(parents=True, exist_ok=True)
        deaths = self.trial.begin(offered.about["digest"])
        if 0 < deaths < DEATHS:
            crew.log.warning(logs.START_DIED, path=str(self.home.store.path), starts=deaths)
        return deaths

    def _merge(self, crew: Crew, plan: Plan, run: Run, error: str) -> tuple[str, Sequence[Tally]]:
        """Bring what the ranks tuned together, so that all serve the same; vote 4."""
        crew.meeting.at("merge")
        undo: Snapshot | None = None
        with attempt() as tried:
            merged = exchange(crew.talk, plan.leader, run.served, sites=run.calls(), error=error)
            undo = crew.tuner.load(merged, self.home.stamps)
            run.note_served(merged)
        tallies = vote(crew, run.tally(tried.error))
        refused = all_loaded(tallies)
        if not refused and len({t.digest for t in tallies}) > 1:
            refused = "the ranks serve different tactics after a merge"
        if refused:
            give_back(crew, undo)
        return refused, tallies


def _failed(crew: Crew, plan: Plan, tallies: Sequence[Tally], run: Run) -> Result:
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
        give_back(crew, crew.before)
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
    if plan.stored.imported and not any(t.loaded for t in tallies):
        # Nothing of what was imported is this workload's.
        bare = any(t.missing for t in tallies) and not any(t.tuned for t in tallies)
        return Outcome.UNTUNED if bare else Outcome.COLD
    if plan.action is Action.WARM:
        return Outcome.TOPPED_UP if any(t.tuned for t in tallies) else Outcome.WARM
    return Outcome.COLD if plan.action is Action.COLD else Outcome.UNTUNED
