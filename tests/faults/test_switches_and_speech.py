"""F27 to F32: what can be switched, how it is asked for, and what a person reads meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest
from flashinfer.autotuner import autotuner

from fi_flags import logs
from fi_flags.errors import SettingsError
from fi_flags.report import Outcome
from fi_flags.settings import FlashInferSettings, settings_or_off
from fi_flags.testing import in_memory
from fi_flags.tuner import _WarningsOnce
from fi_flags.values import Mode
from fi_flags.warmup import warm_up
from tests.faults.scene import PROFILES, Scene
from tests.toy import Toy

FLAG = "VLLM_FLASHINFER_PERSISTENT_CACHE"


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(("flag", "kept"), [("on", True), ("off", False)])
def test_f27_synchronised_timing_and_persistence_are_switched_apart(
    sync: bool, flag: str, kept: bool, scene: Scene
) -> None:
    found = scene.start(persistent_cache=flag, autotune_distributed_sync=sync)
    assert all(rank.tuned == PROFILES for rank in found.ranks)
    assert bool(scene.paths()) == kept
    # No rank has a process group here: asked in vain, and said so.
    said = "timings are not averaged" in found.the(logs.PLAN)["why"]
    assert said == (sync and kept)


def test_f27_tuning_is_switched_off_alone_by_read_only(scene: Scene) -> None:
    scene.start()
    found = scene.start(lambda _rank: Toy(ops=("gemm", "new")), autotune_cache_access="ro")
    assert [(rank.loaded > 0, rank.tuned) for rank in found.ranks] == [(True, 0), (True, 0)]


@pytest.mark.parametrize(
    ("word", "mode"),
    [("on", Mode.ON), ("ON", Mode.ON), (" 0 ", Mode.OFF), ("", Mode.OFF), ("True", Mode.ON)],
)
def test_f28_a_word_is_taken_whatever_its_case_and_blanks(word: str, mode: Mode) -> None:
    assert FlashInferSettings.load(environ={FLAG: word}, dotenv=None).persistent_cache is mode


@pytest.mark.parametrize("word", ["2", "maybe", "enable", "none"])
def test_f28_another_word_is_refused_and_a_server_starts_with_the_flag_off(
    word: str, caplog: pytest.LogCaptureFixture, scene: Scene
) -> None:
    with pytest.raises(SettingsError) as refused:
        FlashInferSettings.load(environ={FLAG: word}, dotenv=None)
    for part in (FLAG, word, "off (0, false, no), on (1, true, yes), auto, shadow or force"):
        assert part in str(refused.value)
    caplog.clear()
    (rank,) = in_memory(1)
    report = warm_up(Toy(), ranks=rank, settings=settings_or_off(environ={FLAG: word}, dotenv=None))
    assert report.outcome is Outcome.UNCACHED
    (error,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    for part in (FLAG, word, "auto, shadow or force"):
        assert part in error.getMessage()
    assert scene.place.exists()


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_FLASHINFER_PERSISTANT_CACHE",
        "VLLM_FLASHINFER_PERSISTENT_CACHES",
        "VLLM_FLASH_INFER_PERSISTENT_CACHE",
    ],
)
def test_f29_a_misspelt_name_is_reported_with_the_name_it_resembles(
    name: str, caplog: pytest.LogCaptureFixture, scene: Scene
) -> None:
    settings = FlashInferSettings.load(environ={name: "on"}, dotenv=None)
    assert settings.persistent_cache is Mode.OFF
    caplog.clear()
    (rank,) = in_memory(1)
    warm_up(Toy(), ranks=rank, settings=settings)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert logs.SETTING_WARNING in warnings[0]
    assert name in warnings[0]
    assert FLAG in warnings[0]
    assert scene.place.exists()


def test_f30_who_tunes_for_long_says_how_far_it_is(scene: Scene) -> None:
    scene.world = 1
    found = scene.start(
        lambda _rank: Toy(between=lambda _op: time.sleep(1.2)), autotune_heartbeat_s=0.3
    )
    beats = found.said(logs.TUNING)
    assert beats
    assert {one["level"] for one in beats} == {"INFO"}
    last = beats[-1]
    assert (last["phase"], last["op"], last["done"], last["total"]) == ("run", "gemm", 3, 3)
    assert last["seconds"] > 1


@pytest.fixture
def theirs() -> Iterator[list[str]]:
    """What FlashInfer's tuner itself logs, at INFO and above."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    listener, level = Listener(), autotuner.logger.level
    autotuner.logger.addHandler(listener)
    autotuner.logger.setLevel(logging.INFO)
    yield found
    autotuner.logger.removeHandler(listener)
    autotuner.logger.setLevel(level)


def test_f31_failed_tactics_do_not_flood_the_log(scene: Scene, theirs: list[str]) -> None:
    scene.world = 4

    def toy(_rank: int) -> Toy:
        return Toy(ops=("gemm/broken", "moe/broken", "head/oom"), tokens=64)

    found = scene.start(toy)
    assert found.outcome is Outcome.COLD
    assert any("OOM" in text for text in theirs)
    assert len(theirs) <= scene.world * 2, theirs
    ours = [one["event"] for one in found.log if one["level"] == "INFO"]
    assert ours == [logs.DECISION, logs.PLAN, logs.OUTCOME]


def test_f31_only_the_leader_says_what_happened(scene: Scene) -> None:
    scene.world = 4
    for _ in range(2):
        found = scene.start()
        assert [(one["event"], one["rank"]) for one in found.log] == [
            (logs.DECISION, 0), (logs.PLAN, 0), (logs.OUTCOME, 0),
        ]  # fmt: skip


def test_f32_a_warm_start_runs_the_workload_once(scene: Scene) -> None:
    runs: list[int] = []

    def toy(rank: int) -> Toy:
        return Toy(after=lambda: runs.append(rank))

    for outcome in (Outcome.COLD, Outcome.WARM):
        runs.clear()
        found = scene.start(toy)
        assert found.outcome is outcome
        assert sorted(runs) == [0, 1]


def test_f31_a_malformed_message_stops_no_start_and_a_warning_is_not_lost(
    scene: Scene, theirs: list[str]
) -> None:
    def speak() -> None:
        autotuner.logger.info("it is broken")
        autotuner.logger.warning("it is broken")

    assert not scene.start(lambda _rank: Toy(after=speak)).errors
    assert "it is broken" in theirs

    malformed = logging.LogRecord("x", logging.WARNING, "", 0, "took %d ms", ("fast",), None)
    assert _WarningsOnce().filter(malformed)
