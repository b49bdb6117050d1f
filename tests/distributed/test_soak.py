"""The first minute of a soak: random faults, start after start. ``make soak`` runs twenty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.soak import run

SECONDS = 60.0
SEED = 1


@pytest.mark.timeout(SECONDS + 120)
def test_a_minute_of_random_faults_hangs_nothing_and_loses_nothing(tmp_path: Path) -> None:
    soak = run(SEED, SECONDS, tmp_path)
    assert soak.counts.total() >= 10
    assert len(soak.counts) >= 4, soak.counts
