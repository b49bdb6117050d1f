"""What we rely on in FlashInfer, checked on the release that this process imports.

`releases.py` runs this file in a process for each release; no other run collects it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from flashinfer.autotuner import AutoTuner, autotune
from packaging.version import Version

from fi_flags.decision import Reason
from fi_flags.errors import TunerError
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome, Report
from fi_flags.settings import FlashInferSettings
from fi_flags.table import Entries, op_of, parse
from fi_flags.tuner import NAMES, PROCESS_GROUP, Counts, Pass, Tuner
from fi_flags.warmup import warm_up
from tests.toy import Alpha, Beta, Crowd, Toy, fresh_tuner, own_tuners

RELEASE = Version(version("flashinfer-python"))
# A name that came with 0.6.18 is in its post-releases and pre-releases alike.
BASE = Version(RELEASE.base_version)
OPTIONS = inspect.signature(autotune).parameters
EXTRAS = Version("0.6.13") <= BASE  # a file key holds a call's extras


@pytest.fixture(autouse=True)
def tuners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_tuners(monkeypatch):
        fresh_tuner()
        yield


def run(tuner: Tuner, toy: Toy, *, tune: bool = True, **options: Any) -> Pass:
    with tuner.run(tune=tune, **options) as seen:
        toy.run()
    return seen


def tuned(toy: Toy, monkeypatch: pytest.MonkeyPatch, best: int = 2) -> Entries:
    """What a process exports in which one tactic was the fastest; then as after a restart."""
    with own_tuners(monkeypatch, lambda _rank, name, tactic: len(name) + abs(tactic - best)):
        tuner = Tuner()
        entries = tuner.export(run(tuner, toy))
    fresh_tuner()
    return entries


# -- what is there --------------------------------------------------------------------------


def test_imported_release_is_the_one_asked_for() -> None:
    import flashinfer  # noqa: PLC0415

    assert flashinfer.__version__ == str(RELEASE)


def test_private_names_are_there_from_the_release_on_that_the_table_gives() -> None:
    there = {name for name in NAMES if hasattr(AutoTuner(), name)}
    assert there == {name for name, (_, since) in NAMES.items() if Version(since) <= BASE}


def test_only_group_timing_is_lacking_and_only_before_its_release() -> None:
    expected = {PROCESS_GROUP} if Version("0.6.16") > BASE else set()
    assert Tuner().lacking().keys() == expected
    assert Tuner().obstacle() == ""


def test_keys_and_values_are_read_as_this_release_spells_them() -> None:
    tuner = Tuner()
    assert tuner._form.with_extras is EXTRAS
    assert tuner._form.with_index is (Version("0.6.16") > BASE)


# -- tactics --------------------------------------------------------------------------------


def test_a_pass_is_observed_and_exported_without_what_others_tuned() -> None:
    with autotune(True):
        Toy(ops=("mine", "other")).run()
    tuner = Tuner()
    seen = run(tuner, Toy(ops=("mine", "new")))
    assert tuner.counts(seen) == Counts(tuned=3, held=3)
    assert {op_of(key) for key in tuner.export(seen)} == {"mine", "new"}


def test_a_loaded_table_serves_what_was_tuned_and_nothing_is_tuned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = Toy()
    entries = tuned(toy, monkeypatch)
    tuner = Tuner()
    tuner.load(entries, tuner.stamps())
    seen = run(tuner, toy)
    assert tuner.counts(seen) == Counts(loaded=6)
    assert set(toy.serving().values()) == {("Beta", 2)}
    assert tuner.export(seen) == entries


def test_a_loaded_entry_wins_over_what_memory_holds_for_another_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = Toy()
    entries = tuned(toy, monkeypatch)
    with own_tuners(monkeypatch, lambda _r, name, tactic: tactic + 9 * (name != "Alpha")):
        fresh_tuner()
        run(Tuner(), toy)
        assert set(toy.serving().values()) == {("Alpha", 0)}
        tuner = Tuner()
        tuner.load(entries, tuner.stamps())
        assert set(toy.serving().values()) == {("Beta", 2)}


def test_what_is_settled_is_served_from_memory_and_outlives_anothers_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toy = Toy()
    entries = tuned(toy, monkeypatch)
    tuner = Tuner()
    tuner.load(entries, tuner.stamps())
    tuner.settle(run(tuner, toy))
    assert len(tuner._tuner.profiling_cache) == 6
    with autotune(True, cache=str(tmp_path / "others.json")):
        toy.run()
    assert set(toy.serving().values()) == {("Beta", 2)}


def test_what_was_loaded_can_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy()
    entries = tuned(toy, monkeypatch)
    tuner = Tuner()
    run(tuner, toy)
    before = toy.serving()
    undo = tuner.load(entries, tuner.stamps())
    tuner.settle(run(tuner, toy))
    assert toy.serving() != before
    tuner.give_back(undo)
    assert toy.serving() == before


def test_a_table_of_another_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tuned(Toy(), monkeypatch)
    tuner = Tuner()
    with pytest.raises(TunerError, match="environment"):
        tuner.load(entries, tuner.stamps() | {"flashinfer_version": "0.0"})
    assert tuner.held() == 0


def test_calls_that_differ_in_extras_only_are_kept_apart_or_not_kept() -> None:
    tuner, toy = Tuner(), Toy(ops=("gemm/8x4", "gemm/128x4"))
    seen = run(tuner, toy)
    assert tuner.counts(seen).tuned == 6
    if EXTRAS:
        assert len(tuner.export(seen)) == 6
    else:
        with pytest.raises(TunerError, match="calls of gemm differ in extras"):
            tuner.export(seen)


def test_a_tactic_of_several_numbers_comes_back_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Alpha, "get_valid_tactics", lambda *_: [(8, (1, 2))])
    with own_tuners(monkeypatch, lambda _r, name, _t: len(name)):
        toy = Toy(ops=("gemm",))
        tuner = Tuner()
        entries = tuner.export(run(tuner, toy))
        served = toy.serving()
        fresh_tuner()
        tuner = Tuner()
        tuner.load(entries, tuner.stamps())
        tuner.settle(run(tuner, toy))
        assert toy.serving() == served
        assert {tactic for _, tactic in served.values()} == {(8, (1, 2))}


# -- passes that leave something out ----------------------------------------------------------


def test_a_pass_that_must_not_tune_does_not_inside_the_workloads_own_autotune() -> None:
    tuner, toy = Tuner(), Toy()
    with tuner.run(tune=False) as seen, autotune(True):
        toy.run()
    assert tuner.counts(seen) == Counts(missing=6)
    assert tuner.held() == 0
    assert {tactic for _, tactic in toy.chosen.values()} == {-1}


def test_ops_to_skip_are_not_tuned_also_inside_the_workloads_own_autotune() -> None:
    tuner, toy = Tuner(), Toy()
    with tuner.run(tune=True, skip_ops={"moe"}) as seen, autotune(True):
        toy.run()
    assert {op_of(key) for key in tuner.export(seen)} == {"gemm"}
    assert toy.chosen == {"gemm": ("Beta", 0), "moe": ("Alpha", -1)}


@pytest.mark.skipif("tuning_buckets" not in OPTIONS, reason="no tuning_buckets")
def test_buckets_of_the_workloads_own_autotune_are_seen() -> None:
    tuner = Tuner()
    with tuner.run(tune=True) as seen, autotune(True, tuning_buckets=(2, 3), round_up=True):
        Toy(ops=("gemm",)).run()
    assert tuner.counts(seen).tuned == 2
    assert len(tuner.export(seen)) == 2


@pytest.mark.skipif(not hasattr(AutoTuner, "rank_tactics"), reason="no rank_tactics")
def test_tactics_that_are_ranked_are_exported_too() -> None:
    import torch  # noqa: PLC0415
    from flashinfer.autotuner import TuningConfig  # noqa: PLC0415

    tuner = Tuner()
    with tuner.run(tune=True) as seen:
        inputs = [torch.zeros(4, 4)]
        ranked = AutoTuner.get().rank_tactics("ranked", [Beta()], TuningConfig(), inputs, k=2)
    assert ranked == [0, 1]
    assert tuner.counts(seen).tuned == 1
    assert [op_of(key) for key in tuner.export(seen)] == ["ranked"]


# -- the whole ------------------------------------------------------------------------------


def start(place: Path, toy: Toy, flag: str = "force") -> tuple[list[Report], list[Any]]:
    settings = FlashInferSettings(persistent_cache=flag, autotune_cache_dir=place)

    def work(ranks: Ranks) -> tuple[Report, Any]:
        fresh_tuner()
        report = warm_up(toy, ranks=ranks, settings=settings)
        return report, toy.serving()

    done = Crowd(2).all(work)
    return [report for report, _ in done], [served for _, served in done]


def outcomes(reports: list[Report]) -> set[Outcome]:
    return {rank.outcome for report in reports for rank in report.ranks}


def test_two_ranks_start_cold_then_warm_and_serve_the_same(tmp_path: Path) -> None:
    cold, served = start(tmp_path, Toy())
    warm, again = start(tmp_path, Toy())
    assert (outcomes(cold), outcomes(warm)) == ({Outcome.COLD}, {Outcome.WARM})
    assert all(rank.tuned == 0 for rank in warm[0].ranks)
    assert len({str(one) for one in served + again}) == 1
    (table,) = tmp_path.rglob("*.json")
    assert len(parse(table.read_bytes()).entries) == 6


def test_flashinfer_itself_reads_our_table(tmp_path: Path) -> None:
    toy = Toy()
    _, served = start(tmp_path, toy)
    (table,) = tmp_path.rglob("*.json")
    assert fresh_tuner().load_configs(str(table))
    assert toy.serving() == served[0]


def test_the_gate_keeps_releases_with_the_defect_per_rank_unless_forced(tmp_path: Path) -> None:
    reports, _ = start(tmp_path, Toy(), flag="on")
    assert outcomes(reports) == {Outcome.COLD if EXTRAS else Outcome.UNCACHED}
    assert reports[0].decision.reason is (Reason.OPERATOR_ON if EXTRAS else Reason.GATE_CLOSED)


def test_forced_on_calls_that_a_file_would_mix_up_start_tuned_and_keep_nothing(
    tmp_path: Path,
) -> None:
    toy = Toy(ops=("gemm/8x4", "gemm/128x4"))
    reports, served = start(tmp_path, toy)
    assert outcomes(reports) == {Outcome.COLD if EXTRAS else Outcome.UNCACHED}
    assert -1 not in {tactic for one in served for _, tactic in one.values()}
    if not EXTRAS:
        assert reports[0].plan.reason is Reason.CACHE_UNUSABLE
        assert "differ in extras" in reports[0].plan.why
        assert not list(tmp_path.rglob("*.json"))
