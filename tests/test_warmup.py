"""The story on in-memory ranks: every cold start also starts warm, in the same directory."""

from __future__ import annotations

import functools
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune

from fi_flags import logs
from fi_flags.decision import Reason
from fi_flags.errors import RanksError, WorkloadError
from fi_flags.plan import Action
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome, Report
from fi_flags.settings import FlashInferSettings
from fi_flags.store import Store
from fi_flags.table import parse
from fi_flags.tuner import Tuner
from fi_flags.warmup import flashinfer_autotune, warm_up
from tests.toy import (
    Alpha,
    Beta,
    Crowd,
    Toy,
    choose_one,
    fresh_tuner,
    own_tuners,
    this_thread,
    tuner_of_this_thread,
)

WORLDS = [1, 2, 4]
Cost = Callable[[int, str, Any], float]


@pytest.fixture(autouse=True)
def tuners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_tuners(monkeypatch):
        yield


def settings(tmp_path: Path, flag: str = "on", **more: Any) -> FlashInferSettings:
    given: dict[str, Any] = {
        "autotune_cache_dir": tmp_path / "tables",
        "autotune_join_s": 10,
    } | more
    return FlashInferSettings(persistent_cache=flag, **given)


def nearest(best: int, _rank: int, _name: str, tactic: Any) -> float:
    """A cost by which one tactic is the best on every rank."""
    return abs(float(tactic) - best)


def start(
    world: int,
    tmp_path: Path,
    flag: str = "on",
    toys: Callable[[int], Toy] = lambda _rank: Toy(),
    given: Callable[[int], dict[str, Any]] = lambda _rank: {},
    before: Callable[[int, Toy], object] = lambda _rank, _toy: None,
) -> tuple[list[Report], list[dict[Any, Any]]]:
    """One start of a server: fresh tuners, a warm-up; its reports, and what each rank serves."""

    def work(ranks: Ranks) -> tuple[Report, dict[Any, Any]]:
        fresh_tuner()
        toy = toys(ranks.rank)
        before(ranks.rank, toy)
        asked = settings(tmp_path, **({"flag": flag} | given(ranks.rank)))
        report = warm_up(toy, ranks=ranks, settings=asked)
        return report, toy.serving()

    done = Crowd(world).all(work)
    return [report for report, _ in done], [served for _, served in done]


def outcomes(reports: list[Report]) -> set[Outcome]:
    return {rank.outcome for report in reports for rank in report.ranks}


def one_digest(reports: list[Report]) -> str:
    digests = {rank.digest for report in reports for rank in report.ranks}
    assert len(digests) == 1
    return digests.pop()


def tables(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "tables").rglob("*.json"))


