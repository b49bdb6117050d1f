"""What the ranks of a group say to each other, as it goes over the wire: JSON of bounded size."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fi_flags.decision import Reason, Strategy
from fi_flags.settings import Mode
from fi_flags.shadow import Comparison
from fi_flags.table import Status

__all__ = ["PROTOCOL", "Ballot", "Tally", "cut"]

PROTOCOL = 1
_LONG = 200


@dataclass(frozen=True)
class Ballot:
    """What one rank decided, has, and can do; vote 1.

    Attributes:
        group: The name of this rank's tuning group.
        settings: The settings that change the plan, by name (``settings.plan_values``).
        gate_ops: Ops that this rank's gates forbid, where the group uses the cache.
        no_sync: The gate that forbids averaging timings, or empty.
        environment: FlashInfer's stamps; empty where the rank decided per-rank, since off means
            that nothing is looked up.
        lacking: What this rank's FlashInfer cannot do (``Tuner.lacking``), each with why.
        unusable: Why this rank's FlashInfer cannot serve a stored table, or empty.
        place: The table's path, for choosing one publisher per disk.
        digest: Of the table's entries, all of them.
        cold_seconds: How long the table says its cold start took.
        trace: Whether this rank is to write a trace of all; rank 0 decides.
        error: Why this rank cannot start at all, or empty.
    """

    rank: int
    host: str = ""
    group: str = ""
    protocol: int = PROTOCOL
    mode: str = Mode.OFF.value
    strategy: str = Strategy.PER_RANK.value
    reason: str = Reason.DEFAULT_OFF.value
    settings: Mapping[str, Any] = field(default_factory=dict)
    gate_ops: tuple[str, ...] = ()
    no_sync: str = ""
    workload: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    unusable: str = ""
    held: int = 0
    table: str = Status.ABSENT.value
    why: str = ""
    entries: int = 0
    digest: str = ""
    cold_seconds: float = 0.0
    place: str = ""
    writable: bool = False
    trace: bool = False
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """The ballot as it goes over the wire; long texts are cut, so its size is bounded."""
        fields: dict[str, Any] = dict(vars(self))
        for name in ("host", "workload", "unusable", "why", "place", "error", "no_sync"):
            fields[name] = cut(fields[name], 500)
        for name in ("environment", "lacking"):
            fields[name] = {key: cut(text) for key, text in fields[name].items()}
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Ballot:
        """Read a ballot; names that this version does not know are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        given = {name: value for name, value in fields.items() if name in known}
        given["gate_ops"] = tuple(given.get("gate_ops", ()))
        return cls(**given)


@dataclass(frozen=True)
class Tally:
    """What one rank reports in a vote after the first.

    Attributes:
        ok: Whether the step succeeded on this rank.
        ran: Whether the workload itself did.
        aborted: Whether torch's groups were broken to bring this rank out of the model.
        dead: Why nothing more can run on this rank's GPU, or empty.
        error: Why not.
        digest: Of the tactics that the rank's tuner serves for this workload.
        loaded, tuned, missing, failed: Counts of profiles.
        seconds: How long this rank's run took.
        shadow: How its stored table compares with what it tuned, in shadow mode.
    """

    rank: int
    host: str = ""
    ok: bool = True
    ran: bool = True
    aborted: bool = False
    dead: str = ""
    error: str = ""
    digest: str = ""
    entries: int = 0
    loaded: int = 0
    tuned: int = 0
    missing: int = 0
    failed: int = 0
    seconds: float = 0.0
    shadow: Comparison = field(default_factory=Comparison)

    def to_json(self) -> dict[str, Any]:
        """The tally as it goes over the wire."""
        return {
            **vars(self),
            "host": cut(self.host, 500),
            "error": cut(self.error, 500),
            "dead": cut(self.dead, 500),
            "shadow": dataclasses.asdict(self.shadow),
        }

    def given_back(self) -> Tally:
        """The tally where FlashInfer's defaults serve everything, whatever was tuned meanwhile."""
        missing = self.loaded + self.tuned + self.missing
        return dataclasses.replace(self, loaded=0, tuned=0, missing=missing, digest="")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Tally:
        """Read a tally; names that this version does not know are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        given = {name: value for name, value in fields.items() if name in known}
        given["shadow"] = Comparison(**given.get("shadow", {}))
        return cls(**given)


def cut(text: str, limit: int = _LONG) -> str:
    """A text of bounded length; what was cut off is told apart by a digest."""
    if len(text) <= limit:
        return text
    # The digest keeps long values that differ only behind the cut apart.
    tail = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
    return f"{text[: limit - 9]}…{tail}"
