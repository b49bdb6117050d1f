"""What a group does: a pure function of what its ranks say.

Each rank votes a ``Ballot``; ``make_plan`` turns all ballots into one ``Plan``, the same on every
rank. Later votes carry a ``Tally``; what follows from those is decided here as well, so that the
sequence of votes depends on what was voted and on nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fi_flags.decision import Reason, Strategy
from fi_flags.settings import Access, Mode, OnFailure, Split
from fi_flags.table import Status

__all__ = [
    "PROTOCOL",
    "Action",
    "Ballot",
    "Next",
    "Plan",
    "Tally",
    "after_run",
    "all_loaded",
    "make_plan",
    "publishers",
]

PROTOCOL = 1
_LONG = 200


class Action(str, enum.Enum):
    """What the group does before and during the run of the workload."""

    FAIL = "fail"
    UNCACHED = "uncached"
    UNTUNED = "untuned"
    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True)
class Ballot:
    """What one rank decided, has, and can do; vote 1.

    Attributes:
        settings: The settings that change the plan, by name (``settings.plan_values``).
        environment: FlashInfer's stamps; empty where the rank decided per-rank, since off means
            that nothing is looked up.
        unusable: Why this rank's FlashInfer cannot serve a stored table, or empty.
        place: The table's path, for choosing one publisher per disk.
        digest: Of the table's entries, all of them.
        cold_seconds: How long the table says its cold start took.
        error: Why this rank cannot start at all, or empty.
    """

    rank: int
    host: str = ""
    protocol: int = PROTOCOL
    mode: str = Mode.OFF.value
    strategy: str = Strategy.PER_RANK.value
    reason: str = Reason.DEFAULT_OFF.value
    settings: Mapping[str, Any] = field(default_factory=dict)
    workload: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    unusable: str = ""
    held: int = 0
    table: str = Status.ABSENT.value
    why: str = ""
    entries: int = 0
    digest: str = ""
    cold_seconds: float = 0.0
    place: str = ""
    writable: bool = False
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """The ballot as it goes over the wire; long texts are cut, so its size is bounded."""
        fields = dataclasses.asdict(self)
        for name in ("host", "workload", "unusable", "why", "place", "error"):
            fields[name] = _cut(fields[name], 500)
        fields["environment"] = {name: _cut(text) for name, text in self.environment.items()}
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Ballot:
        """Read a ballot; names that this version does not know are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        given = {name: value for name, value in fields.items() if name in known}
        given["features"] = tuple(given.get("features", ()))
        return cls(**given)


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


@dataclass(frozen=True)
class Tally:
    """What one rank reports in a vote after the first.

    Attributes:
        ok: Whether the step succeeded on this rank.
        ran: Whether the workload itself did.
        error: Why not.
        digest: Of the tactics that the rank's tuner serves for this workload.
        loaded, tuned, missing, failed: Counts of profiles.
        seconds: How long this rank's run took.
    """

    rank: int
    host: str = ""
    ok: bool = True
    ran: bool = True
    error: str = ""
    digest: str = ""
    entries: int = 0
    loaded: int = 0
    tuned: int = 0
    missing: int = 0
    failed: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The tally as it goes over the wire."""
        return {
            **dataclasses.asdict(self),
            "host": _cut(self.host, 500),
            "error": _cut(self.error, 500),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Tally:
        """Read a tally; names that this version does not know are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in fields.items() if name in known})


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
    return _cached_plan(base, ballots)


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
        return dataclasses.replace(
            base,
            action=Action.COLD,
            why=why,
            tuners=tuners,
            publish=publish,
            # An all-reduce per tactic hangs where one rank hits what another tunes.
            sync=bool(ballots[0].settings.get("autotune_distributed_sync"))
            and split is Split.ALL
            and not any(b.held for b in ballots),
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
    ranks = [b.rank for b in ballots]
    columns: dict[str, list[Any]] = {
        "protocol": [b.protocol for b in ballots],
        "strategy": list(strategies),
        "workload": [b.workload for b in ballots],
    }
    names = sorted({name for b in ballots for name in b.settings})
    columns.update({name: [b.settings.get(name) for b in ballots] for name in names})
    differing = {name: values for name, values in columns.items() if len(_kinds(values)) > 1}
    if "strategy" in differing:  # say why, too: a variable that one rank's host lacks, say
        differing["strategy"] = [
            f"{strategy} ({b.reason})" for b, strategy in zip(ballots, strategies, strict=True)
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
        holders.setdefault(_cut(text), []).append(rank)
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


def _cut(text: str, limit: int = _LONG) -> str:
    if len(text) <= limit:
        return text
    # The digest keeps long values that differ only behind the cut apart.
    tail = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
    return f"{text[: limit - 9]}…{tail}"
