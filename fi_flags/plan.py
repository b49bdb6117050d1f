"""What a group does: a pure function of what its ranks say.

Each rank votes a ``Ballot``; ``make_plans`` turns the ballots of a world into one ``Plan`` for each
tuning group. Rank 0 does that, once, and all ranks receive it, so it is the same on all. Later
votes carry a ``Tally``; what follows from those is decided here as well, so that the sequence of
votes depends on what was voted and on nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Annotated, Any, TypeAlias

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from fi_flags.ballots import Ballot, Tally, cut
from fi_flags.decision import Reason, Strategy
from fi_flags.settings import Access, Mode, OnFailure, Split
from fi_flags.table import Status

__all__ = [
    "Action",
    "Next",
    "Plan",
    "Stored",
    "after_run",
    "all_loaded",
    "count_ballots",
    "make_plan",
    "make_plans",
    "publishers",
    "read_plans",
]

_LONGEST = 600  # every stamp of another environment's table, as a ballot holds it
_INVALID = Reason.INVALID_SETTING.value
_SPOILT = {Status.SUSPECT.value, Status.UNREADABLE.value, Status.FOREIGN.value}


class Action(str, enum.Enum):
    """What the group does before and during the run of the workload."""

    FAIL = "fail"
    UNCACHED = "uncached"
    UNTUNED = "untuned"
    COLD = "cold"
    WARM = "warm"


def _runs(ranks: Iterable[int]) -> list[list[int]]:
    """Numbers as [first, step, count]: in a large group, the ranks of one plan are few runs."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        first, step, count = runs[-1] if runs else (0, 0, 0)
        if count == 1 or (count and rank == first + step * count):
            runs[-1] = [first, rank - first if count == 1 else step, count + 1]
        else:
            runs.append([rank, 1, 1])
    return runs


def _numbers(runs: Iterable[tuple[int, int, int]]) -> Iterator[int]:
    return chain(*(range(first, first + step * n, step) for first, step, n in runs))


_Runs: TypeAlias = Annotated[
    frozenset[int], PlainSerializer(_runs), PlainValidator(lambda runs: frozenset(_numbers(runs)))
]


@dataclass(frozen=True)
class Stored:
    """The leader's table, as the leader voted it.

    Attributes:
        digest: Of all its entries.
        cold_seconds: How long the table says its cold start took.
        imported: Whether it is what imported tables offer, in place of a table of its own.
    """

    place: str = ""
    digest: str = ""
    cold_seconds: float = 0.0
    imported: bool = False


@dataclass(frozen=True)
class Plan:
    """What the whole group does.

    Attributes:
        why: One line for people; where ranks differ it names ranks and values.
        members: The group's ranks, in ascending order.
        leader: The rank whose table wins.
        stored: That table.
        spoilt: Whether some rank found a table that it could not use.
        retuned: Whether a loaded table failed its first run, so that the group starts again.
        exchange: Whether the ranks' tables must be brought together before loading.
        tuners: The ranks that tune what is missing.
        skip_ops: Ops that no rank tunes or loads.
        without: What the plan would use and does without on all ranks, since the FlashInfer of some
            rank cannot; each with why and where.
        publish: Whether the result may be written.
        publishers: The ranks that write it: the lowest rank of each place on each host.
        sync: Whether FlashInfer averages timings over the group's process group.
        shadow: Whether what is tuned is held against the stored table, and refreshes it.
        compare: Whether that table may be read for it.
        trace: Whether all ranks bring their timelines to rank 0 in the end, which asked for it.
        failed: The ranks that cannot start at all, so that nobody does.
    """

    action: Action
    reason: Reason
    why: str
    members: Annotated[
        tuple[int, ...], PlainSerializer(_runs), PlainValidator(lambda runs: tuple(_numbers(runs)))
    ] = (0,)
    leader: int = 0
    stored: Stored = Stored()
    spoilt: bool = False
    retuned: bool = False
    exchange: bool = False
    tuners: _Runs = frozenset()
    without: Mapping[str, str] = field(default_factory=dict)
    publishers: _Runs = frozenset()
    skip_ops: frozenset[str] = frozenset()
    on_failure: OnFailure = OnFailure.RAISE
    publish: bool = False
    sync: bool = False
    trace: bool = False
    shadow: bool = False
    compare: bool = False
    failed: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The plan for reports and logs."""
        return {
            "action": self.action.value,
            "reason": self.reason.value,
            "why": self.why,
            "members": list(self.members),
            "leader": self.leader,
            "tuners": sorted(self.tuners),
            "sync": self.sync,
            "without": dict(self.without),
            "skip_ops": sorted(self.skip_ops),
            "on_failure": self.on_failure.value,
        }

    def without_table(self, why: str) -> Plan:
        """The plan after a table failed: all give it back and start without one."""
        action = Action.COLD if self.tuners else Action.UNTUNED
        return dataclasses.replace(
            self, action=action, reason=Reason.CACHE_UNUSABLE, why=why, exchange=False
        )


@cache
def _plans() -> TypeAdapter[dict[str, Plan]]:
    return TypeAdapter(dict[str, Plan])


def count_ballots(ballots: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks receive of vote 1: each group's plan, as JSON."""
    plans = make_plans([Ballot.from_json(fields) for fields in ballots])
    counted: dict[str, Any] = _plans().dump_python(plans, mode="json")
    return counted


