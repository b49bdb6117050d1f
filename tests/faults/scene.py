"""What the tests of reported failures share: starts of in-memory ranks, and what they said.

Every start is checked for how it speaks: INFO from a group's first rank only, and each line once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fi_flags import logs
from fi_flags.facts import Facts
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome, Report
from fi_flags.settings import FlashInferSettings
from fi_flags.table import Table, parse
from fi_flags.warmup import warm_up
from tests.toy import Crowd, Toy, fresh_tuner

PROFILES = 6  # of a toy: two ops, three buckets
Event = dict[str, Any]


@dataclass
class Start:
    """What each rank of a start returned or raised, what it serves, and what was logged."""

    done: list[Report | BaseException]
    served: list[dict[Any, Any]]
    log: list[Event]

    @property
    def reports(self) -> list[Report]:
        found = [one for one in self.done if isinstance(one, Report)]
        assert len(found) == len(self.done), self.done
        return found

    @property
    def errors(self) -> list[BaseException]:
        return [one for one in self.done if isinstance(one, BaseException)]

    @property
    def outcome(self) -> Outcome:
        (one,) = {report.outcome for report in self.reports}
        return one

    @property
    def ranks(self) -> Any:
        return self.reports[0].ranks

    def said(self, event: str) -> list[Event]:
        return [one for one in self.log if one["event"] == event]

    def the(self, event: str) -> Event:
        (one,) = self.said(event)
        return one

    @property
    def warned(self) -> list[str]:
        """The events at WARNING or above."""
        return [one["event"] for one in self.log if one["level"] in ("WARNING", "ERROR")]

    def serve_alike(self) -> bool:
        digests = {rank.digest for report in self.reports for rank in report.ranks}
        return len(digests) == 1 and all(one == self.served[0] for one in self.served)


@dataclass
class Scene:
    """Starts of one server, over and over; ``each`` gives a rank settings of its own."""

    place: Path
    caplog: pytest.LogCaptureFixture
    world: int = 2
    groups: Callable[[int], str] = lambda _rank: ""
    settings: dict[str, Any] = field(default_factory=dict)

    def start(
        self,
        toy: Callable[[int], Toy] = lambda _rank: Toy(),
        *,
        each: Callable[[int], dict[str, Any]] = lambda _rank: {},
        facts: Facts | None = None,
        world: int = 0,
        then: Callable[[Ranks], object] = lambda _ranks: None,
        **given: Any,
    ) -> Start:
        self.caplog.set_level(logging.INFO, logger=logs.LOGGER)
        self.caplog.clear()

        def work(ranks: Ranks) -> tuple[Report, dict[Any, Any]]:
            fresh_tuner()
            mine = toy(ranks.rank)
            asked: dict[str, Any] = {
                "persistent_cache": "on",
                "autotune_cache_dir": self.tables,
                "autotune_join_s": 10,
                **self.settings,
                **given,
                **each(ranks.rank),
            }
            settings = FlashInferSettings(**asked)
            report = warm_up(mine, ranks=ranks, settings=settings, facts=facts)
            then(ranks)
            return report, mine.serving()

        found = Crowd(world or self.world, groups=self.groups).each(work)
        log = [
            {**event, "level": record.levelname}
            for record in self.caplog.records
            if (event := record.__dict__.get("fi_flags"))
        ]
        self._well_spoken(log)
        return Start(
            [one if isinstance(one, BaseException) else one[0] for one in found],
            [one[1] for one in found if not isinstance(one, BaseException)],
            log,
        )

    def _well_spoken(self, log: list[Event]) -> None:
        repeated = (logs.WAITING, logs.TUNING)  # the heartbeats
        info = [one for one in log if one["level"] == "INFO" and one["event"] not in repeated]
        times = Counter((one["event"], one.get("group")) for one in info)
        assert not times or max(times.values()) == 1, times
        if self.groups(0) == "":
            assert {one["rank"] for one in info} <= {0}, info

    @property
    def tables(self) -> Path:
        return self.place / "tables"

    def paths(self, below: Path | None = None) -> list[Path]:
        return sorted((below or self.tables).rglob("*.json"))

    @property
    def path(self) -> Path:
        (one,) = self.paths()
        return one

    def table(self) -> Table:
        return parse(self.path.read_bytes())

    def aside(self) -> list[Path]:
        return sorted(self.place.rglob("*.quarantined-*"))

    def disk(self) -> list[tuple[str, int, int]]:
        """Inodes and times of everything below, directories too."""
        found = [self.place, *sorted(self.place.rglob("*"))]
        return [(str(p), p.lstat().st_ino, p.lstat().st_mtime_ns) for p in found]
