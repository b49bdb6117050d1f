"""What a warm-up says when it is done: frozen, and plain JSON on request."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from fi_flags.ballots import Tally
from fi_flags.decision import Decision
from fi_flags.plan import Plan
from fi_flags.shadow import Comparison

__all__ = ["Outcome", "RankReport", "Report", "TableReport"]


class Outcome(str, enum.Enum):
    """What a warm-up came to."""

    UNCACHED = "uncached"
    COLD = "cold"
    WARM = "warm"
    TOPPED_UP = "topped_up"
    RETUNED = "retuned"
    UNTUNED = "untuned"


@dataclass(frozen=True)
class TableReport:
    """The group's table: its file on this rank's machine, and what it serves.

    Attributes:
        kept: Whether the file holds these entries now; None where another rank sees to that.
    """

    path: str
    entries: int
    digest: str
    kept: bool | None


@dataclass(frozen=True)
class RankReport:
    """One rank's part; counts are profiles, seconds are those of its run of the workload."""

    rank: int
    host: str
    outcome: Outcome
    seconds: float
    loaded: int
    tuned: int
    missing: int
    failed: int
    digest: str
    votes: int


@dataclass(frozen=True)
class Report:
    """The outcome of a warm-up, with its figures.

    Attributes:
        seconds: How long the whole warm-up took on this rank.
        saved_seconds: How much shorter the slowest rank's run was than the recorded cold start;
            None where no cold start is on record.
        shadow: How the stored table compares with what was tuned, in shadow mode and where there
            was one.
    """

    outcome: Outcome
    decision: Decision
    plan: Plan
    seconds: float
    saved_seconds: float | None
    table: TableReport | None
    ranks: tuple[RankReport, ...]
    shadow: Comparison | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as the command line prints it."""
        return {
            "outcome": self.outcome.value,
            "decision": self.decision.to_json(),
            "plan": self.plan.to_json(),
            "seconds": self.seconds,
            "saved_seconds": self.saved_seconds,
            "table": dataclasses.asdict(self.table) if self.table else None,
            "ranks": [
                {**dataclasses.asdict(rank), "outcome": rank.outcome.value} for rank in self.ranks
            ],
            **({"shadow": self.shadow.to_json()} if self.shadow else {}),
        }


def rank_reports(
    outcome: Outcome, tallies: list[Tally] | tuple[Tally, ...], votes: int
) -> tuple[RankReport, ...]:
    """One row per rank from the tallies of the last vote that carried counts."""
    return tuple(
        RankReport(
            rank=tally.rank,
            host=tally.host,
            outcome=outcome,
            seconds=tally.seconds,
            loaded=tally.loaded,
            tuned=tally.tuned,
            missing=tally.missing,
            failed=tally.failed,
            digest=tally.digest,
            votes=votes,
        )
        for tally in tallies
    )
