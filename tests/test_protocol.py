"""Whatever goes wrong between two votes, on whichever ranks, the group stays together.

Two ranks warm up with a tuner that fails where a script says. For every script they must come to
the same outcome by the same votes, or raise the same kind of error; nobody may hang.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import flashinfer.autotuner
import pytest

from fi_flags.decision import Reason
from fi_flags.errors import TunerError, WorkloadError
from fi_flags.facts import gather_facts
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome, Report
from fi_flags.settings import FlashInferSettings
from fi_flags.table import Entries, Status, Table, judge, parse
from fi_flags.tuner import Counts, OnStep, Pass, Snapshot, Tuner
from fi_flags.warmup import warm_up
from tests.toy import Crowd, Toy, fresh_tuner, own_tuners, this_thread

LIMIT_S = 20.0
DOUBLE_FAULTS = 12

Fault: TypeAlias = tuple[str, int] | None
"""A step of the tuner, and the how manieth call of it fails; none: nothing does."""

ACCESS = ["rw", "ro", "wo"]
TABLES = ["none", "rank 0", "rank 1", "both", "unlike"]
SPLITS = ["all", "leader"]
ON_FAILURE = ["raise", "untuned"]
ERRORS = [RuntimeError, ValueError, OSError, KeyError, MemoryError, AssertionError, TunerError]

SERVED_ALIKE = {Outcome.COLD, Outcome.WARM, Outcome.TOPPED_UP, Outcome.RETUNED}


@dataclass(frozen=True)
class Case:
    access: str
    tables: str
    split: str = "all"
    on_failure: str = "raise"
    faults: tuple[Fault, Fault] = (None, None)


@dataclass
class Script:
    """A rank's part: which call fails, with what, and whether it came to that."""

    fault: Fault
    error: type[Exception]
    calls: Counter[str] = field(default_factory=Counter)
    fired: bool = False

    def step(self, name: str) -> None:
        self.calls[name] += 1
        if self.fault == (name, self.calls[name]):
            self.fired = True
            raise self.error(f"scripted: {name} {self.calls[name]}")


class ScriptedTuner(Tuner):
    """FlashInfer's real tuner behind a script of the thread's own."""

    def stamps(self) -> dict[str, str]:
        this_thread.script.step("stamps")
        return super().stamps()

    def load(self, entries: Entries, stamps: dict[str, Any]) -> Snapshot:
        this_thread.script.step("load")
        return super().load(entries, stamps)

    @contextlib.contextmanager
    def run(
        self,
        *,
        tune: bool,
        skip_ops: Collection[str] = (),
        group: object = None,
        on_step: OnStep | None = None,
        opens_itself: bool = False,
    ) -> Iterator[Pass]:
        this_thread.script.step("run")
        with super().run(
            tune=tune,
            skip_ops=skip_ops,
            group=group,
            on_step=on_step,
            opens_itself=opens_itself,
        ) as seen:
            yield seen
            this_thread.script.step("leave")

    def settle(self, seen: Pass) -> None:
        this_thread.script.step("settle")
        super().settle(seen)

    def export(self, seen: Pass, *also: Any, **more: Any) -> Entries:
        this_thread.script.step("export")
        return super().export(seen, *also, **more)

    def counts(self, seen: Pass) -> Counts:
        this_thread.script.step("counts")
        return super().counts(seen)

    def give_back(self, snapshot: Snapshot) -> None:
        this_thread.script.step("give_back")
        super().give_back(snapshot)


@dataclass
class Played:
    """What one rank of a case came to."""

    script: Script
    report: Report | None
    error: BaseException | None
    served: dict[Any, Any]


def unlike(rank: int, _runner: str, tactic: Any) -> float:
    """A cost by which each rank prefers a tactic of its own."""
    return abs(float(tactic) - rank)


@pytest.fixture(autouse=True)
def tuners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # FlashInfer keeps one process group for a process; here each thread is one.
    monkeypatch.setattr(flashinfer.autotuner, "get_autotune_process_group", get_group)
    monkeypatch.setattr(flashinfer.autotuner, "set_autotune_process_group", set_group)
    monkeypatch.setattr("fi_flags.prepare.Tuner", ScriptedTuner)
    with own_tuners(monkeypatch, unlike):
        yield


def get_group() -> Any:
    return getattr(this_thread, "group", None)


def set_group(group: Any) -> None:
    this_thread.group = group


def state_of(tuner: Any) -> dict[str, Any]:
    """What a warm-up must give back."""
    return {
        "group": get_group(),
        "mode": (tuner.is_tuning_mode, tuner._active_tuning_contexts),
        "attributes": sorted(vars(tuner)),
        "methods": [name for name, value in vars(tuner).items() if callable(value)],
    }


def surroundings_of_flashinfer() -> tuple[Any, ...]:
    module: Any = sys.modules[flashinfer.autotuner.AutoTuner.__module__]
    return module.tqdm, list(module.logger.filters), module.logger.level


