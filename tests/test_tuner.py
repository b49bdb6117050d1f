"""The tuner: what it observes, loads, and gives back, on FlashInfer's real AutoTuner."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flashinfer.autotuner import (
    AutoTuner,
    TuningConfig,
    autotune,
    get_autotune_process_group,
    set_autotune_process_group,
)

from fi_flags import tuner as tuner_module
from fi_flags.errors import TunerError
from fi_flags.keys import KeyFormat
from fi_flags.table import Entries, op_of
from fi_flags.tuner import (
    KEEP_GROUP,
    LOAD,
    NAMES,
    OBSERVE,
    PROCESS_GROUP,
    SETTLE,
    SKIP_OPS,
    Counts,
    Pass,
    Tuner,
    wall_clock,
)
from tests.toy import Alpha, Chosen, Toy, choose_one, fresh_tuner, own_tuners

FLASHINFER = "flashinfer.jit"


@pytest.fixture(autouse=True)
def tuners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_tuners(monkeypatch):
        fresh_tuner()
        yield


def run(tuner: Tuner, toy: Toy, *, tune: bool = True, **options: Any) -> Pass:
    with tuner.run(tune=tune, **options) as seen:
        toy.run()
    return seen


def tuned(toy: Toy, monkeypatch: pytest.MonkeyPatch, best: int = 0) -> Entries:
    """The entries of a process in which one tactic was the fastest."""
    fresh_tuner()
    with own_tuners(monkeypatch, lambda _rank, name, tactic: len(name) + abs(tactic - best)):
        tuner = Tuner()
        entries = tuner.export(run(tuner, toy))
    fresh_tuner()
    return entries


def state(tuner: Any) -> dict[str, Any]:
    """Everything the tuner holds, but its memos of what it has logged already."""
    return {
        name: copy.copy(value)
        for name, value in vars(tuner).items()
        if isinstance(value, dict | set | int | bool)
        and not name.startswith(("_logged", "_warned"))
    }


# -- observing ------------------------------------------------------------------------------


def test_a_pass_exports_what_it_tuned_and_what_it_hit_and_nothing_else() -> None:
    with autotune(True):
        Toy(ops=("mine", "other")).run()
    tuner = Tuner()
    seen = run(tuner, Toy(ops=("mine", "new")))
    assert {op_of(key) for key in tuner.export(seen)} == {"mine", "new"}
    assert tuner.counts(seen) == Counts(tuned=3, held=3)


def test_a_pass_that_does_not_tune_counts_every_bucket_as_missing() -> None:
    tuner = Tuner()
    seen = run(tuner, Toy(), tune=False)
    assert tuner.counts(seen) == Counts(missing=6)
    assert tuner.export(seen) == {}


def test_profiles_whose_every_tactic_fails_are_missing_and_failed() -> None:
    tuner = Tuner()
    seen = run(tuner, Toy(ops=("gemm/broken",)))
    assert tuner.counts(seen) == Counts(missing=3, failed=3)


class OneRunner(Toy):
    def choose(self, op: str, tokens: int | None = None) -> Chosen:
        name, _, extra = op.partition("/")
        return choose_one(name, Alpha(extra), tokens or self.tokens)


def test_calls_whose_every_tactic_fails_are_given_up_and_not_tried_again() -> None:
    tuner = Tuner()
    toy = Toy(ops=("gemm/broken", "moe"))
    seen = run(tuner, toy)
    tuner.give_up(seen)
    assert tuner.counts(seen) == Counts(tuned=3, missing=3, failed=3)
    entries = tuner.export(seen)
    assert [e[:2] for k, e in entries.items() if op_of(k) == "gemm"] == [["Alpha", -1]] * 3
    fresh_tuner()
    later = Tuner()
    later.load(entries, later.stamps())
    again = run(later, toy)
    assert later.counts(again) == Counts(loaded=6)
    assert later._failures() == frozenset()
    assert toy.serving()["gemm/broken", 4] == ("Alpha", -1)


@pytest.mark.parametrize("toy", [Toy(ops=("gemm/oom",)), OneRunner(ops=("gemm/oom",))])
def test_nothing_is_given_up_where_memory_ran_out(toy: Toy) -> None:
    tuner = Tuner()
    seen = run(tuner, toy)
    assert tuner._failures()
    tuner.give_up(seen)
    assert tuner.export(seen) == {}
    assert tuner.counts(seen).missing == 3


def test_a_pass_that_must_not_tune_gives_nothing_up() -> None:
    tuner = Tuner()
    run(tuner, Toy(ops=("gemm/broken",)))
    seen = run(tuner, Toy(ops=("gemm/broken",)), tune=False)
    tuner.give_up(seen)
    assert tuner.export(seen) == {}


def test_calls_that_differ_in_extras_only_are_told_apart() -> None:
    tuner = Tuner()
    seen = run(tuner, Toy(ops=("gemm/8x4", "gemm/128x4")))
    assert tuner.counts(seen).tuned == 6
    assert len(tuner.export(seen)) == 6


def test_buckets_of_a_nested_autotune_are_seen() -> None:
    tuner = Tuner()
    with tuner.run(tune=True) as seen, autotune(True, tuning_buckets=(2, 3), round_up=True):
        Toy(ops=("gemm",)).run()
    assert tuner.counts(seen).tuned == 2
    assert len(tuner.export(seen)) == 2


def test_steps_are_told_with_op_done_and_known() -> None:
    steps: list[tuple[str, int, int]] = []
    run(Tuner(), Toy(), on_step=lambda *step: steps.append(step))
    assert [(op, done) for op, done, _ in steps] == [
        ("gemm", 1), ("gemm", 2), ("gemm", 3), ("moe", 4), ("moe", 5), ("moe", 6),
    ]  # fmt: skip
    assert [total for _, _, total in steps] == [3, 3, 3, 6, 6, 6]


def test_watching_that_fails_disturbs_nothing_and_is_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("another signature")

    monkeypatch.setattr(Tuner, "_note", fail)
    tuner, toy = Tuner(), Toy()
    seen = run(tuner, toy)
    assert all(tactic == 0 for _runner, tactic in toy.chosen.values())
    with pytest.raises(TunerError, match="could not be observed: LookupError: another signature"):
        tuner.export(seen)


# -- loading --------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["Alpha", "Beta"])
def test_a_loaded_table_wins_over_memory_whatever_the_runner(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy()
    entries = tuned(toy, monkeypatch, best=2)
    with own_tuners(monkeypatch, lambda _r, name, tactic: tactic + 9 * (name != runner)):
        fresh_tuner()
        with autotune(True):
            toy.run()
        assert {name for name, _ in toy.serving().values()} == {runner}
        tuner = Tuner()
        tuner.load(entries, tuner.stamps())
        assert set(toy.serving().values()) == {("Beta", 2)}


def test_loading_keeps_tactics_and_records_of_other_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = tuned(Toy(), monkeypatch, best=1)
    other = Toy(ops=("other",))
    real = fresh_tuner()
    with autotune(True):
        other.run()
    real.publish_namespaced_records("product", {"a": 1})
    tuner = Tuner()
    tuner.load(entries, tuner.stamps())
    assert {tactic for _r, tactic in other.serving().values()} == {0}
    assert real.get_namespaced_records("product") == {"a": 1}
    assert "product" in real._dirty_namespaces


def test_export_and_stamps_leave_no_trace_in_the_tuner() -> None:
    real = fresh_tuner()
    with autotune(True):
        Toy().run()
    before = state(real)
    tuner = Tuner()
    tuner.stamps()
    tuner.export(Pass(tune=True, before={}))
    assert state(real) == before


def test_give_back_restores_what_was_there_in_the_same_containers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = tuned(Toy(), monkeypatch, best=2)
    real, toy = fresh_tuner(), Toy()
    with autotune(True):
        toy.run()
    held, before = real.profiling_cache, state(real)
    tuner = Tuner()
    undo = tuner.load(entries, tuner.stamps())
    tuner.settle(run(tuner, toy))
    assert {tactic for _r, tactic in toy.serving().values()} == {2}
    for _ in range(2):  # a snapshot can be given back more than once
        tuner.give_back(undo)
        assert state(real) == before
        assert real.profiling_cache is held
        assert {tactic for _r, tactic in toy.serving().values()} == {0}
        with autotune(True):
            Toy(ops=("more",)).run()


def test_a_table_of_another_environment_is_refused_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = tuned(Toy(), monkeypatch)
    real = fresh_tuner()
    with autotune(True):
        Toy().run()
    before, tuner = state(real), Tuner()
    with pytest.raises(TunerError, match="environment"):
        tuner.load(entries, {**tuner.stamps(), "gpu": "another"})
    assert state(real) == before


def test_a_load_that_raises_half_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tuned(Toy(), monkeypatch)
    real = fresh_tuner()
    before = state(real)
    first = next(iter(entries))
    with pytest.raises(TypeError):
        Tuner().load({**entries, first: [entries[first][0], 0, 5]}, Tuner().stamps())
    assert state(real) == before


def test_what_is_settled_is_not_tuned_again_and_survives_anothers_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toy = Toy()
    entries = tuned(toy, monkeypatch, best=2)
    tuner = Tuner()
    tuner.load(entries, tuner.stamps())
    seen = run(tuner, toy)
    assert tuner.counts(seen) == Counts(loaded=6)
    tuner.settle(seen)
    with autotune(True, cache=str(tmp_path / "others.json")):
        toy.run()
    assert {tactic for _r, tactic in toy.serving().values()} == {2}
    assert tuner.export(seen) == entries, "policies and records came along"


def test_without_settling_anothers_cache_would_drop_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The test above is about something FlashInfer does."""
    toy = Toy()
    entries = tuned(toy, monkeypatch, best=2)
    tuner = Tuner()
    tuner.load(entries, tuner.stamps())
    run(tuner, toy)
    with autotune(False, cache=str(tmp_path / "others.json")):
        pass
    assert {tactic for _r, tactic in toy.serving().values()} == {-1}


