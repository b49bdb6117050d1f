"""F33 to F36: what trying FlashInfer's releases brought to light."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flashinfer.autotuner import autotune

from fi_flags import logs
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome
from tests.distributed.crew import Crew, Fault
from tests.faults.conftest import Costs
from tests.faults.scene import PROFILES, Scene
from tests.toy import Toy


@pytest.mark.parametrize("access", ["rw", "ro"])
def test_f33_loaded_tactics_outlive_somebodys_later_autotune(access: str, scene: Scene) -> None:
    cold = scene.start()

    def other_pass(ranks: Ranks) -> None:
        with autotune(False, cache=str(scene.place / f"other{ranks.rank}.bin")):
            pass

    warm = scene.start(then=other_pass, autotune_cache_access=access)
    assert warm.outcome is Outcome.WARM
    assert warm.served == cold.served
    assert all(tactic != -1 for _, tactic in warm.served[0].values())
    assert warm.the(logs.OUTCOME)["profiles"]["missing"] == 0


def test_f34_ranks_that_chose_other_runners_serve_one(scene: Scene, costs: Costs) -> None:
    costs.by = lambda rank, name, tactic: tactic + 9 * (name == ("Beta" if rank == 0 else "Alpha"))
    found = scene.start()
    assert found.serve_alike()
    assert {runner for runner, _ in found.served[1].values()} == {"Alpha"}, "rank 0's"
    assert all('"Beta"' not in path.read_text() for path in scene.paths())
    assert found.the(logs.OUTCOME)["digest"] == found.ranks[1].digest[:16]
    warm = scene.start()
    assert (warm.outcome, warm.served) == (Outcome.WARM, found.served)


@pytest.mark.parametrize("flag", ["on", "off"])
def test_f35_a_rank_that_raises_while_its_peer_is_in_the_models_all_reduce(
    flag: str, tmp_path: Path
) -> None:
    crew = Crew(2, tmp_path, {"autotune_timeout_s": 5}, limit=25)
    peer, victim = crew.start(flag, fault=Fault(1, "down", "raise"))
    assert peer.exit_code in (4, 5)
    assert peer.seconds < 20
    said = f"{peer.result}{peer.log}"
    assert "rank 1" in said
    assert "boom" in said
    assert logs.PEER_FAILED in peer.log
    assert "boom" in victim.result["message"]


def test_f36_a_call_whose_every_tactic_fails_is_recorded_and_not_tried_again(scene: Scene) -> None:
    def toy(_rank: int) -> Toy:
        return Toy(ops=("gemm", "moe/broken"))

    cold = scene.start(toy)
    counts: dict[str, Any] = cold.the(logs.OUTCOME)["profiles"]
    assert (counts["tuned"], counts["failed"]) == (PROFILES, PROFILES)
    warm = scene.start(toy)
    assert warm.outcome is Outcome.WARM
    assert warm.the(logs.OUTCOME)["profiles"] == {
        "loaded": 2 * PROFILES, "tuned": 0, "missing": 0, "failed": 0,
    }  # fmt: skip
    broken = {tactic for (op, _), (_, tactic) in warm.served[0].items() if op == "moe/broken"}
    assert broken == {-1}, "FlashInfer's default"
    assert not warm.warned


def test_f36_a_rank_for_which_a_tactic_works_answers_for_one_for_which_none_did(
    scene: Scene, costs: Costs
) -> None:
    def fails_on(rank: int) -> None:
        def cost(here: int, name: str, tactic: Any) -> float:
            if here == rank:
                raise RuntimeError("cudaErrorLaunchFailure")
            return len(name) + float(tactic)

        costs.by = cost

    fails_on(0)
    first = scene.start()
    assert {tactic for _, tactic in first.served[0].values()} == {0}, "rank 1's"
    assert first.serve_alike()
    before = scene.table().entries
    fails_on(0)
    scene.start(autotune_cache_access="wo", world=1)
    assert scene.table().entries == before, "what works is not given up for what failed once"


@pytest.mark.parametrize("text", ["CUDA out of memory", "cudaMalloc failed: out of memory"])
def test_f36_memory_that_ran_out_says_nothing_of_a_tactic_whoever_says_it(
    text: str, scene: Scene, costs: Costs
) -> None:
    def cost(_rank: int, _name: str, _tactic: Any) -> float:
        raise RuntimeError(text)

    costs.by = cost
    scene.start()
    assert not scene.paths()
