from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_flags.decision import Decision, Reason, Strategy, decide
from fi_flags.facts import Facts
from fi_flags.gates import load_gates
from fi_flags.settings import FlashInferSettings, Mode, settings_or_off

GATES = load_gates()
GOOD = Facts(flashinfer="0.7.4", torch="2.11", python="3.11", host="here")
OLD = replace(GOOD, flashinfer="0.6.12")
BARE = replace(GOOD, flashinfer=None)
ISSUE = "https://github.com/flashinfer-ai/flashinfer/issues/3363"


def settings(mode: Mode | None = None, **more: Any) -> FlashInferSettings:
    return FlashInferSettings.load(environ={}, dotenv=None, persistent_cache=mode, **more)


@pytest.mark.parametrize(
    ("mode", "facts", "reason", "level"),
    [
        (None, GOOD, Reason.DEFAULT_OFF, "info"),
        (None, OLD, Reason.DEFAULT_OFF, "info"),
        (None, BARE, Reason.DEFAULT_OFF, "info"),
        (Mode.OFF, GOOD, Reason.OPERATOR_OFF, "info"),
        (Mode.OFF, BARE, Reason.OPERATOR_OFF, "info"),
        (Mode.ON, GOOD, Reason.OPERATOR_ON, "info"),
        (Mode.ON, OLD, Reason.GATE_CLOSED, "warning"),
        (Mode.ON, BARE, Reason.FLASHINFER_MISSING, "warning"),
        (Mode.AUTO, GOOD, Reason.AUTO_ELIGIBLE, "info"),
        (Mode.AUTO, OLD, Reason.GATE_CLOSED, "info"),
        (Mode.AUTO, BARE, Reason.FLASHINFER_MISSING, "info"),
        (Mode.SHADOW, GOOD, Reason.SHADOW, "info"),
        (Mode.SHADOW, OLD, Reason.SHADOW, "info"),
        (Mode.SHADOW, BARE, Reason.FLASHINFER_MISSING, "warning"),
        (Mode.FORCE, GOOD, Reason.OPERATOR_FORCED, "info"),
        (Mode.FORCE, OLD, Reason.OPERATOR_FORCED, "warning"),
        (Mode.FORCE, BARE, Reason.FLASHINFER_MISSING, "warning"),
    ],
)
def test_mode_table(mode: Mode | None, facts: Facts, reason: Reason, level: str) -> None:
    decision = decide(settings(mode), facts, GATES)
    assert decision.reason is reason
    assert decision.level == level
    assert decision.mode is (mode or Mode.OFF)
    assert decision.source == ("init" if mode else "default")
    enabled = reason in {Reason.OPERATOR_ON, Reason.AUTO_ELIGIBLE, Reason.OPERATOR_FORCED}
    assert decision.enabled is enabled
    assert decision.strategy is (Strategy.LEADER_WORKER if enabled else Strategy.PER_RANK)
    assert [(gate.id, gate.state) for gate in decision.gates] == [
        ("file-key-extras", "open" if facts is GOOD else "closed")
    ]


def test_default_off_links_what_is_to_do() -> None:
    todo = decide(settings(), GOOD, GATES).todo
    assert ISSUE in todo
    assert "https://github.com/vllm-project/vllm/pull/43119" in todo


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO, Mode.FORCE])
def test_closed_gate_is_named_and_linked(mode: Mode) -> None:
    decision = decide(settings(mode), OLD, GATES)
    assert decision.todo == (ISSUE,)
    assert "FlashInfer 0.6.12" in decision.message
    assert "file-key-extras" in decision.message


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.ON, Mode.AUTO, Mode.FORCE, Mode.SHADOW])
def test_good_machine_has_nothing_to_do(mode: Mode) -> None:
    assert decide(settings(mode), GOOD, GATES).todo == ()