# -- giving back ----------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_group_mode_and_look_up_are_given_back(fails: bool) -> None:
    real, group = fresh_tuner(), object()
    set_autotune_process_group(group)
    try:
        tuner = Tuner()

        def inside(_op: str) -> None:
            assert get_autotune_process_group() is None
            assert real.is_tuning_mode
            if fails:
                raise ValueError("boom")

        if fails:
            with pytest.raises(ValueError, match="boom"):
                run(tuner, Toy(between=inside))
        else:
            run(tuner, Toy(between=inside))
        assert get_autotune_process_group() is group
    finally:
        set_autotune_process_group(None)
    assert not real.is_tuning_mode
    assert real._active_tuning_contexts == 0
    assert "search_cache" not in vars(real)
    assert real._get_skip_ops_stack() == []


def test_the_group_can_be_kept_or_set() -> None:
    group, mine, seen = object(), object(), []
    tuner = Tuner()
    set_autotune_process_group(group)
    try:
        with tuner.run(tune=False, group=KEEP_GROUP):
            seen.append(get_autotune_process_group())
        with tuner.run(tune=False, group=mine):
            seen.append(get_autotune_process_group())
    finally:
        set_autotune_process_group(None)
    assert seen == [group, mine]


def test_flashinfers_bars_and_chatter_are_held_back_but_not_its_warnings(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(FLASHINFER)
    with caplog.at_level(logging.INFO, FLASHINFER):
        tuner = Tuner()
        with tuner.run(tune=True):
            Toy().run()
            logger.warning("heed this")
        tuner.stamps()
        assert [record.getMessage() for record in caplog.records] == ["heed this"]
        logger.info("as before")
        assert caplog.records[-1].getMessage() == "as before"
    assert "Tuning" not in capfd.readouterr().err
    fresh_tuner()
    with autotune(True):
        Toy().run()
    assert "Tuning" in capfd.readouterr().err


def test_wall_clock_puts_back_what_it_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = AutoTuner._profile_single_kernel, torch.cuda.is_current_stream_capturing

    def fail() -> None:
        with wall_clock():
            assert AutoTuner._profile_single_kernel is not before[0]
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert (AutoTuner._profile_single_kernel, torch.cuda.is_current_stream_capturing) == before


def test_wall_clock_times_as_many_calls_as_flashinfer_or_as_asked() -> None:
    calls: list[int] = []

    class Counting:
        def __call__(self, _inputs: Any, *, tactic: int) -> None:
            calls.append(tactic)

    for repeat, expected in ((None, 13), (2, 2)):
        calls.clear()
        with wall_clock(repeat):
            assert AutoTuner._profile_single_kernel(AutoTuner(), Counting(), [], 7, None) >= 0
        assert calls == [7] * expected


# -- what a release lacks -------------------------------------------------------------------


def test_this_release_lacks_nothing_and_there_is_no_obstacle() -> None:
    tuner = Tuner()
    assert tuner.lacking() == {}
    assert tuner.obstacle() == ""
    assert tuner.held() == 0


@pytest.mark.parametrize("name", sorted(name for name, (features, _) in NAMES.items() if features))
def test_a_missing_name_turns_its_features_off_and_no_other_and_the_workload_runs(
    name: str,
) -> None:
    toy, tuner = Toy(), Tuner()
    real = tuner._tuner
    run(tuner, toy)
    tuner._tuner = Hidden(real, name)
    features = {*NAMES[name][0]} - {SKIP_OPS}  # this release can do that by itself
    assert set(tuner.lacking()) == features
    assert all(
        why == f"FlashInfer {tuner.version}: its AutoTuner has no {name}"
        for why in tuner.lacking().values()
    )
    assert bool(tuner.obstacle()) is bool(features & {LOAD, OBSERVE})
    seen = run(tuner, toy, tune=False)
    tuner.counts(seen)
    tuner.held()
    tuner.give_back(tuner.snapshot())
    if OBSERVE in features:
        with pytest.raises(TunerError, match=f"its AutoTuner has no {name}"):
            tuner.export(seen)


class Hidden:
    """A tuner without one of its names."""

    def __init__(self, tuner: Any, name: str) -> None:
        vars(self).update(_real=tuner, _name=name)

    def __getattr__(self, name: str) -> Any:
        if name == vars(self)["_name"]:
            raise AttributeError(name)
        return getattr(vars(self)["_real"], name)


def test_keys_of_another_kind_are_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_api: object) -> bool:
        raise ValueError("a file calls it something")

    monkeypatch.setattr(tuner_module, "_keys_hold_extras", fail)
    tuner = Tuner()
    why = "its keys are not understood (ValueError: a file calls it something)"
    assert tuner.lacking() == dict.fromkeys(
        (LOAD, OBSERVE, SETTLE), f"FlashInfer {tuner.version}: {why}"
    )
    assert tuner.obstacle().endswith(why)


