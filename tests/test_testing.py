"""What users' tests import: it sets the flag for a block, and leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fi_flags.errors import RanksError, SettingsError, WorkloadError
from fi_flags.layers import OVERRIDE
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome, Report
from fi_flags.settings import FlashInferSettings, Mode, settings_or_off
from fi_flags.testing import override, run_ranks
from fi_flags.tuner import wall_clock
from fi_flags.warmup import flashinfer_autotune, warm_up
from fi_flags.watch import Deadlines
from fi_flags.workloads.cpu import CpuDecoder
from tests.toy import Toy

FLAG = "VLLM_FLASHINFER_PERSISTENT_CACHE"
MODES = ["off", "on", "auto", "shadow", "force"]


def mode() -> Mode:
    return FlashInferSettings().persistent_cache


# -- override -------------------------------------------------------------------------------


@pytest.mark.parametrize("word", MODES)
def test_override_wins_over_every_source_and_says_so(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLAG, "on")
    before = dict(os.environ)
    with override(persistent_cache=word, autotune_join_s=7):
        assert dict(os.environ) == before
        for settings in (
            FlashInferSettings(persistent_cache="auto"),
            FlashInferSettings.load(persistent_cache="auto"),
            settings_or_off(persistent_cache="auto"),
        ):
            assert settings.persistent_cache is Mode(word)
            assert settings.autotune_join_s == 7
            origin = settings.provenance["persistent_cache"]
            assert origin.source == "override"
            assert [lost.source for lost in origin.overridden] == ["init", "env"]
    assert mode() is Mode.ON


def test_inner_override_wins_and_none_lets_the_other_sources_speak() -> None:
    with override(persistent_cache="on", autotune_split="leader"):
        with override(persistent_cache="off"):
            assert mode() is Mode.OFF
            assert FlashInferSettings().autotune_split == "leader"
            with override(persistent_cache=None):
                settings = FlashInferSettings(persistent_cache="auto")
                assert settings.provenance["persistent_cache"].source == "init"
        assert mode() is Mode.ON
    assert not OVERRIDE.get()


def test_override_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), override(persistent_cache="on"):
        raise KeyError
    assert mode() is Mode.OFF


def test_override_decorates_a_function_any_number_of_times() -> None:
    decorated = override(persistent_cache="on")(mode)
    assert [decorated(), decorated(), mode()] == [Mode.ON, Mode.ON, Mode.OFF]


@pytest.mark.parametrize(
    "bad", [{"persistent_cache": "maybe"}, {"persistent_cach": "on"}, {"autotune_join_s": 0}]
)
def test_bad_override_is_refused_at_once_and_leaves_nothing(bad: dict[str, object]) -> None:
    entered = override(**bad)
    with pytest.raises(SettingsError) as caught, entered:
        pytest.fail("the block was entered")
    assert caught.value.fields["source"] == "override"
    assert not OVERRIDE.get()


def test_a_server_that_falls_back_to_off_is_off_whatever_is_overridden() -> None:
    with override(persistent_cache="on"):
        settings = settings_or_off(environ={"VLLM_FLASHINFER_AUTOTUNE_JOIN_S": "soon"})
    assert settings.persistent_cache is Mode.OFF
    assert settings.invalid is not None


def test_override_does_not_reach_other_threads() -> None:
    seen: list[Mode] = []
    with override(persistent_cache="on"):
        thread = threading.Thread(target=lambda: seen.append(mode()))
        thread.start()
        thread.join()
    assert seen == [Mode.OFF]


# -- ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_in_the_order_of_ranks(world: int) -> None:
    def work(ranks: Ranks) -> int:
        time.sleep((world - ranks.rank) * 0.01)
        with ranks.meet(Deadlines(join=20)) as meeting:
            assert meeting.vote(ranks.rank) == list(range(world))
        return ranks.rank

    assert run_ranks(world, work, name="mine") == list(range(world))


def test_ranks_see_the_override_and_their_own_does_not_leak() -> None:
    def work(ranks: Ranks) -> tuple[Mode, Mode]:
        outer = mode()
        with override(persistent_cache="auto" if ranks.rank else "force"):
            time.sleep(0.01)
            return outer, mode()

    with override(persistent_cache="on"):
        assert run_ranks(2, work) == [(Mode.ON, Mode.FORCE), (Mode.ON, Mode.AUTO)]
        assert mode() is Mode.ON


@pytest.mark.parametrize("asked", [{}, {"autotune_abort_peers": True}])
def test_no_rank_ends_the_process_of_the_test_unless_asked(asked: dict[str, object]) -> None:
    with override(**asked):
        (settings,) = run_ranks(1, lambda _: FlashInferSettings(autotune_abort_peers=True))
    assert settings.autotune_abort_peers is bool(asked)


def test_first_error_is_raised_with_its_rank() -> None:
    failed = threading.Event()

    def work(ranks: Ranks) -> None:
        if ranks.rank == 2:
            try:
                raise ValueError("the cause")
            finally:
                failed.set()
        assert failed.wait(20)
        time.sleep(0.05)
        raise LookupError("a consequence")

    with pytest.raises(RanksError, match="rank 2 raised ValueError: the cause") as caught:
        run_ranks(4, work)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.fields["ranks"] == [2]


def test_ranks_that_do_not_end_are_named() -> None:
    release = threading.Event()

    def work(ranks: Ranks) -> None:
        if ranks.rank != 1:
            release.wait(20)

    with pytest.raises(TimeoutError, match=r"not ended within 0\.2 s: ranks 0, 2"):
        run_ranks(3, work, timeout=0.2)
    release.set()


def test_an_error_is_told_before_the_ranks_that_it_left_waiting() -> None:
    release = threading.Event()

    def work(ranks: Ranks) -> None:
        if ranks.rank == 1:
            pytest.fail("as a test of a user would")
        release.wait(20)

    with pytest.raises(RanksError, match=r"rank 1 raised Failed.*not ended .*: ranks 0"):
        run_ranks(2, work, timeout=0.2)
    release.set()


# -- warm-ups -------------------------------------------------------------------------------


def start(ranks: Ranks) -> Report:
    return warm_up(Toy(), ranks=ranks)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("word", ["off", "on"])
def test_a_start_of_ranks_follows_the_override(word: str, world: int, tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    with override(persistent_cache=word, autotune_cache_dir=tables), wall_clock(1):
        outcomes = [{report.outcome for report in run_ranks(world, start)} for _ in range(2)]
    expected = [Outcome.COLD, Outcome.WARM] if word == "on" else [Outcome.UNCACHED] * 2
    assert outcomes == [{outcome} for outcome in expected]
    assert tables.exists() is (word == "on")


def test_vllms_function_follows_the_override(tmp_path: Path) -> None:
    decoder = CpuDecoder.tiny()
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2),
        _dummy_run=lambda *, num_tokens, skip_eplb, is_profile: decoder.forward(num_tokens),  # noqa: ARG005
    )
    with override(persistent_cache="on", autotune_cache_dir=tmp_path), wall_clock(1):
        run_ranks(1, lambda _: flashinfer_autotune(runner))
    assert list(tmp_path.rglob("*.json"))


def test_a_failing_workload_is_told_with_its_rank(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Report:
        def fail(_op: str) -> None:
            if ranks.rank == 1:
                raise ArithmeticError("broken")

        return warm_up(Toy(between=fail), ranks=ranks)

    given = {"persistent_cache": "on", "autotune_cache_dir": tmp_path}
    with override(**given), wall_clock(1), pytest.raises(RanksError, match="rank 1") as caught:
        run_ranks(2, work)
    assert isinstance(caught.value.__cause__, WorkloadError)


def test_the_process_keeps_its_one_tuner() -> None:
    from flashinfer.autotuner import AutoTuner  # noqa: PLC0415 - brings FlashInfer along

    mine = AutoTuner.get()
    first, second = run_ranks(2, lambda _: AutoTuner.get())
    assert len({id(mine), id(first), id(second)}) == 3
    assert AutoTuner.get() is mine