@pytest.mark.parametrize(
    ("capability", "needs_cuda", "supported"),
    [
        (None, False, True),
        (None, True, False),
        ((8, 9), True, False),
        ((8, 9), False, True),
        ((9, 0), True, True),
        ((10, 0), True, True),
    ],
)
@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO, Mode.SHADOW, Mode.FORCE])
def test_cuda_workload_needs_a_recent_gpu(
    mode: Mode,
    capability: tuple[int, int] | None,
    needs_cuda: bool,
    supported: bool,
) -> None:
    facts = replace(GOOD, gpu="a GPU" if capability else None, capability=capability)
    decision = decide(settings(mode), facts, GATES, needs_cuda=needs_cuda)
    assert (decision.reason is not Reason.DEVICE_UNSUPPORTED) is supported
    if not supported:
        assert ("a GPU (sm89)" if capability else "no GPU") in decision.message
        assert not decision.enabled


@pytest.mark.parametrize(
    "more", [{"rollout_percent": 0}, {"rollout_hosts": "other"}, {"rollout_archs": "sm90"}]
)
def test_rollout_binds_auto_alone(more: dict[str, Any]) -> None:
    assert decide(settings(Mode.AUTO, **more), GOOD, GATES).reason is Reason.ROLLOUT_EXCLUDED
    assert decide(settings(Mode.ON, **more), GOOD, GATES).enabled
    assert decide(settings(Mode.AUTO, **more), OLD, GATES).reason is Reason.GATE_CLOSED


def test_invalid_setting_is_off_with_its_source_as_an_error() -> None:
    environ = {"VLLM_FLASHINFER_PERSISTENT_CACHE": "maybe"}
    decision = decide(settings_or_off(environ=environ, dotenv=None), GOOD, GATES)
    assert decision.reason is Reason.INVALID_SETTING
    assert decision.level == "error"
    assert decision.source == "env"
    assert not decision.enabled
    assert "VLLM_FLASHINFER_PERSISTENT_CACHE = 'maybe'" in decision.message
    assert "shadow or force" in decision.message


@pytest.mark.parametrize(
    "reason", [Reason.RANKS_DISAGREE, Reason.CACHE_UNUSABLE, Reason.HOST_UNKNOWN]
)
@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO])
def test_overruled_decision_is_per_rank_and_warns(mode: Mode, reason: Reason) -> None:
    before = decide(settings(mode), GOOD, GATES)
    after = before.overruled(reason, "because")
    assert (after.enabled, after.strategy) == (False, Strategy.PER_RANK)
    assert (after.reason, after.message, after.level) == (reason, "because", "warning")
    assert (after.mode, after.gates, after.source) == (before.mode, before.gates, before.source)


def test_decision_is_frozen_and_its_json_is_plain() -> None:
    decision = decide(settings(Mode.ON), OLD, GATES)
    with pytest.raises(FrozenInstanceError):
        decision.enabled = True  # type: ignore[misc]
    assert json.loads(json.dumps(decision.to_json())) == {
        "enabled": False,
        "mode": "on",
        "strategy": "per_rank",
        "reason": "GATE_CLOSED",
        "message": decision.message,
        "todo": [ISSUE],
        "source": "init",
        "gates": [{"id": "file-key-extras", "state": "closed", "url": ISSUE}],
    }


some_facts = st.builds(
    Facts,
    flashinfer=st.none() | st.sampled_from(["0.6.12", "0.7.4", "unknown"]) | st.text(max_size=8),
    torch=st.none(),
    python=st.just("3.11"),
    host=st.text(max_size=8),
    gpu=st.none() | st.text(max_size=8),
    capability=st.none() | st.tuples(st.integers(0, 12), st.integers(0, 9)),
)


@given(
    st.none() | st.sampled_from(Mode),
    st.floats(0, 100),
    st.lists(st.sampled_from(["*", "a*", "[", "sm90"])),
    some_facts,
    st.booleans(),
)
def test_decide_is_total(
    mode: Mode | None,
    percent: float,
    patterns: list[str],
    facts: Facts,
    needs_cuda: bool,
) -> None:
    asked = settings(mode, rollout_percent=percent, rollout_hosts=patterns, rollout_archs=patterns)
    decision = decide(asked, facts, GATES, needs_cuda=needs_cuda)
    assert isinstance(decision, Decision)
    assert decision == decide(asked, facts, GATES, needs_cuda=needs_cuda)
    assert decision.enabled is (decision.strategy is Strategy.LEADER_WORKER)
    assert decision.message
    if decision.enabled:
        assert facts.flashinfer is not None
        assert mode is Mode.FORCE or all(gate.state == "open" for gate in decision.gates)