def test_memory_of_another_kind_costs_settling_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_api: object) -> bool:
        raise ValueError("neither")

    monkeypatch.setattr(tuner_module, "_values_hold_index", fail)
    tuner = Tuner()
    assert set(tuner.lacking()) == {SETTLE}
    assert tuner.obstacle() == ""


def test_flashinfers_own_managed_store_is_an_obstacle() -> None:
    tuner = Tuner()
    tuner._tuner._managed_cache = object()
    assert "managed store" in tuner.obstacle()


def test_ops_are_left_out_also_where_flashinfer_has_no_skip_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuner, real = Tuner(), autotune
    monkeypatch.setattr(tuner._api, "autotune", lambda tune_mode=True: real(tune_mode))
    assert SKIP_OPS not in tuner.lacking()
    toy = Toy()
    with tuner.run(tune=True, skip_ops={"moe"}) as seen, autotune(True):
        toy.run()
    assert tuner.counts(seen).tuned == 3
    assert toy.chosen["moe"] == ("Alpha", -1)
    assert "choose_one" not in vars(tuner._tuner)


def test_without_a_way_to_leave_ops_out_it_is_said_and_they_are_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuner, real = Tuner(), autotune
    monkeypatch.setattr(tuner._api, "autotune", lambda tune_mode=True: real(tune_mode))
    tuner._tuner = Hidden(tuner._tuner, "choose_one")
    assert SKIP_OPS in tuner.lacking()


