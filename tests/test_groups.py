"""Worlds of several tuning groups on in-memory ranks: stages, other GPUs, a draft model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fi_flags import logs
from fi_flags.decision import Reason
from fi_flags.errors import RanksError, WorkloadError
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome, Report
from fi_flags.settings import FlashInferSettings
from fi_flags.table import Entries, parse
from fi_flags.tuner import Snapshot, Tuner
from fi_flags.warmup import warm_up
from tests.toy import Crowd, Toy, fresh_tuner, own_tuners, this_thread

LIMIT_S = 20.0
OPS = {"pp0": ("gemm", "moe"), "pp1": ("gemm", "head", "sampler")}


@pytest.fixture(autouse=True)
def tuners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Ranks prefer tactics of their own, so only a merge makes those of one group serve the same.
    with own_tuners(monkeypatch, lambda rank, _name, tactic: abs(float(tactic) - rank)):
        yield


def stage(rank: int) -> str:
    """Two ranks to a stage."""
    return f"pp{rank // 2}"


def toy_of(ranks: Ranks) -> Toy:
    return Toy(ops=OPS[ranks.group])


def settings(tmp_path: Path, rank: int, flag: str = "on", **more: Any) -> FlashInferSettings:
    """Each rank has a disk of its own, and a peer that fails ends nobody's process."""
    given: dict[str, Any] = {
        "autotune_cache_dir": tmp_path / f"disk{rank}",
        "autotune_join_s": 10,
        "autotune_abort_peers": False,
    }
    return FlashInferSettings(persistent_cache=flag, **(given | more))


Served = dict[Any, Any]


def start(
    tmp_path: Path,
    toys: Callable[[Ranks], Toy] = toy_of,
    given: Callable[[Ranks], dict[str, Any]] = lambda _ranks: {},
    groups: Callable[[int], str] = stage,
    world: int = 4,
) -> list[tuple[Report, Served] | BaseException]:
    """One start of a world; each rank's report and what it serves, or its error."""

    def work(ranks: Ranks) -> tuple[Report, Served]:
        fresh_tuner()
        toy = toys(ranks)
        asked = settings(tmp_path, ranks.rank, **given(ranks))
        report = warm_up(toy, ranks=ranks, settings=asked)
        return report, toy.serving()

    return Crowd(world, limit=LIMIT_S, groups=groups).each(work)


def well(done: list[tuple[Report, Served] | BaseException]) -> list[tuple[Report, Served]]:
    for rank, one in enumerate(done):
        assert isinstance(one, tuple), f"rank {rank} raised {one!r}"
    return done  # type: ignore[return-value]


def outcomes(done: list[tuple[Report, Served] | BaseException]) -> list[Outcome]:
    return [report.outcome for report, _ in well(done)]


def drop(tmp_path: Path, *ranks: int) -> None:
    for rank in ranks:
        for table in (tmp_path / f"disk{rank}").rglob("*.json"):
            table.unlink()


def assert_groups_serve_alike(done: list[tuple[Report, Served] | BaseException]) -> None:
    """Within each group every rank serves the same, and reports the same of it."""
    served: dict[tuple[int, ...], Served] = {}
    digests: dict[tuple[int, ...], set[str]] = {}
    for report, what in well(done):
        members = report.plan.members
        assert served.setdefault(members, what) == what
        digests.setdefault(members, set()).update(rank.digest for rank in report.ranks)
        assert tuple(rank.rank for rank in report.ranks) == members
    assert all(len(one) == 1 for one in digests.values())


# -- stages ---------------------------------------------------------------------------------


def test_stages_with_other_ops_each_have_one_table_and_start_warm(tmp_path: Path) -> None:
    cold, warm = start(tmp_path), start(tmp_path)
    assert outcomes(cold) == [Outcome.COLD] * 4
    assert outcomes(warm) == [Outcome.WARM] * 4
    for done in (cold, warm):
        assert_groups_serve_alike(done)
    assert [s for _r, s in well(cold)] == [s for _r, s in well(warm)]
    for rank in range(4):
        (table,) = (tmp_path / f"disk{rank}").rglob("*.json")
        assert table.stem == stage(rank)
        ops = {name.split("'")[1] for name in parse(table.read_bytes()).entries}
        assert ops == set(OPS[stage(rank)])


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ((2, 3), ["warm", "warm", "cold", "cold"]),
        ((0, 1), ["cold", "cold", "warm", "warm"]),
        ((1, 2), ["warm"] * 4),  # each stage has one left to share
    ],
)
def test_a_stage_that_lost_its_table_tunes_while_the_other_loads(
    lost: tuple[int, ...], expected: list[str], tmp_path: Path
) -> None:
    cold = start(tmp_path)
    drop(tmp_path, *lost)
    mixed = start(tmp_path)
    assert [one.value for one in outcomes(mixed)] == expected
    assert_groups_serve_alike(mixed)
    assert [s for _r, s in well(mixed)] == [s for _r, s in well(cold)]
    assert outcomes(start(tmp_path)) == [Outcome.WARM] * 4


