"""The benchmarks run and say what they found; their figures are judged on a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.releases import installed

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def found(name: str, *options: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *options, "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert result["met"] is (done.returncode == 0)
    return result


def test_benchmark_of_a_start_prints_ratio_and_the_time_of_a_decision() -> None:
    start = found("startup.py", "--pairs", "1")
    assert start["pairs"] == 1
    assert start["ratio"] > 0.5
    assert 0 < start["decide_us"] < 1000
    assert start["met"] is (start["ratio"] <= 1.3)


def test_votes_do_not_grow_with_tactics_and_flashinfers_all_reduces_do(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    cost = found(
        "coordination.py", "--ranks", "2", "--calls", "4", "--votes", "2", "8", "--plot", str(plot)
    )
    (world,) = cost["worlds"]
    ours, theirs = world["fi_flags"], world["group timing"]
    assert world["tactics"] == 4 * world["few_tactics"]
    assert ours["synchronisations"] <= ours["synchronisations_few"] + 1 <= 5
    assert theirs["synchronisations"] > world["tactics"]
    assert set(cost["vote_s"]) == {"2", "8"}
    assert plot.read_text().startswith("<svg")


def test_a_look_up_after_a_load_is_compared_with_one_after_a_tune() -> None:
    (release,) = found("lookup.py", "--pairs", "3", installed())["releases"].values()
    assert release["ratio"] == pytest.approx(release["loaded_us"] / release["tuned_us"], rel=0.5)
