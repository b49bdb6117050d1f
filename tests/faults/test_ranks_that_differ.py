"""F01 to F12: ranks that hold, want or do something else than their peers."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fi_flags import logs
from fi_flags.decision import Reason
from fi_flags.plan import Action
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome
from fi_flags.tuner import Tuner
from tests.distributed.crew import Crew, Fault
from tests.faults.conftest import Costs
from tests.faults.scene import PROFILES, Scene
from tests.toy import Toy, this_thread


def own_disk(scene: Scene) -> Any:
    return lambda rank: {"autotune_cache_dir": scene.place / f"disk{rank}"}


def test_f01_a_table_whose_keys_fit_rank_0_only_ends_on_both_ranks(scene: Scene) -> None:
    def toy(rank: int) -> Toy:  # as MoE keys of some releases do, this op's carry the rank
        return Toy(ops=("gemm", f"moe/rank{rank}"))

    scene.start(toy, world=1)
    found = scene.start(toy)
    assert found.outcome is Outcome.TOPPED_UP
    assert len({rank.digest for rank in found.ranks}) == 1
    assert [rank.tuned for rank in found.ranks] == [0, PROFILES // 2]
    assert found.the(logs.PLAN)["why"] == "rank 0's table of 6 entries"
    assert found.the(logs.OUTCOME)["profiles"]["tuned"] == PROFILES // 2
    assert not found.warned
    assert scene.start(toy).outcome is Outcome.WARM


def test_f02_every_cold_start_also_starts_warm_in_the_same_directory(scene: Scene) -> None:
    cold = scene.start()
    began = time.monotonic()
    warm = scene.start()
    assert time.monotonic() - began < 10
    assert (cold.outcome, warm.outcome) == (Outcome.COLD, Outcome.WARM)
    assert [one.the(logs.PLAN)["action"] for one in (cold, warm)] == ["cold", "warm"]
    assert not warm.warned


def test_f03_ranks_that_hold_other_keys_end_with_all_of_them(scene: Scene) -> None:
    scene.start(
        lambda rank: Toy(ops=("gemm", "moe") if rank == 0 else ("gemm",)), each=own_disk(scene)
    )
    scene.start(each=own_disk(scene), world=1)
    rank_1 = scene.place / "disk1"
    shutil.rmtree(rank_1)
    scene.start(
        lambda _rank: Toy(ops=("gemm",)), each=lambda _: {"autotune_cache_dir": rank_1}, world=1
    )
    found = scene.start(each=own_disk(scene))
    assert {report.plan.action for report in found.reports} == {Action.WARM}
    assert found.serve_alike()
    assert [rank.loaded for rank in found.ranks] == [PROFILES, PROFILES]
    assert "brought together with what the others have" in found.the(logs.PLAN)["why"]
    contents = {path.read_text().count('"Alpha"') for path in scene.paths(scene.place)}
    assert len(contents) == 1, "A and B are on both disks"


def test_f04_stages_with_other_ops_are_tuned_each_by_itself(scene: Scene) -> None:
    scene.world, scene.groups = 4, lambda rank: f"pp{rank // 2}"

    def toy(rank: int) -> Toy:
        return Toy(ops=("gemm", "moe", "head") if rank > 1 else ("gemm", "moe"))

    for outcome in (Outcome.COLD, Outcome.WARM):
        found = scene.start(toy)
        assert found.outcome is outcome
        plans = found.said(logs.PLAN)
        assert {(one["group"], one["rank"]) for one in plans} == {("pp0", 0), ("pp1", 2)}
        sizes = [rank.loaded + rank.tuned for report in found.reports for rank in report.ranks]
        assert sorted(set(sizes)) == [PROFILES, PROFILES + PROFILES // 2]
    assert [path.name for path in scene.paths()] == ["pp0.json", "pp1.json"]


def test_f05_a_table_travels_and_a_slow_rank_is_named_while_others_wait(scene: Scene) -> None:
    scene.start(each=own_disk(scene), world=1)
    slow = lambda rank: Toy(between=lambda _op: time.sleep(1.2 * rank))  # noqa: E731
    found = scene.start(slow, each=own_disk(scene), autotune_heartbeat_s=0.2)
    assert found.outcome is Outcome.WARM
    assert [rank.loaded for rank in found.ranks] == [PROFILES, PROFILES]
    assert len(scene.paths(scene.place)) == 2
    waiting = found.said(logs.WAITING)
    assert [1] in [one["ranks"] for one in waiting]
    assert {one["rank"] for one in waiting} == {0}
    assert any("run" in one["doing"].get("1", "") for one in waiting), waiting


def test_f06_timing_noise_ends_with_one_tactic_on_all_ranks(scene: Scene, costs: Costs) -> None:
    costs.by = lambda rank, name, tactic: abs(tactic - rank) + len(name)
    found = scene.start()
    assert found.serve_alike()
    assert {tactic for _, tactic in found.served[1].values()} == {0}, "rank 0's"
    assert found.the(logs.OUTCOME)["digest"] == found.ranks[0].digest[:16]
    assert not found.warned
    assert scene.start().serve_alike()


def test_f07_skip_ops_on_one_rank_are_found_in_the_vote(scene: Scene) -> None:
    found = scene.start(each=lambda rank: {"autotune_skip_ops": [] if rank else ["moe"]})
    assert found.outcome is Outcome.UNCACHED
    plan = found.the(logs.PLAN)
    assert (plan["level"], plan["reason"]) == ("WARNING", "RANKS_DISAGREE")
    assert plan["why"] == 'autotune_skip_ops differs: ["moe"] (rank 0), [] (rank 1)'
    assert not scene.paths()


@pytest.mark.parametrize("flag", ["on", "off"])
def test_f08_a_rank_that_is_done_at_once_meets_the_slow_one_before_the_next_collective(
    flag: str, scene: Scene
) -> None:
    scene.start(persistent_cache=flag)
    barrier, left = threading.Barrier(2), []

    def collective(_ranks: Ranks) -> None:
        left.append(time.monotonic())
        barrier.wait(timeout=1)  # less than the slow rank takes longer

    slow = lambda rank: Toy(after=lambda: time.sleep(3.5 * rank))  # noqa: E731
    found = scene.start(slow, then=collective, persistent_cache=flag)
    assert not found.errors
    assert abs(left[0] - left[1]) < 1
    assert not found.warned


@pytest.mark.parametrize("flag", ["on", "off"])
def test_f09_a_rank_that_dies_inside_tuning_is_named_within_seconds(
    flag: str, tmp_path: Path
) -> None:
    crew = Crew(2, tmp_path, {"autotune_timeout_s": 3}, limit=25)
    peer, victim = crew.start(flag, fault=Fault(1, "down", "die"))
    assert victim.exit_code == 139
    assert peer.exit_code in (4, 5)
    assert "rank 1" in f"{peer.result.get('message')}{peer.log}"
    assert peer.seconds < 20
    assert not list(tmp_path.rglob("*.tmp"))


def test_f10_the_flag_on_rank_0_only_is_per_rank_on_all(scene: Scene) -> None:
    found = scene.start(each=lambda rank: {"persistent_cache": "off" if rank else "on"})
    assert found.outcome is Outcome.UNCACHED
    assert {report.decision.reason for report in found.reports} == {Reason.RANKS_DISAGREE}
    plan = found.the(logs.PLAN)
    assert plan["level"] == "WARNING"
    assert plan["why"] == (
        "strategy differs: leader_worker (OPERATOR_ON) (rank 0), per_rank (OPERATOR_OFF) (rank 1)"
    )


def test_f11_what_one_ranks_flashinfer_lacks_all_do_without(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, settled = Tuner.lacking, []

    def lacking(tuner: Tuner) -> dict[str, str]:
        return real(tuner) | ({"settle": "an older one"} if this_thread.rank == 1 else {})

    monkeypatch.setattr(Tuner, "lacking", lacking)
    monkeypatch.setattr(Tuner, "settle", lambda *_: settled.append(this_thread.rank))
    found = scene.start()
    assert (found.outcome, settled) == (Outcome.COLD, [])
    without = found.the(logs.WITHOUT)
    assert (without["feature"], without["why"]) == ("settle", "an older one (rank 1)")
    assert without["level"] == "WARNING"


def test_f12_ranks_with_disjoint_keys_are_kept_merged_and_warm(scene: Scene) -> None:
    def expert(rank: int) -> Toy:
        return Toy(ops=(f"moe/expert{rank}",))

    cold, warm = scene.start(expert), scene.start(expert)
    assert (cold.outcome, warm.outcome) == (Outcome.COLD, Outcome.WARM)
    assert len(scene.table().entries) == PROFILES
    assert [rank.tuned for rank in warm.ranks] == [0, 0]
    for found in (cold, warm):
        assert len({rank.digest for rank in found.ranks}) == 1
    assert warm.the(logs.PLAN)["why"] == "rank 0's table of 6 entries"
    assert not scene.aside()
