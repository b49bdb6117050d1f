"""Starts of real ranks, each first cold and then warm in the same directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.crew import Crew, Ended, without_times

FULL = pytest.param(8, marks=pytest.mark.full)


def reports(ended: list[Ended]) -> list[dict[str, Any]]:
    for rank, end in enumerate(ended):
        assert end.exit_code == 0, f"rank {rank}: {end.result} {end.log}"
    return [end.result["report"] for end in ended]


def digests(found: list[dict[str, Any]]) -> set[str]:
    return {rank["digest"] for report in found for rank in report["ranks"]}


@pytest.mark.parametrize("world", [1, 2, 4, FULL])
def test_on_is_cold_then_warm_with_one_digest(world: int, tmp_path: Path) -> None:
    crew = Crew(world, tmp_path)
    cold, warm = crew.start("on"), crew.start("on")
    first, second = reports(cold), reports(warm)

    assert {r["outcome"] for r in first} == {"cold"}
    assert {r["outcome"] for r in second} == {"warm"}
    assert len(digests(first)) == 1
    assert digests(first) == digests(second)
    assert all(rank["votes"] <= 4 for rank in first[0]["ranks"])
    assert all(rank["votes"] <= 3 and rank["tuned"] == 0 for rank in second[0]["ranks"])
    assert all(without_times(r) == without_times(second[0]) for r in second)
    logits = {round(end.result["logits"], 1) for end in cold + warm}
    assert max(logits) - min(logits) < 1.0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_off_stays_uncached_and_writes_nothing(world: int, tmp_path: Path) -> None:
    crew = Crew(world, tmp_path)
    for _ in range(2):
        found = reports(crew.start("off"))
        assert {r["outcome"] for r in found} == {"uncached"}
        assert all(rank["tuned"] > 0 for rank in found[0]["ranks"])
    assert not (tmp_path / "tables").exists()


def test_separate_directories_end_with_one_table_on_each(tmp_path: Path) -> None:
    places = {rank: str(tmp_path / f"node{rank}") for rank in range(2)}
    crew = Crew(2, tmp_path, each=lambda rank: {"autotune_cache_dir": places[rank]})
    cold = reports(crew.start("on"))
    for table in Path(places[1]).rglob("*.json"):
        table.unlink()
    warm = reports(crew.start("on"))
    assert {r["outcome"] for r in warm} == {"warm"}
    assert digests(cold) == digests(warm)


def test_ranks_with_other_ops_end_with_one_digest_and_start_warm(tmp_path: Path) -> None:
    crew = Crew(2, tmp_path)
    cold = reports(crew.start("on", ops=lambda rank: (f"only{rank}",)))
    warm = reports(crew.start("on", ops=lambda rank: (f"only{rank}",)))
    assert {r["outcome"] for r in warm} == {"warm"}
    assert digests(cold) == digests(warm)
    assert len(digests(warm)) == 1


def test_one_rank_without_the_flag_sends_all_per_rank_and_both_end(tmp_path: Path) -> None:
    crew = Crew(2, tmp_path, each=lambda rank: {"persistent_cache": "on" if rank == 0 else "off"})
    found = reports(crew.start("unused"))
    assert {r["outcome"] for r in found} == {"uncached"}
    assert {r["decision"]["reason"] for r in found} == {"RANKS_DISAGREE"}


def test_a_table_cut_short_on_one_rank_is_a_miss_and_both_end(tmp_path: Path) -> None:
    places = {rank: str(tmp_path / f"node{rank}") for rank in range(2)}
    crew = Crew(2, tmp_path, each=lambda rank: {"autotune_cache_dir": places[rank]})
    cold = reports(crew.start("on"))
    table = next(Path(places[0]).rglob("*.json"))
    table.write_bytes(table.read_bytes()[:1000])
    warm = reports(crew.start("on"))
    assert {r["outcome"] for r in warm} == {"warm"}
    assert {r["plan"]["leader"] for r in warm} == {1}
    assert digests(cold) == digests(warm)


def test_timings_averaged_by_flashinfer_agree_without_a_merge(tmp_path: Path) -> None:
    crew = Crew(2, tmp_path, {"autotune_distributed_sync": True})
    cold, warm = reports(crew.start("on")), reports(crew.start("on"))
    assert cold[0]["plan"]["sync"]
    assert [rank["votes"] for rank in cold[0]["ranks"]] == [2, 2]
    assert not warm[0]["plan"]["sync"]
    assert [r["outcome"] for r in cold + warm] == ["cold", "cold", "warm", "warm"]
    assert digests(cold) == digests(warm)