def read_plans(counted: Mapping[str, Any]) -> dict[str, Plan]:
    """Each group's plan, from what ``count_ballots`` made."""
    return _plans().validate_python(counted)


def make_plans(ballots: Sequence[Ballot]) -> dict[str, Plan]:
    """The plan of each tuning group of a world, by the group's name.

    Args:
        ballots: One per rank of the world, in the order of ranks.
    """
    groups: dict[str, list[Ballot]] = {}
    for ballot in ballots:
        groups.setdefault(ballot.group, []).append(ballot)
    return {name: make_plan(group, ballots) for name, group in groups.items()}


def make_plan(ballots: Sequence[Ballot], world: Sequence[Ballot] = ()) -> Plan:
    """A group's plan: the first rule of the design that applies.

    Args:
        ballots: One per rank of the group, in the order of ranks.
        world: Those of the whole world, if the group is only a part of it: a rank that cannot start
            stops all, and whether a rollout includes them is for its rank 0 to say.
    """
    plan = _plan(ballots, world or ballots)
    return dataclasses.replace(plan, without=_without(plan, ballots))


def _plan(ballots: Sequence[Ballot], world: Sequence[Ballot]) -> Plan:
    base = Plan(
        action=Action.UNCACHED,
        reason=_reason(ballots[0].reason),
        why="",
        members=tuple(b.rank for b in ballots),
        leader=ballots[0].rank,
        trace=world[0].trace,
        spoilt=any(b.table in _SPOILT for b in ballots),
        tuners=frozenset(b.rank for b in ballots),
        publishers=publishers(ballots),
        # An op that one rank must skip is skipped by all; a failure that one must raise, all do.
        skip_ops=frozenset(op for b in ballots for op in b.settings.get("autotune_skip_ops", ())),
        on_failure=_strictest([b.settings.get("autotune_on_failure") for b in ballots]),
    )
    broken = [b for b in world if b.error]
    if broken:
        why = "; ".join(f"rank {b.rank} ({b.host}): {b.error}" for b in broken)
        failed = tuple(b.rank for b in broken)
        return dataclasses.replace(base, action=Action.FAIL, why=why, failed=failed)
    strategies = _strategies(ballots, world[0])
    disagreement = _disagreement(ballots, strategies)
    if disagreement:
        return dataclasses.replace(base, reason=Reason.RANKS_DISAGREE, why=disagreement)
    if strategies[0] == Strategy.PER_RANK.value:
        return _per_rank_plan(base, ballots)
    gated = frozenset(op for b in ballots for op in b.gate_ops)
    unusable = _unusable(ballots) or _unskippable(ballots, base.skip_ops | gated)
    if unusable:
        return dataclasses.replace(base, reason=Reason.CACHE_UNUSABLE, why=unusable)
    return _cached_plan(dataclasses.replace(base, skip_ops=base.skip_ops | gated), ballots)


def _per_rank_plan(base: Plan, ballots: Sequence[Ballot]) -> Plan:
    alone = "every rank tunes alone"
    reasons = [b.reason for b in ballots]
    if Reason.SHADOW.value not in reasons:
        return dataclasses.replace(base, why=f"{alone}; nothing is kept")
    not_all = len(set(reasons)) > 1
    numbered = [(b.rank, b.reason) for b in ballots]
    why_not = f"reason differs: {_grouped(numbered)}" if not_all else _unusable(ballots)
    if why_not:
        return dataclasses.replace(base, why=f"{alone}; nothing is compared, since {why_not}")
    access = _access(ballots)
    refresh = "" if access is Access.RO else "; what is tuned refreshes the stored table"
    compare = access is not Access.WO and bool(_usable(ballots))
    why = f"{alone}{refresh}" + _unwritable(ballots) * bool(refresh)
    if compare:
        why += f"; rank {_usable(ballots)[0].rank}'s table is compared with it"
    elif access is not Access.WO:
        why += f"; there is no usable table to compare with: {_found(ballots)}"
    return dataclasses.replace(
        base, why=why, shadow=True, compare=compare, publish=access is not Access.RO
    )


