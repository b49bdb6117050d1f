"""The decision: what we make of the flag, here, and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from fi_flags.facts import Facts
from fi_flags.gates import NOT_PROBED, Effect, Gate, State
from fi_flags.layers import DEFAULT
from fi_flags.rollout import roll_out
from fi_flags.settings import JSON, TODO_LINKS, FlashInferSettings, Mode
from fi_flags.values import Word

MIN_CAPABILITY: Final = (9, 0)


class Strategy(Word):
    """How a group warms up."""

    PER_RANK = "per_rank"
    LEADER_WORKER = "leader_worker"


class Reason(Word):
    """Why a decision is what it is."""

    DEFAULT_OFF = "DEFAULT_OFF"
    OPERATOR_OFF = "OPERATOR_OFF"
    OPERATOR_ON = "OPERATOR_ON"
    OPERATOR_FORCED = "OPERATOR_FORCED"
    AUTO_ELIGIBLE = "AUTO_ELIGIBLE"
    SHADOW = "SHADOW"
    GATE_CLOSED = "GATE_CLOSED"
    ROLLOUT_EXCLUDED = "ROLLOUT_EXCLUDED"
    FLASHINFER_MISSING = "FLASHINFER_MISSING"
    DEVICE_UNSUPPORTED = "DEVICE_UNSUPPORTED"
    INVALID_SETTING = "INVALID_SETTING"
    HOST_UNKNOWN = "HOST_UNKNOWN"
    RANKS_DISAGREE = "RANKS_DISAGREE"
    CACHE_UNUSABLE = "CACHE_UNUSABLE"


_ENABLING: Final = frozenset({Reason.OPERATOR_ON, Reason.OPERATOR_FORCED, Reason.AUTO_ELIGIBLE})
_REFUSALS: Final = frozenset(
    {Reason.GATE_CLOSED, Reason.FLASHINFER_MISSING, Reason.DEVICE_UNSUPPORTED}
)
_FAULTS: Final = frozenset({Reason.HOST_UNKNOWN, Reason.RANKS_DISAGREE, Reason.CACHE_UNUSABLE})


@dataclass(frozen=True)
class GateRecord:
    """A gate that was consulted, and how it stood."""

    id: str
    state: State
    url: str


@dataclass(frozen=True)
class Decision:
    """Whether FlashInfer's results may be kept on disk, and why.

    Attributes:
        enabled: Whether the stored table is used to serve.
        mode: What the operator asked.
        strategy: How the group warms up.
        reason: Why.
        message: The same for a person, in a line.
        todo: Links to what has to happen upstream before this changes.
        gates: The gates consulted.
        skip_ops: Ops that gates forbid to tune or load; none where the cache is not used.
        sync_forbidden: The gate that forbids averaging timings over the group, or an empty text;
            the same.
        source: Where the deciding value came from: `default`, `env`, `dotenv`,
            `toml:<path>` or `init`.
    """

    enabled: bool
    mode: Mode
    strategy: Strategy
    reason: Reason
    message: str
    todo: tuple[str, ...] = ()
    gates: tuple[GateRecord, ...] = ()
    skip_ops: tuple[str, ...] = ()
    sync_forbidden: str = ""
    source: str = DEFAULT

    @property
    def level(self) -> Literal["info", "warning", "error"]:
        """How loudly to log it: an operator who asked and is refused, or forces, is warned."""
        if self.reason is Reason.INVALID_SETTING:
            return "error"
        refused = self.reason in _REFUSALS and self.mode is not Mode.AUTO
        forced = self.reason is Reason.OPERATOR_FORCED and bool(self.todo)
        return "warning" if refused or forced or self.reason in _FAULTS else "info"

    def overruled(self, reason: Reason, message: str) -> Decision:
        """This decision after something later has sent the group back to per-rank."""
        return replace(
            self,
            enabled=False,
            strategy=Strategy.PER_RANK,
            reason=reason,
            message=message,
            skip_ops=(),
            sync_forbidden="",
        )

    def to_json(self) -> dict[str, JSON]:
        """The decision as the command line prints it."""
        return {
            "enabled": self.enabled,
            "mode": self.mode.value,
            "strategy": self.strategy.value,
            "reason": self.reason.value,
            "message": self.message,
            "todo": list(self.todo),
            "source": self.source,
            "gates": [{"id": gate.id, "state": gate.state, "url": gate.url} for gate in self.gates],
            "skip_ops": list(self.skip_ops),
            "sync_forbidden": self.sync_forbidden,
        }


def decide(
    settings: FlashInferSettings,
    facts: Facts,
    gates: Sequence[Gate],
    *,
    needs_cuda: bool = False,
    probed: Mapping[str, bool] = NOT_PROBED,
) -> Decision:
    """Decide by the mode table, for any settings on any machine.

    Args:
        settings: What was asked.
        facts: What is there.
        gates: The upstream defects to consult.
        needs_cuda: Whether the workload runs on a GPU.
        probed: For each probe that ran, whether it found the defect.
    """
    states = [gate.standing(facts, probed).state for gate in gates]
    closed = [gate for gate, state in zip(gates, states, strict=True) if state == "closed"]
    shut = [gate for gate in closed if gate.effect is Effect.CLOSE_CACHE]
    reason, message = _without_gates(settings, facts, needs_cuda=needs_cuda) or _with_gates(
        settings, facts, shut
    )
    enabled = reason in _ENABLING
    # Under auto rank 0 answers for all, so a rank that is left out here may yet be taken along.
    may = enabled or reason is Reason.ROLLOUT_EXCLUDED
    skipping = [gate for gate in closed if may and gate.effect is Effect.SKIP_OPS]
    unsynced = [gate.id for gate in closed if may and gate.effect is Effect.NO_SYNC]
    skipped = "".join(f"; {gate.id} leaves out {', '.join(gate.ops)}" for gate in skipping)
    return Decision(
        enabled=enabled,
        mode=settings.persistent_cache,
        strategy=Strategy.LEADER_WORKER if enabled else Strategy.PER_RANK,
        reason=reason,
        message=message + skipped,
        todo=_links(reason, shut),
        gates=tuple(
            GateRecord(gate.id, state, gate.url) for gate, state in zip(gates, states, strict=True)
        ),
        skip_ops=tuple(sorted({op for gate in skipping for op in gate.ops})),
        sync_forbidden=unsynced[0] if unsynced else "",
        source=_source(settings),
    )


def _links(reason: Reason, shut: Sequence[Gate]) -> tuple[str, ...]:
    if reason is Reason.DEFAULT_OFF:
        return TODO_LINKS
    if reason in {Reason.GATE_CLOSED, Reason.OPERATOR_FORCED}:
        return tuple(gate.url for gate in shut)
    return ()


def _source(settings: FlashInferSettings) -> str:
    if settings.invalid is not None:
        return str(settings.invalid.fields["source"])
    return settings.provenance["persistent_cache"].source


def _without_gates(
    settings: FlashInferSettings, facts: Facts, *, needs_cuda: bool
) -> tuple[Reason, str] | None:
    """The reason and its sentence where the answer is no whatever the gates say."""
    if settings.invalid is not None:
        return Reason.INVALID_SETTING, f"off, because a setting is not accepted: {settings.invalid}"
    if settings.persistent_cache is Mode.OFF:
        if settings.provenance["persistent_cache"].source == DEFAULT:
            return Reason.DEFAULT_OFF, "nobody set the flag, and its default is off"
        return Reason.OPERATOR_OFF, "the flag is set to off"
    if facts.flashinfer is None:
        return Reason.FLASHINFER_MISSING, "FlashInfer is not installed, so there is nothing to keep"
    if needs_cuda and (facts.capability is None or facts.capability < MIN_CAPABILITY):
        found = f"{facts.gpu} ({facts.arch})" if facts.gpu else "no GPU"
        needed = "the workload needs a GPU of capability 9.0 or more"
        return Reason.DEVICE_UNSUPPORTED, f"{needed}; found {found}"
    return None


def _with_gates(
    settings: FlashInferSettings, facts: Facts, shut: Sequence[Gate]
) -> tuple[Reason, str]:
    """The reason and its sentence where the flag asks for the cache and nothing is missing."""
    mode = settings.persistent_cache
    found = f"FlashInfer {facts.flashinfer}"
    defect = "; ".join(f"{gate.title} ({gate.id})" for gate in shut)
    if mode is Mode.SHADOW:
        return (
            Reason.SHADOW,
            "served as off; what is tuned is compared with the stored table, and refreshes it",
        )
    if mode is Mode.FORCE:
        despite = f", although {found} has a known defect: {defect}" if shut else ""
        return Reason.OPERATOR_FORCED, f"the cache is on because it is forced{despite}"
    if shut:
        return Reason.GATE_CLOSED, f"{found} has a known defect: {defect}"
    if mode is Mode.ON:
        return Reason.OPERATOR_ON, f"the cache is on, and {found} has no known defect against it"
    rollout = roll_out(settings, facts)
    if rollout.included:
        return Reason.AUTO_ELIGIBLE, f"the roll-out includes this deployment: {rollout.why}"
    return Reason.ROLLOUT_EXCLUDED, f"the roll-out leaves this deployment out: {rollout.why}"
