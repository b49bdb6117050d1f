"""A scene for each test, on tuners whose costs the test may set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scene import Scene
from tests.toy import own_tuners

Cost = Callable[[int, str, Any], float]


class Costs:
    """Milliseconds by rank, runner class and tactic; a test replaces ``by``."""

    by: Cost = staticmethod(lambda _rank, name, tactic: len(name) + tactic)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    found = Costs()

    def cost(rank: int, name: str, tactic: Any) -> float:
        return found.by(rank, name, tactic)  # as it is when it is asked

    with own_tuners(monkeypatch, cost):
        yield found


@pytest.fixture
def scene(tmp_path: Path, caplog: pytest.LogCaptureFixture, costs: Costs) -> Scene:  # noqa: ARG001
    place = tmp_path / "place"
    place.mkdir()
    return Scene(place, caplog)
