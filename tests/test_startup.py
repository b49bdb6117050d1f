"""The benchmark of a start runs and says what it found; its ratio is judged on a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "startup.py"


def test_benchmark_of_a_start_prints_ratio_and_the_time_of_a_decision() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--pairs", "1", "--json"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["pairs"] == 1
    assert found["ratio"] > 0.5
    assert 0 < found["decide_us"] < 1000
    assert found["met"] is (found["ratio"] <= 1.3)