@pytest.mark.parametrize("k", [1, 2])
def test_a_pass_that_must_not_tune_does_not_inside_the_workloads_own_autotune(k: int) -> None:
    real, tuner = fresh_tuner(), Tuner()
    inputs = [torch.zeros(4, 4)]
    with tuner.run(tune=False) as seen, autotune(True):
        Toy().run()
        ranked = real.rank_tactics("ranked", [Alpha()], TuningConfig(), inputs, k=k)
        assert real.is_tuning_mode
    assert ranked == [-1]
    assert real.profiling_cache == {}
    assert tuner.counts(seen).missing >= 6
    assert not {"choose_one", "rank_tactics", "search_cache"} & vars(real).keys()
    with autotune(True):
        Toy().run()
    assert len(real.profiling_cache) == 6


def test_a_wrapper_of_someone_else_stays() -> None:
    tuner, calls = Tuner(), []
    real = tuner._tuner
    inner = real.search_cache

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return inner(*args, **kwargs)

    real.search_cache = theirs
    run(tuner, Toy())
    assert calls
    assert real.search_cache is theirs


def test_calls_that_a_file_cannot_tell_apart_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner()
    tuner._form = WithoutExtras()
    toy = Toy(ops=("gemm/8x4", "gemm/128x4"))
    with own_tuners(monkeypatch, lambda _r, _n, tactic: tactic):
        seen = run(tuner, toy)
        with pytest.raises(TunerError, match="calls of gemm differ in extras"):
            tuner.export(seen)
        before = dict(tuner._tuner.profiling_cache)
        tuner.settle(seen)
        assert tuner._tuner.profiling_cache == before


class WithoutExtras(KeyFormat):
    """File keys as before 0.6.13."""

    def file_key(self, key: Any) -> str:
        return str((key.custom_op, key.runner_class_name, key.nearest_profile))


def test_a_release_without_group_timing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner()
    monkeypatch.delattr(tuner._api, "set_autotune_process_group")
    assert set(tuner.lacking()) == {PROCESS_GROUP}
    run(tuner, Toy())


def test_flashinfer_that_cannot_be_imported_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.autotuner", None)
    with pytest.raises(TunerError, match="FlashInfer cannot be imported") as caught:
        Tuner()
    assert "flashinfer-python" in caught.value.hint
