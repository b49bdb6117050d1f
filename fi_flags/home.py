"""A table's place on this rank's machine: what was found there, and how the result gets there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fi_flags import logs
from fi_flags.ballots import Tally
from fi_flags.plan import Plan
from fi_flags.report import Outcome, TableReport
from fi_flags.run import Crew
from fi_flags.store import Store
from fi_flags.table import Entries, Status, Table, Verdict

__all__ = ["Home"]


@dataclass
class Home:
    """The place of the group's table, as one rank has it.

    Attributes:
        store: Where the table lives on this rank's machine.
        found: What was found there before vote 1.
        stamps: FlashInfer's environment stamps, equal on all ranks.
        about: What the table says of its making, beside its entries.
        imported: The files that were found in its stead: what the workload hits of them is adopted.
        aside: Where what was found went, by its place, if this start set it aside.
    """

    store: Store
    found: Verdict
    stamps: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    imported: tuple[Path, ...] = ()
    aside: dict[Path, Path] = field(default_factory=dict)

    def offered(self, plan: Plan) -> Table | None:
        """The table of this rank that the plan brings together with the others', if it has one."""
        return self.found.table if bool(self.imported) == plan.stored.imported else None

    def quarantine(self, why: str) -> None:
        """Set aside what was found; nothing of it is offered any more.

        Raises:
            OSError: It cannot be renamed.
        """
        for place in [Store(path) for path in self.imported] or [self.store]:
            moved = place.quarantine(why)
            if moved is not None:
                self.aside[place.path] = moved
        if self.aside:
            self.found, self.imported = Verdict(Status.ABSENT), ()

    def kept_by(self, crew: Crew, plan: Plan) -> bool:
        """Whether the table on this disk is this rank's to write and to move."""
        return plan.publish and crew.rank in plan.publishers

    def publish(
        self, crew: Crew, plan: Plan, outcome: Outcome, entries: Entries, tallies: Sequence[Tally]
    ) -> TableReport | None:
        """Write the table where it is not yet; a failure is one warning for each disk.

        Never raises: the group's other ranks have left by then.
        """
        if not entries:
            if crew.talk.first and any(tally.failed for tally in tallies):
                crew.log.warning(logs.NOT_KEPT, path="", why="no tactic of any profile worked")
            elif crew.talk.first:
                crew.log.info(logs.NOTHING_TO_TUNE)
            return None
        kept: bool | None = None
        if crew.rank in plan.publishers:
            own = None if self.imported else self.found.table
            kept = own is not None and own.entries == entries
            if plan.publish and not kept:
                crew.meeting.at("publish")
                about = self._about(crew, plan, outcome, tallies)

                def aside(moved: Path, why: str) -> None:
                    crew.log.warning(logs.QUARANTINED, moved_to=str(moved), why=why)

                try:
                    self.store.publish(Table(entries, self.stamps, about), aside)
                    kept = True
                except Exception as error:  # noqa: BLE001 - a cache never stops a start
                    why = f"{type(error).__name__}: {error}"
                    crew.log.warning(logs.NOT_KEPT, path=str(self.store.path), why=why)
        return TableReport(str(self.store.path), len(entries), tallies[0].digest, kept)

    def _about(
        self, crew: Crew, plan: Plan, outcome: Outcome, tallies: Sequence[Tally]
    ) -> dict[str, Any]:
        recorded = plan.stored.cold_seconds
        spent = max(tally.seconds for tally in tallies)
        tuned = {
            Outcome.COLD: spent,
            Outcome.RETUNED: spent,
            Outcome.UNCACHED: spent,  # in a shadow, which tunes all as a cold start does
            Outcome.TOPPED_UP: recorded + spent,
        }
        adopted = {"adopted": [path.name for path in self.imported]}
        hit = plan.stored.imported and any(tally.loaded for tally in tallies)
        return {
            **self.about,
            **(adopted if hit else {}),
            "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "host": crew.meeting.ranks.host,
            "ranks": len(plan.members),
            "cold_seconds": round(tuned.get(outcome, recorded), 3),
        }