def test_a_stage_waits_for_the_slower_one_before_anybody_serves(tmp_path: Path) -> None:
    done_at: dict[int, float] = {}

    def toys(ranks: Ranks) -> Toy:
        slow = ranks.group == "pp1"

        def after() -> None:
            time.sleep(0.5 if slow else 0.0)
            done_at[ranks.rank] = time.monotonic()

        return Toy(ops=OPS[ranks.group], after=after)

    left: dict[int, float] = {}

    def work(ranks: Ranks) -> None:
        fresh_tuner()
        warm_up(toys(ranks), ranks=ranks, settings=settings(tmp_path, ranks.rank))
        left[ranks.rank] = time.monotonic()

    Crowd(4, limit=LIMIT_S, groups=stage).all(work)
    assert min(left.values()) >= max(done_at.values())


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
@pytest.mark.parametrize("flag", ["on", "off"])
def test_a_stage_that_fails_ends_the_other_by_name(bad: int, flag: str, tmp_path: Path) -> None:
    def toys(ranks: Ranks) -> Toy:
        def between(op: str) -> None:
            if ranks.rank == bad and op != "gemm":
                raise ValueError("boom")

        return Toy(ops=OPS[ranks.group], between=between)

    done = start(tmp_path, toys, given=lambda _ranks: {"flag": flag})
    for rank, error in enumerate(done):
        assert isinstance(error, WorkloadError), f"rank {rank}: {error!r}"
        assert f"rank {bad}" in str(error)
        assert "boom" in str(error)
        if stage(rank) != stage(bad):
            assert f"group {stage(bad)}: " in str(error)


def test_both_stages_failing_tells_each_its_own_failure(tmp_path: Path) -> None:
    def toys(ranks: Ranks) -> Toy:
        def between(_op: str) -> None:
            if ranks.rank in (1, 2):
                raise ValueError(f"boom {ranks.rank}")

        return Toy(ops=OPS[ranks.group], between=between)

    errors = start(tmp_path, toys)
    assert all(isinstance(error, WorkloadError) for error in errors)
    assert ["rank 1 (host1)" in str(error) for error in errors[:2]] == [True, True]
    assert ["rank 2 (host2)" in str(error) for error in errors[2:]] == [True, True]


def test_a_stage_that_fails_serves_untuned_where_asked_and_the_other_is_not_touched(
    tmp_path: Path,
) -> None:
    def toys(ranks: Ranks) -> Toy:
        def after() -> None:
            if ranks.rank == 3:
                raise ValueError("boom")

        return Toy(ops=OPS[ranks.group], after=after)

    done = start(tmp_path, toys, given=lambda _ranks: {"autotune_on_failure": "untuned"})
    assert outcomes(done) == [Outcome.COLD, Outcome.COLD, Outcome.UNTUNED, Outcome.UNTUNED]
    assert {tactic for _report, served in well(done)[2:] for _, tactic in served.values()} == {-1}
    assert {tactic for _report, served in well(done)[:2] for _, tactic in served.values()} == {0}


@pytest.mark.parametrize("lost", [0, 3])
def test_a_rank_lost_in_one_stage_is_named_in_both(lost: int, tmp_path: Path) -> None:
    def toys(ranks: Ranks) -> Toy:
        def after() -> None:
            if ranks.rank == lost:
                raise SystemExit("killed")  # no exception of ours catches it: the rank leaves

        return Toy(ops=OPS[ranks.group], after=after)

    done = start(tmp_path, toys)
    for rank, error in enumerate(done):
        if rank == lost:
            assert isinstance(error, SystemExit)
        else:
            assert isinstance(error, RanksError), f"rank {rank}: {error!r}"
            assert error.fields["ranks"] == [lost]
            assert f"host{lost}" in str(error)


def test_ranks_that_disagree_cost_the_cache_in_their_own_stage_only(tmp_path: Path) -> None:
    def given(ranks: Ranks) -> dict[str, Any]:
        return {"flag": "off" if ranks.rank == 3 else "on"}

    done = start(tmp_path, given=given)
    assert outcomes(done) == [Outcome.COLD] * 2 + [Outcome.UNCACHED] * 2
    reasons = [report.decision.reason for report, _ in well(done)]
    assert reasons == [Reason.OPERATOR_ON] * 2 + [Reason.RANKS_DISAGREE] * 2


def test_each_group_speaks_through_its_first_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.LOGGER)
    well(start(tmp_path))
    events = [logs.event_of(record) for record in caplog.records]
    for name in (logs.PLAN, logs.OUTCOME):
        said = [(e["rank"], e["group"]) for e in events if e["event"] == name]
        assert sorted(said) == [(0, "pp0"), (2, "pp1")]
    assert sorted(e["rank"] for e in events if e["event"] == logs.DECISION) == [0, 2]


