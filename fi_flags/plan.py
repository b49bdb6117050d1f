"""What a group does: a pure function of what its ranks say.

Each rank votes a ``Ballot``; ``make_plan`` turns all ballots into one ``Plan``, the same on every
rank. Later votes carry a ``Tally``; what follows from those is decided here as well, so that the
sequence of votes depends on what was voted and on nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from fi_flags.ballots import Ballot, Tally, cut
from fi_flags.decision import Reason, Strategy
from fi_flags.settings import Access, Mode, OnFailure, Split
from fi_flags.table import Status

__all__ = [
    "Action",
    "Next",
    "Plan",
    "after_run",
    "all_loaded",
    "make_plan",
    "publishers",
]

_INVALID = Reason.INVALID_SETTING.value


class Action(str, enum.Enum):
    """What the group does before and during the run of the workload."""

    FAIL = "fail"
    UNCACHED = "uncached"
    UNTUNED = "untuned"
    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True)
class Plan:
    """What the whole group does.

    Attributes:
        why: One line for people; where ranks differ it names ranks and values.
        leader: The rank whose table wins.
        exchange: Whether the ranks' tables must be brought together before loading.
        tuners: The ranks that tune what is missing.
        skip_ops: Ops that no rank tunes or loads.
        publish: Whether the result may be written.
        sync: Whether FlashInfer averages timings over the group's process group.
    """

    action: Action
    reason: Reason
    why: str
    leader: int = 0
    exchange: bool = False
    tuners: frozenset[int] = frozenset()
    skip_ops: frozenset[str] = frozenset()
    on_failure: OnFailure = OnFailure.RAISE
    publish: bool = False
    sync: bool = False

    def to_json(self) -> dict[str, Any]:
        """The plan for reports and logs."""
        return {
            "action": self.action.value,
            "reason": self.reason.value,
            "why": self.why,
            "leader": self.leader,
            "tuners": sorted(self.tuners),
            "sync": self.sync,
            "skip_ops": sorted(self.skip_ops),
            "on_failure": self.on_failure.value,
        }

    def without_table(self, why: str) -> Plan:
        """The plan after a table could not be loaded: all give it back and start without one."""
        action = Action.COLD if self.tuners else Action.UNTUNED
        return dataclasses.replace(
            self, action=action, reason=Reason.CACHE_UNUSABLE, why=why, exchange=False
        )


def make_plan(ballots: Sequence[Ballot]) -> Plan:
    """The group's plan: the first rule of the design that applies.

    Args:
        ballots: One per rank, in the order of ranks.
    """
    failed = [f"rank {b.rank} ({b.host}): {b.error}" for b in ballots if b.error]
    base = Plan(
        action=Action.UNCACHED,
        reason=_reason(ballots[0].reason),
        why="",
        tuners=frozenset(b.rank for b in ballots),
        # An op that one rank must skip is skipped by all; a failure that one must raise, all do.
        skip_ops=frozenset(op for b in ballots for op in b.settings.get("autotune_skip_ops", ())),
        on_failure=_strictest([b.settings.get("autotune_on_failure") for b in ballots]),
    )
    if failed:
        return dataclasses.replace(base, action=Action.FAIL, why="; ".join(failed))
    strategies = _strategies(ballots)
    disagreement = _disagreement(ballots, strategies)
    if disagreement:
        return dataclasses.replace(base, reason=Reason.RANKS_DISAGREE, why=disagreement)
    if strategies[0] == Strategy.PER_RANK.value:
        return dataclasses.replace(base, why="every rank tunes alone; nothing is kept")
    unusable = _unusable(ballots)
    if unusable:
        return dataclasses.replace(base, reason=Reason.CACHE_UNUSABLE, why=unusable)
    gated = frozenset(op for b in ballots for op in b.gate_ops)
    return _cached_plan(dataclasses.replace(base, skip_ops=base.skip_ops | gated), ballots)


def _cached_plan(base: Plan, ballots: Sequence[Ballot]) -> Plan:
    access = Access(ballots[0].settings.get("autotune_cache_access", Access.RW.value))
    split = Split(ballots[0].settings.get("autotune_split", Split.ALL.value))
    usable = [b for b in ballots if b.table == Status.OK.value]
    found = _grouped([(b.rank, b.table + (f" ({b.why})" if b.why else "")) for b in ballots])
    publish = access is not Access.RO
    if access is Access.RO and not usable:
        why = f"read-only, and no rank has a usable table: {found}"
        return dataclasses.replace(base, action=Action.UNTUNED, why=why, tuners=frozenset())
    if access is Access.WO or not usable:
        why = "write-only: tuned afresh" if access is Access.WO else f"no usable table: {found}"
        tuners = frozenset([0]) if split is Split.LEADER else base.tuners
        sync, without = _sync(ballots, split)
        return dataclasses.replace(
            base,
            action=Action.COLD,
            why=why
            + (f"; timings are not averaged, since {without}" if without else "")
            + _unwritable(ballots),
            tuners=tuners,
            publish=publish,
            sync=sync,
        )
    leader = usable[0].rank
    exchange = len(usable) < len(ballots) or len({b.digest for b in usable}) > 1
    why = f"rank {leader}'s table of {usable[0].entries} entries"
    if exchange:
        why += f", brought together with what the others have: {found}"
    tuners = frozenset([leader]) if split is Split.LEADER else base.tuners
    return dataclasses.replace(
        base,
        action=Action.WARM,
        why=why,
        leader=leader,
        exchange=exchange,
        tuners=tuners if publish else frozenset(),
        publish=publish,
    )


def _unwritable(ballots: Sequence[Ballot]) -> str:
    # Said before hours of tuning, not after them.
    places = [
        (b.rank, b.place) for b in ballots if b.rank in publishers(ballots) and not b.writable
    ]
    return (
        f"; it will not be kept, since nothing can be written to {_grouped(places)}"
        if places
        else ""
    )


def _sync(ballots: Sequence[Ballot], split: Split) -> tuple[bool, str]:
    """Whether FlashInfer averages timings over the group; if that was asked in vain, why."""
    if not ballots[0].settings.get("autotune_distributed_sync"):
        return False, ""
    forbidden = [(b.rank, f"gate {b.no_sync}") for b in ballots if b.no_sync]
    if forbidden:
        return False, f"{_grouped(forbidden)} forbids it"
    lacking = [(b.rank, "no process group") for b in ballots if "process_group" not in b.features]
    if lacking:
        return False, f"there is {_grouped(lacking)}"
    if split is not Split.ALL:
        return False, "not all ranks tune"
    # An all-reduce per tactic hangs where one rank hits what another tunes.
    holding = [(b.rank, f"{b.held} tactics") for b in ballots if b.held]
    return not holding, f"tuners hold {_grouped(holding)} already" if holding else ""


def all_loaded(tallies: Sequence[Tally]) -> str:
    """What follows from vote 2, or a vote after a merge: empty if all loaded, else why not."""
    return "; ".join(f"rank {t.rank} ({t.host}): {t.error}" for t in tallies if not t.ok)


class Next(str, enum.Enum):
    """What follows from the vote after the run."""

    FAIL = "fail"
    MERGE = "merge"
    DONE = "done"


def after_run(plan: Plan, tallies: Sequence[Tally]) -> Next:
    """What follows from vote 3: a failure, tactics that differ, or nothing more to do."""
    if any(not t.ran for t in tallies):
        return Next.FAIL
    if plan.action in (Action.COLD, Action.WARM) and (
        len({t.digest for t in tallies}) > 1 or any(not t.ok for t in tallies)
    ):
        return Next.MERGE
    return Next.DONE


def publishers(ballots: Sequence[Ballot]) -> frozenset[int]:
    """The ranks that write the table: the lowest rank of each place on each host."""
    first: dict[tuple[str, str], int] = {}
    for ballot in ballots:
        first.setdefault((ballot.host, ballot.place), ballot.rank)
    return frozenset(first.values())


def _strategies(ballots: Sequence[Ballot]) -> list[str]:
    # Whether a rollout includes a deployment is one question with one answer, the world's rank 0's:
    # under auto its ranks may sit on hosts that the rollout would judge differently.
    asked = {Reason.AUTO_ELIGIBLE.value, Reason.ROLLOUT_EXCLUDED.value}
    if all(b.mode == Mode.AUTO.value and b.reason in asked for b in ballots):
        return [ballots[0].strategy] * len(ballots)
    return [b.strategy for b in ballots]


def _disagreement(ballots: Sequence[Ballot], strategies: Sequence[str]) -> str:
    """Name what the ranks do not agree on, each value with its ranks; empty if they agree."""
    ranks, workloads = [b.rank for b in ballots], [b.workload for b in ballots]
    columns: dict[str, list[Any]] = {
        "protocol": [b.protocol for b in ballots],
        "strategy": list(strategies),
        # Who decided per-rank has not looked what its workload is called.
        "workload": workloads if len({name for name in workloads if name}) > 1 else [],
    }
    names = sorted({name for b in ballots for name in b.settings})
    columns.update({name: [b.settings.get(name) for b in ballots] for name in names})
    differing = {name: values for name, values in columns.items() if len(_kinds(values)) > 1}
    if "strategy" in differing:  # say why, too: a variable that one rank's host lacks, say
        differing["strategy"] = [
            f"{strategy} ({b.reason}{f': {b.why}' if b.reason == _INVALID else ''})"
            for b, strategy in zip(ballots, strategies, strict=True)
        ]
    return "; ".join(
        f"{name} differs: {_grouped(list(zip(ranks, values, strict=True)))}"
        for name, values in differing.items()
    )


def _unusable(ballots: Sequence[Ballot]) -> str:
    reasons = [(b.rank, b.unusable) for b in ballots if b.unusable]
    if reasons:
        return f"stored tables cannot be served: {_grouped(reasons)}"
    names = sorted({name for b in ballots for name in b.environment})
    differing = [
        f"{name} differs: {_grouped([(b.rank, b.environment.get(name)) for b in ballots])}"
        for name in names
        if len({b.environment.get(name) for b in ballots}) > 1
    ]
    return "; ".join(differing)


def _grouped(values: Sequence[tuple[int, Any]]) -> str:
    """Values with the ranks that hold them: ``on (ranks 0-2), off (rank 3)``."""
    holders: dict[str, list[int]] = {}
    for rank, value in values:
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        holders.setdefault(cut(text), []).append(rank)
    return ", ".join(f"{text} ({_ranks(ranks)})" for text, ranks in holders.items())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:  # noqa: PLR2004
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")  # noqa: PLR2004


def _kinds(values: Sequence[Any]) -> set[Hashable]:
    return {json.dumps(value, sort_keys=True) for value in values}


def _reason(text: str) -> Reason:
    # Rank 0 may run another version of us, with a reason that this one does not know.
    return Reason(text) if text in {reason.value for reason in Reason} else Reason.RANKS_DISAGREE


def _strictest(values: Sequence[str | None]) -> OnFailure:
    untuned = all(value == OnFailure.UNTUNED.value for value in values)
    return OnFailure.UNTUNED if untuned else OnFailure.RAISE
