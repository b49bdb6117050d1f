from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_flags.decision import Decision, Reason, Strategy, decide
from fi_flags.facts import Facts
from fi_flags.gates import Effect, Gate, load_gates
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
    states = {gate.id: gate.state for gate in decision.gates}
    assert list(states) == [gate.id for gate in GATES]
    assert states["file-key-extras"] == ("open" if facts is GOOD else "closed")


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
        "gates": [
            {"id": gate.id, "state": "closed" if gate.closed(OLD) else "open", "url": gate.url}
            for gate in GATES
        ],
        "skip_ops": [],
        "sync_forbidden": "",
    }


BLACKWELL = replace(GOOD, flashinfer="0.6.18", gpu="a GPU", capability=(12, 0))


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO, Mode.FORCE])
def test_gates_on_ops_and_sync_hold_where_the_cache_is_on(mode: Mode) -> None:
    decision = decide(settings(mode), BLACKWELL, GATES)
    assert decision.enabled
    assert decision.skip_ops == ("fp8_gemm", "trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")
    assert decision.sync_forbidden == "unagreed-hits"
    assert "sm120-tactics leaves out fp8_gemm" in decision.message
    assert (decision.level, decision.todo) == ("info", ())
    assert decision.to_json()["skip_ops"] == list(decision.skip_ops)
    after = decision.overruled(Reason.CACHE_UNUSABLE, "because")
    assert (after.skip_ops, after.sync_forbidden) == ((), "")


@pytest.mark.parametrize("mode", [None, Mode.OFF, Mode.SHADOW])
def test_off_means_off_for_gates_too(mode: Mode | None) -> None:
    decision = decide(settings(mode), BLACKWELL, GATES)
    assert (decision.skip_ops, decision.sync_forbidden) == ((), "")


def test_forced_decision_skips_ops_though_a_gate_closes_the_cache() -> None:
    shut = replace(GATES[0], affected=">=0")
    decision = decide(settings(Mode.FORCE), BLACKWELL, [shut, *GATES[1:]])
    assert decision.level == "warning"
    assert decision.skip_ops
    assert decision.todo == (ISSUE,)


@pytest.mark.parametrize(
    ("facts", "found", "enabled"),
    [(OLD, False, True), (OLD, True, False), (GOOD, True, False), (GOOD, False, True)],
)
def test_probe_wins_over_the_table(facts: Facts, found: bool, enabled: bool) -> None:
    decision = decide(settings(Mode.ON), facts, GATES, probed={"key_extras": found})
    assert decision.enabled is enabled
    assert decision.gates[0].state == ("closed" if found else "open")


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO])
def test_lifted_gate_does_not_close_the_cache_and_is_shown(mode: Mode) -> None:
    lifted = [replace(GATES[0], lifted_by="/etc/gates.toml"), *GATES[1:]]
    decision = decide(settings(mode), OLD, lifted)
    assert decision.enabled
    assert decision.gates[0].state == "lifted"


some_facts = st.builds(
    Facts,
    flashinfer=st.none() | st.sampled_from(["0.6.12", "0.7.4", "unknown"]) | st.text(max_size=8),
    torch=st.none(),
    python=st.just("3.11"),
    host=st.text(max_size=8),
    gpu=st.none() | st.text(max_size=8),
    capability=st.none() | st.tuples(st.integers(0, 12), st.integers(0, 9)),
)


some_gates = st.lists(
    st.builds(
        Gate,
        id=st.text(max_size=4),
        title=st.text(max_size=4),
        url=st.text(max_size=4),
        affected=st.sampled_from(["<0.6.13", ">=0.6.17,<0.6.19", ">=0", "!=0.7.4"]),
        effect=st.sampled_from(Effect),
        archs=st.sampled_from([(), ("sm90",), ("*",), ("sm1*", "[")]),
        ops=st.sampled_from([(), ("moe",), ("moe", "gemm")]),
        probe=st.sampled_from(["", "key_extras"]),
        lifted_by=st.sampled_from(["", "", "/etc/gates.toml"]),
    ),
    max_size=4,
)
some_findings = st.dictionaries(st.just("key_extras"), st.booleans())


@given(
    st.none() | st.sampled_from(Mode),
    st.floats(0, 100),
    st.lists(st.sampled_from(["*", "a*", "[", "sm90"])),
    some_facts,
    some_gates,
    some_findings,
    st.booleans(),
)
def test_decide_is_total(
    mode: Mode | None,
    percent: float,
    patterns: list[str],
    facts: Facts,
    gates: list[Gate],
    probed: dict[str, bool],
    needs_cuda: bool,
) -> None:
    asked = settings(mode, rollout_percent=percent, rollout_hosts=patterns, rollout_archs=patterns)
    gates = [*GATES, *gates]
    decision = decide(asked, facts, gates, needs_cuda=needs_cuda, probed=probed)
    assert isinstance(decision, Decision)
    assert decision == decide(asked, facts, gates, needs_cuda=needs_cuda, probed=probed)
    assert decision.enabled is (decision.strategy is Strategy.LEADER_WORKER)
    assert decision.message
    assert json.dumps(decision.to_json())
    if not decision.enabled:
        assert (decision.skip_ops, decision.sync_forbidden) == ((), "")
        return
    assert facts.flashinfer is not None
    for gate, record in zip(gates, decision.gates, strict=True):
        if record.state != "closed":
            continue
        assert mode is Mode.FORCE or gate.effect is not Effect.CLOSE_CACHE
        assert gate.effect is not Effect.SKIP_OPS or set(gate.ops) <= set(decision.skip_ops)
        assert gate.effect is not Effect.NO_SYNC or decision.sync_forbidden


@given(
    st.none() | st.sampled_from(Mode), some_facts, some_gates, some_gates, some_findings, st.data()
)
def test_adding_gates_never_turns_the_cache_on_and_never_tunes_more(
    mode: Mode | None,
    facts: Facts,
    gates: list[Gate],
    more: list[Gate],
    probed: dict[str, bool],
    data: st.DataObject,
) -> None:
    asked = settings(mode)
    mixed = data.draw(st.permutations([*gates, *more]))
    before = decide(asked, facts, gates, probed=probed)
    after = decide(asked, facts, mixed, probed=probed)
    assert before.enabled or not after.enabled
    if after.enabled:
        assert set(before.skip_ops) <= set(after.skip_ops)
        assert bool(after.sync_forbidden) or not before.sync_forbidden