@pytest.mark.parametrize(
    "groups", [lambda r: f"dp{r % 2}", lambda r: f"pp{r % 2}-dp{r // 2 % 2}", lambda r: f"only{r}"]
)
def test_groups_of_any_shape_start_cold_then_warm(
    groups: Callable[[int], str], tmp_path: Path
) -> None:
    for expected in (Outcome.COLD, Outcome.WARM):
        done = start(tmp_path, lambda _ranks: Toy(), groups=groups, world=6)
        assert outcomes(done) == [expected] * 6
        assert_groups_serve_alike(done)


# -- worlds of several GPUs -----------------------------------------------------------------


class _Stamped(Tuner):
    """FlashInfer's tuner on a machine whose GPU is another for each pair of ranks."""

    def stamps(self) -> dict[str, str]:
        return {**super().stamps(), "gpu": this_thread.gpu}

    def load(self, entries: Entries, stamps: dict[str, Any]) -> Snapshot:
        return super().load(entries, {**stamps, "gpu": "unknown"})  # what this machine's GPU is


@pytest.mark.parametrize("apart", [True, False])
def test_other_gpus_keep_tables_apart_by_group_and_cost_the_cache_within_one(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fi_flags.prepare.Tuner", _Stamped)
    gpus = {"pp0": "NVIDIA H200", "pp1": "NVIDIA B200"}

    def toys(ranks: Ranks) -> Toy:
        this_thread.gpu = gpus[stage(ranks.rank)]
        return Toy()

    for expected in (Outcome.COLD, Outcome.WARM):
        done = start(tmp_path, toys, groups=stage if apart else lambda _rank: "all")
        assert outcomes(done) == [expected if apart else Outcome.UNCACHED] * 4
    for report, _served in well(done):
        if apart:
            assert report.table is not None
            assert gpus[stage(report.ranks[0].rank)].split()[1] in report.table.path
        else:
            assert report.plan.reason is Reason.CACHE_UNUSABLE
            assert "gpu differs: NVIDIA H200 (ranks 0, 1), NVIDIA B200 (ranks 2, 3)" in (
                report.plan.why
            )


# -- two warm-ups in one process ------------------------------------------------------------


def test_target_and_draft_keep_out_of_each_others_tables(tmp_path: Path) -> None:
    target, draft = Toy(label="target"), Toy(ops=("gemm", "eagle"), tokens=8, label="draft")

    def work(ranks: Ranks) -> tuple[list[Report], list[Served]]:
        fresh_tuner()
        asked = settings(tmp_path, ranks.rank)
        reports = [warm_up(toy, ranks=ranks, settings=asked) for toy in (target, draft)]
        return reports, [toy.serving() for toy in (target, draft)]

    starts = [Crowd(2, limit=LIMIT_S).all(work) for _ in range(2)]
    for done, expected in zip(starts, (Outcome.COLD, Outcome.WARM), strict=True):
        for reports, served in done:
            assert [report.outcome for report in reports] == [expected] * 2
            assert served == starts[0][0][1]
    for rank in range(2):
        tables = [parse(f.read_bytes()) for f in (tmp_path / f"disk{rank}").rglob("*.json")]
        ops = {t.about["workload"]["label"]: {n.split("'")[1] for n in t.entries} for t in tables}
        assert ops == {"target": {"gemm", "moe"}, "draft": {"gemm", "eagle"}}


def test_a_draft_that_fails_leaves_the_targets_tactics_as_they_were(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[Served, Served, BaseException | None]:
        fresh_tuner()
        target = Toy(label="target")

        def boom() -> None:
            raise ValueError("boom")

        draft = Toy(ops=("moe", "eagle"), label="draft", after=boom)
        asked = settings(tmp_path, ranks.rank, autotune_on_failure="untuned")
        warm_up(target, ranks=ranks, settings=asked)
        before = target.serving()
        report = warm_up(draft, ranks=ranks, settings=asked)
        assert report.outcome is Outcome.UNTUNED
        return before, target.serving(), None

    for before, after, _error in Crowd(2, limit=LIMIT_S).all(work):
        assert before == after
        assert all(tactic != -1 for _runner, tactic in after.values())


def test_a_drafts_warm_up_in_one_stage_only_does_not_disturb_the_worlds(tmp_path: Path) -> None:
    """The draft lives on the last stage: its ranks meet under a name of their own."""

    def work(ranks: Ranks) -> list[Outcome]:
        fresh_tuner()
        asked = settings(tmp_path, ranks.rank)
        first = warm_up(toy_of(ranks), ranks=ranks, settings=asked)
        if ranks.group != "pp1":
            return [first.outcome]
        own = Ranks(ranks.rank - 2, 2, ranks.store, name="draft", host=ranks.host)
        return [first.outcome, warm_up(Toy(label="draft"), ranks=own, settings=asked).outcome]

    for expected in (Outcome.COLD, Outcome.WARM):
        done = Crowd(4, limit=LIMIT_S, groups=stage).all(work)
        assert done == [[expected]] * 2 + [[expected] * 2] * 2
