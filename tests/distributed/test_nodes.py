"""Two nodes for real: torchrun on each, one rendezvous, separate disks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fi_flags import logs
from fi_flags.table import parse
from tests.distributed.nodes import Node, Start, start, two_nodes, why_not

pytestmark = [
    pytest.mark.skipif(bool(why := why_not()), reason=why),
    pytest.mark.timeout(120),
]

# Runs the command line, but for one thing that the test wants otherwise.
DIES_ONCE = """
import os
from fi_flags.workloads.cpu import CpuDecoder
run = CpuDecoder.run
def die_in_the_first_attempt(self):
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "1"):
        os._exit(139)
    run(self)
CpuDecoder.run = die_in_the_first_attempt
"""
SLOW = """
from fi_flags import tuner
wall_clock = tuner.wall_clock
tuner.wall_clock = lambda: wall_clock(repeat=3000)
"""


def program(text: str, place: Path) -> tuple[str, ...]:
    path = place / "program.py"
    path.write_text(f"{text}\nfrom fi_flags.cli import main\nmain()\n")
    return (str(path),)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with two_nodes(tmp_path) as made:
        yield made


def digests(report: dict[str, Any]) -> set[str]:
    return {rank["digest"] for rank in report["ranks"]}


def both(started: Start) -> dict[str, Any]:
    """The report of a start that went well on both nodes."""
    ended = started.ended()
    assert [one.code for one in ended] == [0, 0], [one.err[-1500:] for one in ended]
    assert ended[1].out == ""  # rank 0 speaks for all
    return ended[0].report


def test_cold_then_warm_then_with_one_disk_lost_both_disks_hold_the_table(
    nodes: list[Node], tmp_path: Path
) -> None:
    with start(nodes, tmp_path) as first:
        cold = both(first)
    assert cold["outcome"] == "cold"
    assert [r["host"] for r in cold["ranks"]] == ["node0", "node1"]
    (one,), (other,) = (node.tables() for node in nodes)
    entries = parse(one.read_bytes()).entries
    assert parse(other.read_bytes()).entries == entries
    before = one.stat()

    with start(nodes, tmp_path) as second:
        warm = both(second)
    shutil.rmtree(nodes[0].disk)  # the node that hosts rendezvous, store and rank 0
    with start(nodes, tmp_path) as third:
        again = both(third)

    for report in (warm, again):
        assert report["outcome"] == "warm"
        assert all(r["tuned"] == 0 for r in report["ranks"])
        assert digests(report) == digests(cold)
    assert again["plan"]["leader"] == 1
    assert nodes[0].tables() == [one]
    assert parse(one.read_bytes()).entries == entries
    assert one.stat().st_ino != before.st_ino


def test_a_node_cut_off_in_the_middle_is_named_and_both_sides_end(
    nodes: list[Node], tmp_path: Path
) -> None:
    quick = {"AUTOTUNE_TIMEOUT_S": "3", "AUTOTUNE_HEARTBEAT_S": "1"}
    with start(nodes, tmp_path, program=program(SLOW, tmp_path), settings=quick) as started:
        started.until(lambda: started.so_far(0).events(logs.TUNING), "tuning")
        nodes[1].cut_off()
        started.until(lambda: started.so_far(0).events(logs.ENDED), "end of rank 0")
        started.until(lambda: started.so_far(1).events(logs.ENDED), "end of rank 1")
        here, there = (started.so_far(n).events(logs.ENDED)[0] for n in range(2))
    assert here["exit_code"] == there["exit_code"] == 4
    assert "rank 1 (node1)" in here["cause"]
    assert "the ranks' store does not answer" in there["cause"]
    assert nodes[0].tables() == nodes[1].tables() == []


def test_a_rank_that_dies_is_started_again_with_its_node_and_the_second_attempt_is_whole(
    nodes: list[Node], tmp_path: Path
) -> None:
    with start(nodes, tmp_path, program=program(DIES_ONCE, tmp_path), restarts=1) as started:
        report = both(started)
    assert report["outcome"] == "cold"
    assert len(digests(report)) == 1
    assert [len(node.tables()) for node in nodes] == [1, 1]


def test_nodes_with_other_settings_both_tune_alone_and_each_value_is_named(
    nodes: list[Node], tmp_path: Path
) -> None:
    nodes[1].settings["PERSISTENT_CACHE"] = "off"
    with start(nodes, tmp_path) as started:
        report = both(started)
    assert report["outcome"] == "uncached"
    assert report["decision"]["reason"] == "RANKS_DISAGREE"
    why = report["plan"]["why"]
    assert "leader_worker (OPERATOR_ON) (rank 0), per_rank (OPERATOR_OFF) (rank 1)" in why
    assert [node.tables() for node in nodes] == [[], []]
