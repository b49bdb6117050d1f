"""F22 to F26: disks that cannot be written, shared disks, and what access allows."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fi_flags import logs
from fi_flags.errors import TunerError
from fi_flags.report import Outcome
from fi_flags.store import Store
from fi_flags.table import Status, Table
from fi_flags.tuner import Tuner
from tests.faults.scene import PROFILES, Scene
from tests.toy import Toy, this_thread


def test_f22_a_directory_under_a_regular_file_is_warned_about_and_starts(scene: Scene) -> None:
    scene.world = 1
    (scene.place / "file").write_text("")
    for _ in range(2):
        found = scene.start(autotune_cache_dir=scene.place / "file" / "tables")
        assert found.outcome is Outcome.COLD
        assert found.warned == [logs.NOT_KEPT]
        assert str(scene.place / "file") in found.the(logs.NOT_KEPT)["path"]
        assert "nothing can be written to" in found.the(logs.PLAN)["why"], "before the tuning"
    assert (scene.place / "file").read_text() == ""


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EXDEV])
def test_f23_a_mount_that_refuses_is_warned_about_and_all_ranks_start_alike(
    number: int, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def refuse(source: Any, target: Any) -> None:
        if Path(target).name == "world.json":
            raise OSError(number, os.strerror(number))
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    found = scene.start()
    assert found.outcome is Outcome.COLD
    assert found.serve_alike()
    assert set(found.warned) == {logs.NOT_KEPT}
    assert os.strerror(number) in found.said(logs.NOT_KEPT)[0]["why"]
    assert not list(scene.place.rglob("*.tmp"))
    assert not scene.paths()


def test_f23_eight_writers_on_one_path_and_every_read_is_whole(tmp_path: Path) -> None:
    stamps = {"gpu": "x"}
    path = tmp_path / "shared" / "world.json"
    done, seen, bad = threading.Event(), set(), []

    def write(number: int) -> None:
        for turn in range(25):
            key = f"('op', 'A', ({number},), ({turn},))"
            Store(path).publish(Table({key: ["A", number]}, stamps, {"host": f"w{number}"}))

    def read() -> None:
        while not done.is_set():
            found = Store(path).read(stamps)
            seen.add(found.status)
            if found.status not in (Status.OK, Status.ABSENT):
                bad.append(found.why)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    reader.start()
    for one in writers:
        one.start()
    for one in writers:
        one.join(60)
    done.set()
    reader.join(60)
    assert not bad
    assert Status.OK in seen
    table = Store(path).read(stamps).table
    assert table is not None
    assert len(table.entries) == 8 * 25, "nothing that anybody wrote is lost"
    assert [p.name for p in path.parent.iterdir() if p.suffix not in (".json", ".lock")] == []


def test_f24_a_rank_whose_load_is_refused_never_ends_the_start(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.start()
    real = Tuner.load

    def load(tuner: Tuner, *args: Any) -> Any:
        if this_thread.rank == 1:
            raise TunerError("FlashInfer refused the table's environment")
        return real(tuner, *args)

    monkeypatch.setattr(Tuner, "load", load)
    found = scene.start()
    assert found.outcome in (Outcome.COLD, Outcome.UNCACHED)
    assert [rank.tuned for rank in found.ranks] == [PROFILES, PROFILES]
    assert "rank 1 (host1): TunerError: FlashInfer refused" in found.reports[0].plan.why


def test_f25_read_only_changes_no_inode_time_or_directory(scene: Scene) -> None:
    scene.start()
    before = scene.disk()
    found = scene.start(lambda _rank: Toy(ops=("gemm", "moe", "new")), autotune_cache_access="ro")
    assert found.outcome is Outcome.WARM
    counts = found.the(logs.OUTCOME)["profiles"]
    assert (counts["tuned"], counts["missing"]) == (0, PROFILES)
    assert scene.disk() == before
    assert not found.warned


def test_f25_read_only_without_a_table_makes_no_directory_and_says_so(scene: Scene) -> None:
    before = scene.disk()
    found = scene.start(autotune_cache_access="ro")
    assert found.outcome is Outcome.UNTUNED
    assert scene.disk() == before
    assert found.the(logs.OUTCOME)["level"] == "WARNING"
    assert "read-only, and no rank has a usable table" in found.the(logs.PLAN)["why"]


def test_f26_write_only_tunes_although_a_table_is_there_and_keeps_the_result(scene: Scene) -> None:
    scene.start()
    before = scene.path.stat().st_mtime_ns
    table = scene.table()
    scene.path.write_bytes(
        Table({key: [entry[0], 2] for key, entry in table.entries.items()}, table.stamps).render()
    )
    found = scene.start(autotune_cache_access="wo")
    assert found.outcome is Outcome.COLD
    assert [rank.tuned for rank in found.ranks] == [PROFILES, PROFILES]
    assert scene.table().entries == table.entries
    assert scene.path.stat().st_mtime_ns > before
    assert found.the(logs.PLAN)["why"] == "write-only: tuned afresh"