def _access(ballots: Sequence[Ballot]) -> Access:
    return Access(ballots[0].settings.get("autotune_cache_access", Access.RW.value))


def _usable(ballots: Sequence[Ballot]) -> list[Ballot]:
    own = [b for b in ballots if b.table == Status.OK.value]
    return own or [b for b in ballots if b.table == Status.IMPORTED.value]


def _found(ballots: Sequence[Ballot]) -> str:
    found = [(b.rank, b.table + (f" ({b.why})" if b.why else "")) for b in ballots]
    return _grouped(found, _LONGEST)


def _without(plan: Plan, ballots: Sequence[Ballot]) -> dict[str, str]:
    cached = plan.action in (Action.COLD, Action.WARM)
    used = {
        "settle": cached,
        "give_up": cached and bool(plan.tuners),
        "skip_ops": bool(plan.skip_ops),
        "read_only": len(plan.tuners) < len(plan.members),
    }
    lacking = {name: _lacking(ballots, name) for name, wanted in used.items() if wanted}
    return {name: why for name, why in lacking.items() if why}


def _lacking(ballots: Sequence[Ballot], feature: str) -> str:
    """Why some rank's FlashInfer lacks a feature, with the ranks; empty if none does."""
    return _grouped([(b.rank, b.lacking[feature]) for b in ballots if feature in b.lacking])


def _unskippable(ballots: Sequence[Ballot], ops: frozenset[str]) -> str:
    # A stored table without them would still leave them to be tuned.
    why = _lacking(ballots, "skip_ops") if ops else ""
    return f"{', '.join(sorted(ops))} cannot be left out: {why}" if why else ""


def _cached_plan(base: Plan, ballots: Sequence[Ballot]) -> Plan:
    access = _access(ballots)
    split = Split(ballots[0].settings.get("autotune_split", Split.ALL.value))
    usable, found = _usable(ballots), _found(ballots)
    publish = access is not Access.RO
    if access is Access.RO and not usable:
        why = f"read-only, and no rank has a usable table: {found}"
        return dataclasses.replace(base, action=Action.UNTUNED, why=why, tuners=frozenset())
    if access is Access.WO or not usable:
        why = "write-only: tuned afresh" if access is Access.WO else f"no usable table: {found}"
        tuners = frozenset([base.leader]) if split is Split.LEADER else base.tuners
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
    first = usable[0]
    leader, imported = first.rank, first.table == Status.IMPORTED.value
    exchange = len(usable) < len(ballots) or len({b.digest for b in usable}) > 1
    why = f"rank {leader}'s table of {first.entries} entries"
    if imported:
        why += f", {first.why}"
    if exchange:
        why += f", brought together with what the others have: {found}"
    tuners = frozenset([leader]) if split is Split.LEADER else base.tuners
    return dataclasses.replace(
        base,
        action=Action.WARM,
        why=why,
        leader=leader,
        stored=Stored(first.place, first.digest, first.cold_seconds, imported),
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
    lacking = _lacking(ballots, "process_group")
    if lacking:
        return False, lacking
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
    RETUNE = "retune"
    MERGE = "merge"
    DONE = "done"


def after_run(plan: Plan, tallies: Sequence[Tally]) -> Next:
    """What follows from the vote after a run: a failure, tactics that differ, or nothing more.

    A loaded table that failed its first run may be to blame, so all start once more without it; if
    every rank came back out, and is able to.
    """
    if any(not t.ran for t in tallies):
        able = not any(t.aborted or t.dead for t in tallies)
        return Next.RETUNE if plan.action is Action.WARM and able else Next.FAIL
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


def _strategies(ballots: Sequence[Ballot], spokesman: Ballot) -> list[str]:
    # Whether a rollout includes a deployment is one question with one answer, the world's rank 0's:
    # under auto its ranks may sit on hosts that the rollout would judge differently.
    asked = {Reason.AUTO_ELIGIBLE.value, Reason.ROLLOUT_EXCLUDED.value}
    if all(b.mode == Mode.AUTO.value and b.reason in asked for b in (spokesman, *ballots)):
        return [spokesman.strategy] * len(ballots)
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


def _grouped(values: Sequence[tuple[int, Any]], limit: int = 200) -> str:
    """Values with the ranks that hold them: ``on (ranks 0-2), off (rank 3)``."""
    holders: dict[str, list[int]] = {}
    for rank, value in values:
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        holders.setdefault(cut(text, limit), []).append(rank)
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
