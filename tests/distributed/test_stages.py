"""Two stages of two real ranks each, that run different ops in groups of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fi_flags.table import parse
from tests.distributed.crew import Crew, Ended, Fault

QUICK = {"autotune_join_s": 10, "autotune_timeout_s": 3, "autotune_stall_s": 3}
LIMIT_S = 30.0
STAGES = ("pp0", "pp0", "pp1", "pp1")


def own_disks(tmp_path: Path, **settings: Any) -> Crew:
    """Each rank has a disk of its own."""
    places = {rank: str(tmp_path / f"disk{rank}") for rank in range(4)}
    return Crew(
        4,
        tmp_path,
        QUICK | settings,
        each=lambda rank: {"autotune_cache_dir": places[rank]},
        limit=LIMIT_S,
        stages=2,
    )


def ops(rank: int) -> tuple[str, ...]:
    """The second stage has ops that the first lacks."""
    return ("head2", "sampler") if rank >= 2 else ()


def reports(ended: list[Ended]) -> list[dict[str, Any]]:
    for rank, end in enumerate(ended):
        assert end.exit_code == 0, f"rank {rank}: {end.result} {end.log}"
    return [end.result["report"] for end in ended]


def by_stage(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The outcome and digest of each stage, on which all its ranks must agree."""
    rows = []
    for members in ([0, 1], [2, 3]):
        mine = [found[rank] for rank in members]
        assert all([r["rank"] for r in report["ranks"]] == members for report in mine)
        said = {(report["outcome"], r["digest"]) for report in mine for r in report["ranks"]}
        assert len(said) == 1
        rows.append(said.pop())
    return rows


@pytest.mark.parametrize("lost", [None, (2, 3), (0, 1), (0, 3)])
def test_stages_with_other_ops_start_cold_then_warm_and_a_lost_table_costs_its_stage_only(
    lost: tuple[int, ...] | None, tmp_path: Path
) -> None:
    crew = own_disks(tmp_path)
    cold = by_stage(reports(crew.start("on", ops=ops)))
    assert [outcome for outcome, _ in cold] == ["cold", "cold"]
    for rank in lost or ():
        next((tmp_path / f"disk{rank}").rglob("*.json")).unlink()
    again = by_stage(reports(crew.start("on", ops=ops)))
    gone = [set(members) <= set(lost or ()) for members in ((0, 1), (2, 3))]
    assert [outcome for outcome, _ in again] == ["cold" if lone else "warm" for lone in gone]
    for stage in range(2):
        assert gone[stage] or again[stage] == ("warm", cold[stage][1])
    for rank in range(4):
        (table,) = (tmp_path / f"disk{rank}").rglob("*.json")
        assert table.stem == STAGES[rank]
        assert any("sampler" in key for key in parse(table.read_bytes()).entries) == (rank >= 2)


@pytest.mark.parametrize("flag", ["on", "off"])
@pytest.mark.parametrize("where", ["down", "after"])
@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_stage_that_fails_ends_the_other_by_name(
    flag: str, where: str, how: str, tmp_path: Path
) -> None:
    ended = own_disks(tmp_path).start(flag, fault=Fault(3, where, how), ops=ops)
    for rank, end in enumerate(ended):
        if rank == 3 and how == "die":
            assert end.exit_code == 139
            continue
        assert end.exit_code in (4, 5), f"rank {rank}: {end}"
        assert "rank 3" in f"{end.result} {end.log}"
        assert how == "die" or "boom" in f"{end.result} {end.log}"


def test_stages_average_timings_each_over_its_own_group(tmp_path: Path) -> None:
    crew = own_disks(tmp_path, autotune_distributed_sync=True)
    cold, warm = reports(crew.start("on", ops=ops)), reports(crew.start("on", ops=ops))
    assert [report["plan"]["sync"] for report in cold] == [True] * 4
    assert [outcome for outcome, _ in by_stage(cold)] == ["cold"] * 2
    assert [digest for _, digest in by_stage(cold)] == [digest for _, digest in by_stage(warm)]