@dataclass
class Stage:
    """Plays cases: each in a directory of its own, with tables that a real start has made."""

    place: Path
    facts: Any = field(default_factory=gather_facts)
    played: int = 0

    def __post_init__(self) -> None:
        self.made = self.place / "made"
        self.play(Case("rw", "none"), self.made)

    def play(self, case: Case, directory: Path | None = None) -> list[Played]:
        self.played += 1
        errors = itertools.cycle(ERRORS[self.played % len(ERRORS) :] + ERRORS)
        scripts = [Script(fault, next(errors)) for fault in case.faults]
        place = directory or self.place / str(self.played)
        self._lay_out(case, place)

        def work(ranks: Ranks) -> Played:
            return self._one(case, ranks, scripts[ranks.rank], place / f"node{ranks.rank}")

        before = surroundings_of_flashinfer()
        done = Crowd(2, limit=LIMIT_S).all(work)
        assert surroundings_of_flashinfer() == before, case
        if directory is None:
            check_tables(case, place, done)
            shutil.rmtree(place, ignore_errors=True)
        return done

    def _one(self, case: Case, ranks: Ranks, script: Script, place: Path) -> Played:
        tuner = fresh_tuner()
        this_thread.script = script
        set_group(f"the group of rank {ranks.rank}")
        toy = Toy(ops=("gemm", f"expert/{ranks.rank}"), tokens=2)
        before = state_of(tuner)
        report = error = None
        try:
            settings = FlashInferSettings(
                persistent_cache="on",
                autotune_cache_dir=place,
                autotune_cache_access=case.access,
                autotune_split=case.split,
                autotune_on_failure=case.on_failure,
                autotune_join_s=LIMIT_S / 2,
                autotune_timeout_s=LIMIT_S / 2,
            )
            report = warm_up(toy, ranks=ranks, settings=settings, facts=self.facts)
        except BaseException as caught:  # noqa: BLE001 - judged below
            error = caught
        assert state_of(tuner) == before, case
        served = Toy(ops=("gemm", "expert/0", "expert/1"), tokens=2).serving()
        return Played(script, report, error, served)

    def _lay_out(self, case: Case, place: Path) -> None:
        holders = {"none": [], "rank 0": [0], "rank 1": [1]}.get(case.tables, [0, 1])
        for rank in holders:
            shutil.copytree(self.made / f"node{rank}", place / f"node{rank}")
        if case.tables == "unlike":  # rank 0 lacks what it runs; rank 1 holds another tactic
            path = next((place / "node0").rglob("*.json"))
            table = parse(path.read_bytes())
            few = {k: v for k, v in table.entries.items() if "expert" not in k}
            path.write_bytes(Table(few, table.stamps, table.about).render())
            path = next((place / "node1").rglob("*.json"))
            other = {k: [v[0], 2] for k, v in table.entries.items() if "'0'" not in k}
            path.write_bytes(Table(other, table.stamps, table.about).render())


def check_tables(case: Case, place: Path, done: list[Played]) -> None:
    """Whatever happened, each table is sound; nothing is written where nothing may be."""
    for path in place.rglob("*.json"):
        data = path.read_bytes()
        assert judge(data, parse(data).stamps).status is Status.OK, case
    assert not list(place.rglob("*.tmp")), case
    retuned = any(
        p.report and p.report.plan.retuned and p.report.outcome is not Outcome.UNTUNED for p in done
    )
    if not ran_badly(done) or not retuned:  # what fails without its table too comes back
        assert not list(place.rglob("*quarantined*")), case
    if case.tables == "both":
        assert len(list(place.rglob("world.json*"))) >= 2, case
    if case.tables == "none" and (case.access == "ro" or done[0].error):
        assert not list(place.rglob("*")), case


def ran_badly(done: list[Played]) -> bool:
    return any(p.script.fired and p.script.fault[0] in ("run", "leave") for p in done)  # type: ignore[index]


def gave_nothing_back(done: list[Played]) -> bool:
    return any(p.script.fired and p.script.fault[0] == "give_back" for p in done)  # type: ignore[index]


