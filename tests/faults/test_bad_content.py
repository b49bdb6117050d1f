"""F13 to F21: tables that should not be trusted, and what makes one incomplete."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flashinfer.autotuner import autotuner

from fi_flags import logs
from fi_flags.decision import Reason
from fi_flags.facts import gather_facts
from fi_flags.report import Outcome
from fi_flags.store import Store, environment_name
from fi_flags.table import Table, parse
from tests.faults.scene import PROFILES, Scene
from tests.toy import Toy, this_thread

ISSUE = "https://github.com/flashinfer-ai/flashinfer/issues/3363"
REAL = sorted((Path(__file__).parents[1] / "data").glob("*.json"))


def test_f13_a_release_that_mixes_calls_up_closes_the_gate(scene: Scene) -> None:
    older = dataclasses.replace(gather_facts(), flashinfer="0.6.12")
    found = scene.start(facts=older)
    assert found.outcome is Outcome.UNCACHED
    assert found.reports[0].decision.reason is Reason.GATE_CLOSED
    decision = found.the(logs.DECISION)
    assert (decision["level"], decision["todo"]) == ("WARNING", [ISSUE])
    assert not scene.tables.exists()


def test_f13_calls_that_differ_in_extras_only_both_survive_a_save_and_a_load(scene: Scene) -> None:
    def toy(_rank: int) -> Toy:
        return Toy(ops=("gemm/layout_a", "gemm/layout_b"))

    scene.start(toy)
    found = scene.start(toy)
    assert found.outcome is Outcome.WARM
    assert found.the(logs.OUTCOME)["profiles"]["loaded"] == 2 * PROFILES
    assert len(scene.table().entries) == PROFILES


def test_f14_a_tactic_that_one_rank_rejects_in_the_first_run_costs_one_tuning(scene: Scene) -> None:
    scene.start()

    def toy(rank: int) -> Toy:
        this_thread.runs = 0

        def reject(_op: str) -> None:
            this_thread.runs += 1
            if rank == 1 and this_thread.runs == 1:
                raise RuntimeError("Invalid sf layout in run")

        return Toy(between=reject)

    found = scene.start(toy)
    assert found.outcome is Outcome.RETUNED
    assert found.serve_alike()
    (aside,) = scene.aside()
    assert aside.name.endswith("-failed_run")
    assert found.warned == [logs.QUARANTINED, logs.RETUNING]
    assert found.the(logs.QUARANTINED)["moved_to"] == str(aside)
    why = found.the(logs.RETUNING)["why"]
    assert "rank 1 (host1): RuntimeError: Invalid sf layout in run" in why
    assert str(scene.path) in why
    assert scene.start().outcome is Outcome.WARM


def test_f15_skipping_an_op_drops_its_stored_entries_too_and_loses_none(scene: Scene) -> None:
    scene.start()
    before = scene.path.read_bytes()
    found = scene.start(autotune_skip_ops=["moe"])
    assert found.outcome is Outcome.WARM
    moe = {tactic for (op, _), (_, tactic) in found.served[1].items() if op == "moe"}
    assert moe == {-1}, "FlashInfer's default"
    assert scene.path.read_bytes() == before
    assert found.the(logs.OUTCOME)["profiles"]["loaded"] == PROFILES // 2 * 2


def test_f15_an_op_can_be_gated_by_version_and_device(scene: Scene) -> None:
    scene.start()
    gates = scene.place / "gates.toml"
    gates.write_text(
        '[[gate]]\nid = "corrupts"\ntitle = "moe corrupts later"\nurl = "https://example.com/7"\n'
        'affected = ">=0.6"\neffect = "skip_ops"\nops = ["moe"]\narchs = ["*"]\n'
    )
    gpu = dataclasses.replace(gather_facts(), gpu="NVIDIA H200", capability=(9, 0))
    found = scene.start(gates_file=gates, facts=gpu)
    assert {tactic for (op, _), (_, tactic) in found.served[0].items() if op == "moe"} == {-1}
    assert "corrupts leaves out moe" in found.the(logs.DECISION)["message"]


def test_f16_a_table_cut_short_is_a_miss_and_never_an_error(scene: Scene) -> None:
    scene.start()
    whole = scene.path.read_bytes()
    for cut in [0, 1, 2, len(whole) // 3, len(whole) // 2, len(whole) - 3]:
        scene.path.write_bytes(whole[:cut])
        found = scene.start()
        assert found.outcome is Outcome.COLD
        assert found.warned == [logs.PLAN, logs.QUARANTINED]
        assert "suspect" in found.the(logs.PLAN)["why"]
        moved = Path(found.the(logs.QUARANTINED)["moved_to"])
        assert moved.read_bytes() == whole[:cut], "nothing is lost"
        assert scene.start().outcome is Outcome.WARM


_KILLED = """
import os, signal, sys
from pathlib import Path
from fi_flags.store import Store
from fi_flags.table import Table
real = os.replace
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Store(Path(sys.argv[1])).publish(Table({"('op', 'A', (1,), ())": ["A", 2]}, {"gpu": "x"}))
"""


def test_f16_a_writer_killed_between_write_and_rename_leaves_the_old_table(tmp_path: Path) -> None:
    store = Store(tmp_path / "world.json")
    entries = {"('op', 'A', (1,), ())": ["A", 1]}
    store.publish(Table(entries, {"gpu": "x"}))
    before = store.path.read_bytes()
    command = [sys.executable, "-c", _KILLED, str(store.path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    assert store.path.read_bytes() == before
    assert len(list(tmp_path.glob(".*.tmp"))) == 1
    store.publish(Table({"('op', 'A', (1,), ())": ["A", 3]}, {"gpu": "x"}))
    assert not list(tmp_path.glob(".*.tmp")), "the next writer clears up"


def test_f17_a_table_of_another_gpu_is_named_field_by_field_and_left_alone(scene: Scene) -> None:
    scene.start()
    theirs = parse(REAL[1].read_bytes())
    scene.path.write_bytes(Table(theirs.entries, theirs.stamps).render())
    before = scene.path.read_bytes()
    for _ in range(2):
        found = scene.start()
        assert found.outcome is Outcome.COLD
        # Each of the two hosts says it of its own disk, which here is one.
        assert found.warned == [logs.PLAN, logs.NOT_KEPT, logs.NOT_KEPT]
        why = found.the(logs.PLAN)["why"]
        assert "gpu is NVIDIA H200 there, unknown here" in why
        assert "cudnn_version is 91900 there, unknown here" in why
        assert str(scene.path) in found.said(logs.NOT_KEPT)[0]["why"]
        assert scene.path.read_bytes() == before
        assert not scene.aside()


def test_f18_a_table_whose_writer_did_not_know_its_cudnn_is_healed_by_the_next_start(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.start()
    real = autotuner._collect_metadata
    known = {**real(), "cudnn_version": "91900"}
    monkeypatch.setattr(autotuner, "_collect_metadata", lambda: dict(known))
    table = scene.table()
    scene.path.unlink()
    place = scene.tables / "v1" / environment_name(known)
    assert scene.start().outcome is Outcome.COLD
    (path,) = scene.paths()
    assert path.parent.parent == place
    path.write_bytes(Table(table.entries, {**known, "cudnn_version": "unknown"}).render())

    healed = scene.start()
    assert healed.outcome is Outcome.COLD
    assert healed.warned == [logs.PLAN, logs.QUARANTINED]
    assert "cudnn_version is unknown there, 91900 here" in healed.the(logs.PLAN)["why"]
    again = scene.start()
    assert (again.outcome, again.warned) == (Outcome.WARM, [])


def test_f19_a_new_op_tunes_that_op_only(scene: Scene) -> None:
    scene.start()
    found = scene.start(lambda _rank: Toy(ops=("gemm", "moe", "new")))
    assert found.outcome is Outcome.TOPPED_UP
    assert found.the(logs.OUTCOME)["profiles"] == {
        "loaded": 2 * PROFILES, "tuned": PROFILES, "missing": 0, "failed": 0,
    }  # fmt: skip
    assert not found.warned
    assert len(scene.table().entries) == PROFILES + PROFILES // 2


def test_f20_profiles_that_ran_out_of_memory_are_counted_and_are_not_complete(scene: Scene) -> None:
    def toy(_rank: int) -> Toy:
        return Toy(ops=("moe/oom",))

    for _ in range(2):
        found = scene.start(toy)
        assert found.the(logs.OUTCOME)["profiles"]["failed"] == PROFILES
        assert found.the(logs.NOT_KEPT)["why"] == "no tactic of any profile worked"
        assert found.warned == [logs.NOT_KEPT]
        assert not scene.paths()


def test_f20_a_table_that_is_kept_does_not_call_them_complete(scene: Scene) -> None:
    def toy(_rank: int) -> Toy:
        return Toy(ops=("gemm", "moe/oom"))

    scene.start(toy)
    found = scene.start(toy)
    counts = found.the(logs.OUTCOME)["profiles"]
    assert (counts["loaded"], counts["failed"]) == (PROFILES, PROFILES)
    assert len(scene.table().entries) == PROFILES // 2


def test_f21_a_model_without_tunable_ops_has_no_file_and_says_so_once(scene: Scene) -> None:
    for _ in range(2):
        found = scene.start(lambda _rank: Toy(ops=()))
        assert found.outcome is Outcome.COLD
        assert found.the(logs.NOTHING_TO_TUNE)["rank"] == 0
        assert not found.warned
        assert not scene.paths()