# -- the main job ---------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_on_is_cold_then_warm_with_one_digest_and_few_votes(world: int, tmp_path: Path) -> None:
    cold, served_cold = start(world, tmp_path)
    warm, served_warm = start(world, tmp_path)

    assert outcomes(cold) == {Outcome.COLD}
    assert outcomes(warm) == {Outcome.WARM}
    assert one_digest(cold) == one_digest(warm)
    assert all(served == served_cold[0] for served in served_cold + served_warm)
    assert all(rank.votes <= 4 for rank in cold[0].ranks)
    assert all(rank.votes <= 3 for rank in warm[0].ranks)
    assert all(rank.tuned == 0 and rank.loaded == 6 for rank in warm[0].ranks)
    assert len(tables(tmp_path)) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_off_tunes_on_every_rank_and_touches_no_disk(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    for owner, name in (
        (AutoTuner, "save_configs"),
        (AutoTuner, "load_configs"),
        (Store, "read"),
        (Store, "publish"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name: looked.append(name))
    for _ in range(2):
        reports, _served = start(world, tmp_path, "off")
        assert outcomes(reports) == {Outcome.UNCACHED}
        assert all(rank.tuned == 6 and rank.votes == 2 for rank in reports[0].ranks)
        assert reports[0].decision.reason is Reason.OPERATOR_OFF
        assert not (tmp_path / "tables").exists()
    assert not looked


def test_the_table_loads_with_plain_flashinfer(tmp_path: Path) -> None:
    start(2, tmp_path)
    tuner = fresh_tuner()
    assert tuner.load_configs(str(tables(tmp_path)[0]))
    assert all(tactic == 0 for _runner, tactic in Toy().serving().values())


@pytest.mark.parametrize("flag", ["on", "off"])
def test_every_rank_reports_the_same_and_only_rank_0_speaks(
    flag: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.LOGGER)
    reports, _ = start(2, tmp_path, flag)
    first, second = (report.to_json()["ranks"] for report in reports)
    assert first == second
    events = [logs.event_of(record) for record in caplog.records]
    assert [e["event"] for e in events] == [logs.DECISION, logs.PLAN, logs.OUTCOME]
    assert {e["rank"] for e in events} == {0}
    assert json.loads(json.dumps(reports[0].to_json()))["outcome"] == reports[0].outcome.value


# -- ranks that differ ----------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_other_tactics_on_each_rank_end_with_one_digest(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_tuners(monkeypatch, lambda rank, _name, tactic: abs(tactic - rank % 3)):
        cold, served = start(world, tmp_path)
    assert outcomes(cold) == {Outcome.COLD}
    assert all(s == served[0] for s in served)
    warm, again = start(world, tmp_path)
    assert outcomes(warm) == {Outcome.WARM}
    assert one_digest(warm) == one_digest(cold)
    assert all(s == served[0] for s in again)


def test_other_runners_on_each_rank_end_with_one_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(rank: int, name: str, tactic: Any) -> float:
        return float(tactic + (0 if (name == "Alpha") == (rank == 0) else 10))

    with own_tuners(monkeypatch, cost):
        cold, served = start(2, tmp_path)
    assert {runner for runner, _ in served[0].values()} == {"Alpha"}
    assert served[0] == served[1]
    warm, again = start(2, tmp_path)
    assert outcomes(warm) == {Outcome.WARM}
    assert again == served
    assert one_digest(cold) == one_digest(warm)


def test_without_a_merge_ranks_would_serve_other_runners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is about something: with the flag off the same ranks differ."""

    def cost(rank: int, name: str, tactic: Any) -> float:
        return float(tactic + (0 if (name == "Alpha") == (rank == 0) else 10))

    with own_tuners(monkeypatch, cost):
        _, served = start(2, tmp_path, "off")
    assert served[0] != served[1]


@pytest.mark.parametrize("world", [2, 4])
def test_disjoint_keys_are_kept_and_warm_the_second_start(world: int, tmp_path: Path) -> None:
    def toys(rank: int) -> Toy:
        return Toy(ops=("gemm", f"expert/{rank}"))

    cold, _ = start(world, tmp_path, toys=toys)
    warm, _ = start(world, tmp_path, toys=toys)
    assert outcomes(cold) == {Outcome.COLD}
    assert outcomes(warm) == {Outcome.WARM}
    assert one_digest(cold) == one_digest(warm)
    assert warm[0].table is not None
    assert warm[0].table.entries == 3 + 3 * world
    assert all(rank.tuned == 0 and rank.votes <= 3 for rank in warm[0].ranks)


def test_a_table_that_fits_rank_0_only_is_topped_up(tmp_path: Path) -> None:
    start(1, tmp_path, toys=lambda _r: Toy(ops=("expert/0",)))
    reports, served = start(2, tmp_path, toys=lambda rank: Toy(ops=(f"expert/{rank}",)))
    assert outcomes(reports) == {Outcome.TOPPED_UP}
    assert [rank.tuned for rank in reports[0].ranks] == [0, 3]
    assert all(tactic == 0 for s in served for _runner, tactic in s.values())
    again, _ = start(2, tmp_path, toys=lambda rank: Toy(ops=(f"expert/{rank}",)))
    assert outcomes(again) == {Outcome.WARM}


@pytest.mark.parametrize("world", WORLDS)
def test_a_new_op_tunes_that_op_only(world: int, tmp_path: Path) -> None:
    start(world, tmp_path)
    more, _ = start(world, tmp_path, toys=lambda _r: Toy(ops=("gemm", "moe", "new")))
    assert outcomes(more) == {Outcome.TOPPED_UP}
    assert all(rank.loaded == 6 and rank.tuned == 3 for rank in more[0].ranks)
    warm, _ = start(world, tmp_path, toys=lambda _r: Toy(ops=("gemm", "moe", "new")))
    assert outcomes(warm) == {Outcome.WARM}


@pytest.mark.parametrize("lost", [0, 1])
def test_separate_directories_with_one_lost_share_the_table(lost: int, tmp_path: Path) -> None:
    def given(rank: int) -> dict[str, Any]:
        return {"autotune_cache_dir": tmp_path / "tables" / f"node{rank}"}

    cold, _ = start(2, tmp_path, given=given)
    assert len(tables(tmp_path)) == 2
    before = one_digest(cold)
    next((tmp_path / "tables" / f"node{lost}").rglob("*.json")).unlink()
    warm, served = start(2, tmp_path, given=given)
    assert outcomes(warm) == {Outcome.WARM}
    assert one_digest(warm) == before
    assert served[0] == served[1]
    assert len(tables(tmp_path)) == 2, "the node that had lost its table has it again"
    assert warm[0].plan.leader == 1 - lost


def test_a_lost_disk_gets_back_entries_of_skipped_ops_too(tmp_path: Path) -> None:
    def given(rank: int) -> dict[str, Any]:
        return {"autotune_cache_dir": tmp_path / "tables" / f"node{rank}"}

    start(2, tmp_path, given=given)
    kept, lost = tables(tmp_path)
    lost.unlink()
    start(2, tmp_path, given=lambda rank: {**given(rank), "autotune_skip_ops": ["moe"]})
    assert parse(lost.read_bytes()).entries == parse(kept.read_bytes()).entries


def test_tables_that_differ_are_merged_and_the_leaders_entries_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(rank: int) -> dict[str, Any]:
        return {"autotune_cache_dir": tmp_path / "tables" / f"node{rank}"}

    for node in (0, 1):
        with own_tuners(monkeypatch, functools.partial(nearest, node)):
            start(
                1,
                tmp_path,
                toys=functools.partial(lambda node, _rank: Toy(ops=("gemm", f"only{node}")), node),
                given=functools.partial(lambda node, _rank: given(node), node),
            )
    reports, served = start(
        2, tmp_path, toys=lambda _r: Toy(ops=("gemm", "only0", "only1")), given=given
    )
    assert outcomes(reports) == {Outcome.WARM}
    assert served[0] == served[1]
    assert {t for (op, _m), (_r, t) in served[0].items() if op == "gemm"} == {0}
    assert {t for (op, _m), (_r, t) in served[0].items() if op == "only1"} == {1}


def test_the_flag_on_one_rank_only_is_per_rank_on_all_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.LOGGER)
    flags = {0: "on", 1: "off"}
    reports, _ = start(2, tmp_path, given=lambda rank: {"flag": flags[rank]})
    assert outcomes(reports) == {Outcome.UNCACHED}
    assert {report.decision.reason for report in reports} == {Reason.RANKS_DISAGREE}
    assert (
        "leader_worker (OPERATOR_ON) (rank 0), per_rank (OPERATOR_OFF) (rank 1)"
        in reports[0].plan.why
    )
    plans = [r for r in caplog.records if logs.event_of(r)["event"] == logs.PLAN]
    assert [record.levelname for record in plans] == ["WARNING"]
    assert not tables(tmp_path)


def test_skip_ops_on_one_rank_only_are_named_and_skipped_on_all(tmp_path: Path) -> None:
    skip = {0: ["moe"], 1: []}
    reports, served = start(2, tmp_path, given=lambda rank: {"autotune_skip_ops": skip[rank]})
    assert {report.decision.reason for report in reports} == {Reason.RANKS_DISAGREE}
    assert 'autotune_skip_ops differs: ["moe"] (rank 0), [] (rank 1)' in reports[0].plan.why
    assert {t for s in served for (op, _m), (_r, t) in s.items() if op == "moe"} == {-1}


def test_another_workload_on_one_rank_is_per_rank_on_all(tmp_path: Path) -> None:
    reports, _ = start(2, tmp_path, toys=lambda rank: Toy(label=f"model{rank}"))
    assert {report.plan.reason for report in reports} == {Reason.RANKS_DISAGREE}
    assert "workload differs" in reports[0].plan.why


# -- access, split, skip_ops ----------------------------------------------------------------


def snapshot(tmp_path: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(p): (p.stat().st_ino, p.stat().st_mtime_ns, p.stat().st_size)
        for p in [tmp_path / "tables", *(tmp_path / "tables").rglob("*")]
        if p.exists()
    }


@pytest.mark.parametrize("world", WORLDS)
def test_read_only_with_a_table_serves_it_and_changes_nothing(world: int, tmp_path: Path) -> None:
    start(world, tmp_path)
    before = snapshot(tmp_path)
    reports, served = start(world, tmp_path, given=lambda _r: {"autotune_cache_access": "ro"})
    assert outcomes(reports) == {Outcome.WARM}
    assert all(tactic == 0 for s in served for _runner, tactic in s.values())
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("world", WORLDS)
def test_read_only_without_a_table_is_untuned_and_makes_no_directory(
    world: int, tmp_path: Path
) -> None:
    reports, served = start(world, tmp_path, given=lambda _r: {"autotune_cache_access": "ro"})
    assert outcomes(reports) == {Outcome.UNTUNED}
    assert all(tactic == -1 for s in served for _runner, tactic in s.values())
    assert reports[0].ranks[0].missing == 6
    assert not (tmp_path / "tables").exists()


def test_read_only_does_not_tune_what_the_table_lacks(tmp_path: Path) -> None:
    start(2, tmp_path)
    reports, served = start(
        2,
        tmp_path,
        toys=lambda _r: Toy(ops=("gemm", "new")),
        given=lambda _r: {"autotune_cache_access": "ro"},
    )
    assert outcomes(reports) == {Outcome.WARM}
    assert [(r.loaded, r.tuned, r.missing) for r in reports[0].ranks] == [(3, 0, 3)] * 2
    assert {t for (op, _m), (_r, t) in served[0].items() if op == "new"} == {-1}


def test_write_only_tunes_though_a_table_is_there_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(2, tmp_path)
    with own_tuners(monkeypatch, lambda _r, _n, tactic: -tactic):
        reports, served = start(2, tmp_path, given=lambda _r: {"autotune_cache_access": "wo"})
    assert outcomes(reports) == {Outcome.COLD}
    assert {tactic for s in served for _runner, tactic in s.values()} == {2}
    warm, again = start(2, tmp_path)
    assert outcomes(warm) == {Outcome.WARM}
    assert again == served


@pytest.mark.parametrize("world", WORLDS)
def test_split_leader_tunes_on_one_rank_and_serves_on_all(world: int, tmp_path: Path) -> None:
    def given(_rank: int) -> dict[str, Any]:
        return {"autotune_split": "leader"}

    reports, served = start(world, tmp_path, given=given)
    assert outcomes(reports) == {Outcome.COLD}
    assert [rank.tuned for rank in reports[0].ranks] == [6] + [0] * (world - 1)
    assert all(rank.missing == 0 for rank in reports[0].ranks)
    assert all(s == served[0] for s in served)
    assert all(tactic == 0 for _runner, tactic in served[0].values())
    warm, _ = start(world, tmp_path, given=given)
    assert outcomes(warm) == {Outcome.WARM}


def test_skipped_ops_are_not_loaded_and_their_entries_stay(tmp_path: Path) -> None:
    start(2, tmp_path)
    before = tables(tmp_path)[0].read_bytes()
    reports, served = start(2, tmp_path, given=lambda _r: {"autotune_skip_ops": ["moe"]})
    assert outcomes(reports) == {Outcome.WARM}
    assert {t for (op, _m), (_r, t) in served[0].items() if op == "moe"} == {-1}
    assert tables(tmp_path)[0].read_bytes() == before


GATE = """
[[gate]]
id = "moe-here"
title = "moe goes wrong"
url = "https://example.invalid/1"
affected = ">=0"
effect = "skip_ops"
ops = ["moe"]
[[gate]]
id = "no-timings"
title = "it hangs"
url = "https://example.invalid/2"
affected = ">=0"
effect = "no_sync"
"""


def gated(tmp_path: Path, text: str = GATE) -> dict[str, Any]:
    file = tmp_path / "gates.toml"
    file.write_text(text)
    return {"gates_file": file}


@pytest.mark.parametrize("flag", ["on", "auto", "force"])
def test_ops_of_a_gate_are_neither_tuned_nor_loaded_with_the_cache_on(
    flag: str, tmp_path: Path
) -> None:
    own = gated(tmp_path) | {"autotune_distributed_sync": True}
    cold, served = start(2, tmp_path, flag, given=lambda _r: own)
    warm, served_warm = start(2, tmp_path, flag, given=lambda _r: own)
    assert (outcomes(cold), outcomes(warm)) == ({Outcome.COLD}, {Outcome.WARM})
    for tactics in served + served_warm:
        assert {t for (op, _m), (_r, t) in tactics.items() if op == "moe"} == {-1}
        assert -1 not in {t for (op, _m), (_r, t) in tactics.items() if op == "gemm"}
    assert cold[1].plan.skip_ops == {"moe"}
    assert cold[1].decision.skip_ops == ("moe",)
    assert not cold[0].plan.sync
    assert "gate no-timings (ranks 0, 1) forbids it" in cold[0].plan.why


def test_with_the_flag_off_a_gate_leaves_no_op_out(tmp_path: Path) -> None:
    reports, served = start(2, tmp_path, "off", given=lambda _r: gated(tmp_path))
    assert outcomes(reports) == {Outcome.UNCACHED}
    assert -1 not in {tactic for _runner, tactic in served[0].values()}


def test_ops_that_this_flashinfer_cannot_leave_out_cost_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tuner, "lacking", lambda _self: {"skip_ops": "it has no choose_one"})
    reports, served = start(2, tmp_path, given=lambda _r: gated(tmp_path))
    assert outcomes(reports) == {Outcome.UNCACHED}
    assert reports[0].plan.reason is Reason.CACHE_UNUSABLE
    assert "moe cannot be left out: it has no choose_one" in reports[0].plan.why
    assert -1 not in {tactic for _runner, tactic in served[0].values()}
    assert tables(tmp_path) == []


@pytest.mark.parametrize("text", ["lift = ['nothing-such']", "not TOML", None])
def test_a_bad_file_of_gates_means_off_and_an_error_record(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = gated(tmp_path, text or "")
    if text is None:
        own["gates_file"].unlink()
    reports, _served = start(2, tmp_path, given=lambda _r: own)
    assert outcomes(reports) == {Outcome.UNCACHED}
    assert reports[0].decision.reason is Reason.INVALID_SETTING
    assert str(own["gates_file"]) in reports[0].decision.message
    decisions = [r for r in caplog.records if logs.event_of(r)["event"] == logs.DECISION]
    assert {r.levelname for r in decisions} == {"ERROR"}
    assert tables(tmp_path) == []


@pytest.mark.parametrize("flag", ["on", "off"])
def test_a_workload_without_tunable_ops_leaves_no_file(
    flag: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.LOGGER)
    for _ in range(2):
        reports, _ = start(2, tmp_path, flag, toys=lambda _r: Toy(ops=()))
        assert outcomes(reports) == {Outcome.COLD if flag == "on" else Outcome.UNCACHED}
        assert not tables(tmp_path)
    said = [e for e in map(logs.event_of, caplog.records) if e["event"] == logs.NOTHING_TO_TUNE]
    assert len(said) == (2 if flag == "on" else 0)


# -- other passes of the same process -------------------------------------------------------


def test_an_earlier_pass_keeps_its_tactics_and_they_stay_out_of_the_table(tmp_path: Path) -> None:
    other = Toy(ops=("other",), label="other")

    def before(_rank: int, _toy: Toy) -> None:
        with autotune(True):
            other.run()

    for _ in range(2):
        start(1, tmp_path, before=before)
        text = tables(tmp_path)[0].read_text()
        assert "'gemm'" in text
        assert "'other'" not in text

    def work(ranks: Ranks) -> dict[Any, Any]:
        fresh_tuner()
        before(0, other)
        warm_up(Toy(), ranks=ranks, settings=settings(tmp_path))
        return other.serving()

    assert all(tactic == 0 for _runner, tactic in Crowd(1).all(work)[0].values())


def test_the_table_wins_over_what_an_earlier_pass_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(2, tmp_path)

    def before(_rank: int, toy: Toy) -> None:
        with own_tuners(monkeypatch, lambda _r, _n, tactic: -tactic), autotune(True):
            toy.run()

    warm, served = start(2, tmp_path, before=before)
    assert outcomes(warm) == {Outcome.WARM}
    assert {tactic for s in served for _runner, tactic in s.values()} == {0}


def test_what_one_rank_hit_in_memory_reaches_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(rank: int, toy: Toy) -> None:
        if rank == 0:  # rank 0 hits what rank 1 must tune
            with autotune(True):
                toy.run()

    with own_tuners(monkeypatch, lambda rank, _n, tactic: abs(tactic - rank)):
        reports, served = start(2, tmp_path, before=before)
    assert [rank.tuned for rank in reports[0].ranks] == [0, 6]
    assert served[0] == served[1]
    assert {tactic for _runner, tactic in served[0].values()} == {0}


@pytest.mark.parametrize("access", ["rw", "ro"])
def test_loaded_tactics_outlive_a_later_autotune_with_a_cache(access: str, tmp_path: Path) -> None:
    start(2, tmp_path)

    def work(ranks: Ranks) -> dict[Any, Any]:
        fresh_tuner()
        toy = Toy()
        given = settings(tmp_path, autotune_cache_access=access)
        warm_up(toy, ranks=ranks, settings=given)
        with autotune(False, cache=str(tmp_path / f"other{ranks.rank}.json")):
            pass
        return toy.serving()

    for served in Crowd(2).all(work):
        assert all(tactic == 0 for _runner, tactic in served.values())


# -- failures in the workload ---------------------------------------------------------------


@pytest.mark.parametrize("flag", ["on", "off"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_is_named_on_every_rank(flag: str, bad: int, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Report:
        def fail(_op: str) -> None:
            if ranks.rank == bad:
                raise ValueError("boom")

        fresh_tuner()
        given = settings(tmp_path, flag)
        return warm_up(Toy(between=fail), ranks=ranks, settings=given)

    for error in Crowd(2).each(work):
        assert isinstance(error, WorkloadError)
        assert f"rank {bad} (host{bad}) failed in phase run: ValueError: boom" in str(error)
        assert error.fields["ranks"] == [bad]
    assert not tables(tmp_path)


@pytest.mark.parametrize("flag", ["on", "off"])
def test_on_failure_untuned_serves_the_defaults_on_every_rank(flag: str, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[Report, dict[Any, Any]]:
        def fail(op: str) -> None:
            if ranks.rank == 1 and op == "moe":
                raise ValueError("boom")

        fresh_tuner()
        toy = Toy(between=fail)
        given = settings(tmp_path, flag, autotune_on_failure="untuned")
        report = warm_up(toy, ranks=ranks, settings=given)
        return report, toy.serving()

    for report, served in Crowd(2).all(work):
        assert report.outcome is Outcome.UNTUNED
        assert "rank 1" in report.plan.why
        assert {tactic for _runner, tactic in served.values()} == {-1}
    assert not tables(tmp_path)


class Unknowable(Toy):
    @property
    def identity(self) -> dict[str, Any]:
        raise OSError("no model here")


class Unstartable(Toy):
    @property
    def needs_cuda(self) -> bool:
        raise OSError("no driver here")

    @needs_cuda.setter
    def needs_cuda(self, _value: bool) -> None:
        pass


def test_a_rank_that_cannot_start_is_named_on_every_rank_at_once(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Report:
        toy = Unstartable() if ranks.rank == 1 else Toy()
        return warm_up(toy, ranks=ranks, settings=settings(tmp_path))

    for error in Crowd(2, limit=5).each(work):
        assert isinstance(error, RanksError)
        assert "rank 1 (host1): OSError: no driver here" in str(error)


@pytest.mark.parametrize("flag", ["on", "off"])
def test_an_identity_that_cannot_be_told_costs_the_cache_and_not_the_start(
    flag: str, tmp_path: Path
) -> None:
    reports, served = start(
        2, tmp_path, flag, toys=lambda rank: Unknowable() if rank == 1 else Toy()
    )
    assert outcomes(reports) == {Outcome.UNCACHED}
    assert all(tactic == 0 for s in served for _runner, tactic in s.values())
    told = "OSError: no model here (rank 1)" in reports[0].plan.why
    assert told == (flag == "on"), "off does not even ask"


@pytest.mark.parametrize("odd", [{"dtype": torch.float16}, {"path": Path("/m")}, {1: 2}])
def test_an_identity_that_is_not_json_is_named_by_its_text(odd: Any, tmp_path: Path) -> None:
    class Odd(Toy):
        @property
        def identity(self) -> dict[str, Any]:
            return dict(odd)

    for expected in (Outcome.COLD, Outcome.WARM):
        reports, _ = start(2, tmp_path, toys=lambda _r: Odd())
        assert outcomes(reports) == {expected}


def test_an_identity_that_differs_in_every_process_is_refused(tmp_path: Path) -> None:
    class Shifty(Toy):
        @property
        def identity(self) -> dict[str, Any]:
            return {"model": object()}

    reports, _ = start(2, tmp_path, toys=lambda _r: Shifty())
    assert reports[0].plan.reason is Reason.CACHE_UNUSABLE
    assert "differs from process to process" in reports[0].plan.why


def test_a_progress_bar_that_fails_costs_the_bar_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError("no terminal")

    fresh_tuner()
    report = warm_up(Toy(), ranks=Ranks(), settings=settings(tmp_path), on_step=broken)
    assert report.outcome is Outcome.COLD
    said = [e for e in map(logs.event_of, caplog.records) if e["event"] == logs.NO_PROGRESS]
    assert [event["why"] for event in said] == ["BrokenPipeError: no terminal"]


def test_inside_someone_elses_autotune_the_table_is_left_alone(tmp_path: Path) -> None:
    fresh_tuner()
    with autotune(True):
        report = warm_up(Toy(), ranks=Ranks(), settings=settings(tmp_path))
    assert report.plan.reason is Reason.CACHE_UNUSABLE
    assert "someone else's autotune() is open" in report.plan.why


def test_runners_that_differ_in_attributes_only_serve_what_the_next_start_will(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twins(Toy):
        """One call, asked of two runners of one class and key that hash apart."""

        def choose(self, op: str, tokens: int | None = None) -> Any:
            first, second = Alpha(op), Alpha(op)
            first.where, second.where = 1, 2
            both = [choose_one(op, runner, tokens or self.tokens) for runner in (first, second)]
            return str(both), 0

    taken = iter(range(100))

    def cost(_rank: int, _name: str, tactic: Any) -> float:
        return float((tactic + next(taken)) % 7)

    with own_tuners(monkeypatch, cost):
        cold, served = start(1, tmp_path, toys=lambda _r: Twins(ops=("gemm",)))
        warm, again = start(1, tmp_path, toys=lambda _r: Twins(ops=("gemm",)))
    assert (outcomes(cold), outcomes(warm)) == ({Outcome.COLD}, {Outcome.WARM})
    assert served == again


def test_ranks_whose_calls_offer_other_runners_keep_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneRunner(Toy):
        def choose(self, op: str, tokens: int | None = None) -> Any:
            runner = Alpha() if this_thread.rank == 0 else Beta()
            return choose_one(op, runner, tokens or self.tokens)

    with own_tuners(monkeypatch, functools.partial(nearest, 1)):
        cold, served = start(2, tmp_path, toys=lambda _r: OneRunner(ops=("gemm",)))
        warm, again = start(2, tmp_path, toys=lambda _r: OneRunner(ops=("gemm",)))
    assert (outcomes(cold), outcomes(warm)) == ({Outcome.COLD}, {Outcome.WARM})
    assert served == again
    assert set(served[0].values()) == {("Alpha", 1)}
    assert set(served[1].values()) == {("Beta", 1)}
    one_digest(warm)


def test_profiles_whose_every_tactic_fails_are_counted(tmp_path: Path) -> None:
    reports, _ = start(2, tmp_path, toys=lambda _r: Toy(ops=("gemm", "bad/broken")))
    assert [(r.tuned, r.missing, r.failed) for r in reports[0].ranks] == [(3, 3, 3)] * 2


def test_profiles_whose_every_tactic_fails_are_not_tuned_at_the_next_start(tmp_path: Path) -> None:
    def toys(_rank: int) -> Toy:
        return Toy(ops=("gemm", "bad/broken"))

    cold, served = start(2, tmp_path, toys=toys)
    tried: list[Any] = []

    def watch(_rank: int, _toy: Toy) -> None:
        tried.append(tuner_of_this_thread().stats.failed_profiling_count)

    warm, again = start(2, tmp_path, toys=toys, before=watch)
    assert (outcomes(cold), outcomes(warm)) == ({Outcome.COLD}, {Outcome.WARM})
    assert tried == [{}, {}], "no tactic was tried again"
    assert [(r.loaded, r.missing, r.failed) for r in warm[0].ranks] == [(6, 0, 0)] * 2
    assert one_digest(cold) == one_digest(warm)
    assert again == served
    assert {served for (op, _), served in served[0].items() if "bad" in op} == {("Alpha", -1)}


def test_profiles_that_ran_out_of_memory_are_tuned_again_at_each_start(tmp_path: Path) -> None:
    for _ in range(2):
        reports, _ = start(2, tmp_path, toys=lambda _r: Toy(ops=("gemm", "big/oom")))
        assert [(r.missing, r.failed) for r in reports[0].ranks] == [(3, 3)] * 2
        assert reports[0].table is not None
        assert reports[0].table.entries == 3


def test_a_rank_that_finishes_early_meets_the_others_before_its_next_collective(
    tmp_path: Path,
) -> None:
    left: dict[int, float] = {}

    def work(ranks: Ranks) -> Report:
        def dawdle() -> None:
            if ranks.rank == 1:
                time.sleep(0.5)
            left[ranks.rank] = time.monotonic()

        report = warm_up(Toy(after=dawdle), ranks=ranks, settings=settings(tmp_path, "off"))
        assert time.monotonic() >= left[1]
        return report

    Crowd(2).all(work)


# -- the disk -------------------------------------------------------------------------------


def test_a_directory_under_a_file_is_warned_about_once_and_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tables").write_text("a file in its place")
    for _ in range(2):
        caplog.clear()
        reports, served = start(2, tmp_path)
        assert outcomes(reports) == {Outcome.COLD}
        assert served[0] == served[1]
        kept = [r for r in caplog.records if logs.event_of(r)["event"] == logs.NOT_KEPT]
        assert len(kept) >= 1


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"\xff\xfe", b"{}", b'{"_metadata": {}}'])
def test_a_bad_table_is_set_aside_and_costs_one_tuning(junk: bytes, tmp_path: Path) -> None:
    cold, _ = start(2, tmp_path)
    path = tables(tmp_path)[0]
    path.write_bytes(junk)
    again, _ = start(2, tmp_path)
    assert outcomes(again) == {Outcome.COLD}
    assert [p.read_bytes() for p in path.parent.glob("*.quarantined-*")] == [junk]
    warm, _ = start(2, tmp_path)
    assert outcomes(warm) == {Outcome.WARM}
    assert one_digest(warm) == one_digest(cold)


def test_a_table_that_cannot_be_loaded_on_one_rank_is_given_back_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(2, tmp_path)
    load = AutoTuner.load_configs

    def refuse(self: Any, path: str) -> bool:
        if this_thread.rank == 1 and not this_thread.__dict__.setdefault("tried", []):
            this_thread.tried.append(path)
            raise OSError("no space left on the temporary disk")
        return bool(load(self, path))

    monkeypatch.setattr(AutoTuner, "load_configs", refuse)
    reports, served = start(2, tmp_path)
    assert outcomes(reports) == {Outcome.COLD}
    assert "rank 1 (host1): OSError: no space left" in reports[0].plan.why
    assert all(rank.tuned == 6 for rank in reports[0].ranks)
    assert served[0] == served[1]


# -- vLLM's signature -----------------------------------------------------------------------


class Scheduler:
    max_num_batched_tokens = 4


class Runner:
    """Shaped like vLLM's model runner on a CPU."""

    device = "cpu"

    def __init__(self) -> None:
        self.scheduler_config = Scheduler()
        self.calls: list[dict[str, Any]] = []
        self.toy = Toy()

    def _dummy_run(self, **given: Any) -> None:
        assert torch.is_inference_mode_enabled()
        self.calls.append(given)
        self.toy.run()


@pytest.mark.parametrize("flag", ["", "1", "0"])
def test_flashinfer_autotune_runs_vllms_dummy_forward_under_autotune(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FLASHINFER_PERSISTENT_CACHE", flag)
    monkeypatch.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path / "tables"))
    for _ in range(2):
        fresh_tuner()
        runner = Runner()
        flashinfer_autotune(runner)
        assert runner.calls == [{"num_tokens": 4, "skip_eplb": True, "is_profile": True}]
        assert all(tactic == 0 for _runner, tactic in runner.toy.serving().values())
    assert bool(tables(tmp_path)) == (flag == "1")


def test_a_bad_value_in_a_server_means_off_and_an_error_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_FLASHINFER_PERSISTENT_CACHE", "maybe")
    flashinfer_autotune(Runner())
    decisions = [r for r in caplog.records if logs.event_of(r)["event"] == logs.DECISION]
    assert [r.levelname for r in decisions] == ["ERROR"]
    assert logs.event_of(decisions[0])["reason"] == Reason.INVALID_SETTING.value
    assert "maybe" in decisions[0].getMessage()


def test_plan_actions_are_all_reached() -> None:
    assert {a.value for a in Action} == {"fail", "uncached", "untuned", "cold", "warm"}


@pytest.mark.parametrize("flag", ["on", "off"])
def test_skip_ops_that_a_release_cannot_heed_cost_the_cache_and_not_the_start(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Tuner, "lacking", lambda _self: {"skip_ops": "it has no choose_one"})
    reports, _ = start(2, tmp_path, flag, given=lambda _r: {"autotune_skip_ops": ["moe"]})
    assert outcomes(reports) == {Outcome.UNCACHED}
    told = [e for e in map(logs.event_of, caplog.records) if e["event"] == logs.WITHOUT]
    assert [(e["feature"], e["why"]) for e in told] == [
        ("skip_ops", "it has no choose_one (ranks 0, 1)")
    ]


def test_a_workload_that_fails_with_and_without_its_table_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(2, tmp_path)
    before = tables(tmp_path)[0].read_bytes()

    def work(ranks: Ranks) -> Report:
        def fail(_op: str) -> None:
            raise ValueError("invalid tactic")

        fresh_tuner()
        return warm_up(Toy(between=fail), ranks=ranks, settings=settings(tmp_path))

    for error in Crowd(2).each(work):
        assert isinstance(error, WorkloadError)
        assert re.search(r"the workload failed: rank [01] .* in phase run: ValueError", str(error))
    assert tables(tmp_path)[0].read_bytes() == before
    told = [e["event"] for e in map(logs.event_of, caplog.records)]
    assert told.count(logs.RETUNING) == told.count(logs.BROUGHT_BACK) == 1


def test_a_loaded_tactic_that_one_rank_alone_rejects_costs_one_fresh_tuning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(2, tmp_path)
    runs: list[tuple[int, bool]] = []

    def work(ranks: Ranks) -> Report:
        rank = ranks.rank

        def reject(_op: str) -> None:
            first = (rank, True) not in runs
            runs.append((rank, True))
            if rank == 1 and first:
                raise RuntimeError("invalid tactic")

        fresh_tuner()
        return warm_up(Toy(between=reject), ranks=ranks, settings=settings(tmp_path))

    reports = [report for report in Crowd(2).each(work) if isinstance(report, Report)]
    assert len(reports) == 2
    assert outcomes(reports) == {Outcome.RETUNED}
    assert {rank.digest for rank in reports[0].ranks} == {reports[0].ranks[0].digest}
    told = [e for e in map(logs.event_of, caplog.records) if e["event"] == logs.RETUNING]
    assert len(told) == 1
    assert "rank 1 (host1): RuntimeError: invalid tactic" in told[0]["why"]
    assert len(tables(tmp_path)) == 1  # a fresh one, with the old one beside it
    assert len(list(tables(tmp_path)[0].parent.glob("*.quarantined-*-failed_run"))) == 1
    fresh_tuner()
    again, _ = start(2, tmp_path)
    assert outcomes(again) == {Outcome.WARM}