def check(case: Case, done: list[Played]) -> None:
    """The two ranks stayed together, and went where they had to."""
    if any(p.error for p in done):
        assert {type(p.error) for p in done} == {WorkloadError}, (case, [p.error for p in done])
        assert ran_badly(done), case
        assert case.on_failure == "raise", case
        return
    reports = [p.report for p in done if p.report is not None]
    assert len(reports) == 2
    one, other = (
        (r.outcome, r.plan, [(x.rank, x.votes, x.digest, x.outcome) for x in r.ranks])
        for r in reports
    )
    assert one == other, case
    outcome, reason = reports[0].outcome, reports[0].decision.reason
    if ran_badly(done):
        # A run on a loaded table that fails is tried again without it; under ro that is not tuned.
        assert outcome not in SERVED_ALIKE - {Outcome.RETUNED}, case
        if outcome is Outcome.UNTUNED:
            assert "untuned" in case.on_failure or case.access == "ro", case
    elif not any(p.script.fired for p in done):
        assert (outcome, reason) == (expected(case), Reason.OPERATOR_ON), case
    if outcome in SERVED_ALIKE:
        assert done[0].served == done[1].served, case
        assert len({x.digest for x in reports[0].ranks}) == 1, case
    elif outcome is Outcome.UNTUNED and not gave_nothing_back(done):
        tactics = {tactic for p in done for _runner, tactic in p.served.values()}
        assert tactics == {-1}, case
    elif outcome is Outcome.UNCACHED:
        assert reason is Reason.CACHE_UNUSABLE, case


def expected(case: Case) -> Outcome:
    """What comes of a case in which nothing fails."""
    if case.access == "wo":
        return Outcome.COLD
    if case.tables == "none":
        return Outcome.UNTUNED if case.access == "ro" else Outcome.COLD
    if case.tables == "unlike" and case.access == "rw":
        return Outcome.TOPPED_UP
    return Outcome.WARM


def expected_after(case: Case, step: str, call: int) -> Outcome:
    """What comes of a case in which one step besides the run fails on one rank."""
    usual = expected(case)
    if step == "stamps":
        return Outcome.UNCACHED
    if usual is Outcome.UNTUNED:
        return usual
    if (step, call) == ("load", 1) and usual is not Outcome.COLD:
        return Outcome.UNTUNED if case.access == "ro" else Outcome.COLD
    return Outcome.UNCACHED


def reachable(done: list[Played]) -> list[Fault]:
    """Every call of every step that some rank made."""
    most = done[0].script.calls | done[1].script.calls
    return [(name, n) for name, count in sorted(most.items()) for n in range(1, count + 1)]


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("tables", TABLES)
def test_whatever_fails_on_whichever_ranks_they_stay_together(
    tables: str, access: str, tmp_path: Path
) -> None:
    stage = Stage(tmp_path)
    draw = random.Random(f"{tables} {access}")  # noqa: S311 - a sample, the same each time
    faults: list[Fault] = []
    for split in SPLITS:
        case = Case(access, tables, split)
        done = stage.play(case)
        check(case, done)
        faults = max(faults, reachable(done), key=len)

    lone: list[tuple[Fault, Fault]] = [
        pair for fault in faults for pair in ((fault, None), (None, fault))
    ]
    both = list(itertools.product(faults, faults))
    for pair in lone + draw.sample(both, min(len(both), DOUBLE_FAULTS)):
        case = Case(access, tables, draw.choice(SPLITS), draw.choice(ON_FAILURE), pair)
        done = stage.play(case)
        check(case, done)
        for played, fault in zip(done, pair, strict=True):
            if None in pair and fault is not None:
                assert played.script.fired, case
                if fault[0] not in ("run", "leave"):
                    assert played.report is not None
                    assert played.report.outcome is expected_after(case, *fault), case


@pytest.mark.parametrize("on_failure", ON_FAILURE)
@pytest.mark.parametrize("access", ["rw", "ro"])
def test_after_a_run_that_failed_on_a_loaded_table_any_step_may_fail(
    access: str, on_failure: str, tmp_path: Path
) -> None:
    """Faults that only a first fault brings within reach: the run without the table."""
    stage = Stage(tmp_path)
    for first in (("run", 1), ("leave", 1)):
        case = Case(access, "both", on_failure=on_failure, faults=(first, None))
        done = stage.play(case)
        check(case, done)
        expected = Outcome.RETUNED if access == "rw" else Outcome.UNTUNED
        assert {p.report and p.report.outcome for p in done} == {expected}, case
        for later in reachable(done):
            case = Case(access, "both", on_failure=on_failure, faults=(first, later))
            done = stage.play(case)
            check(case, done)
            if later in (("run", 2), ("leave", 2)):
                assert done[1].script.fired, case
                untuned = {Outcome.UNTUNED} if on_failure == "untuned" else {None}
                assert {p.report and p.report.outcome for p in done} == untuned, case


@pytest.mark.parametrize("on_failure", ON_FAILURE)
@pytest.mark.parametrize("split", SPLITS)
def test_after_a_table_that_some_rank_could_not_load_any_step_may_fail(
    split: str, on_failure: str, tmp_path: Path
) -> None:
    """Faults that only a first fault brings within reach: the cold start after a refused load."""
    stage = Stage(tmp_path)
    later: list[Fault] = [("load", 2), ("run", 1), ("leave", 1), ("settle", 2), ("export", 2)]
    for fault in later:
        for faults in ((("load", 1), fault), (fault, ("load", 1))):
            case = Case("rw", "both", split, on_failure, faults)
            done = stage.play(case)
            check(case, done)
            assert all(p.script.fired for p in done), case
