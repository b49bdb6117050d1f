"""The trial marker: who lives holds its lock; two deaths in a row condemn; the innocent return."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fi_flags.errors import RanksError
from fi_flags.store import Store
from fi_flags.table import Table
from fi_flags.trial import DEATHS, Trial

ENTRY = {"('op', 'Alpha', ((1, 8),), ())": ["Alpha", 1]}
STAMPS = {"flashinfer_version": "0.7.4", "gpu": "NVIDIA H200"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    place = Store(tmp_path / "tables" / "world.json")
    place.publish(Table(ENTRY, dict(STAMPS)))
    return place


def digest(store: Store) -> str:
    table = store.read(STAMPS).table
    assert table is not None
    return str(table.about["digest"])


def marker(store: Store) -> Path:
    return store.path.with_suffix(".trial")


def die(store: Store, name: str = "") -> int:
    """A start that begins, and then is gone: its lock is free, its marker stays."""
    trial = Trial(store)
    deaths = trial.begin(name or digest(store))
    trial.leave()
    return deaths


def test_a_start_that_lived_leaves_no_marker(store: Store) -> None:
    trial = Trial(store)
    assert trial.begin(digest(store)) == 0
    assert marker(store).exists()
    trial.end()
    assert not marker(store).exists()


def test_deaths_in_a_row_are_counted_until_one_start_lives(store: Store) -> None:
    assert [die(store) for _ in range(3)] == [0, 1, 2]
    trial = Trial(store)
    trial.begin(digest(store))
    trial.end()
    assert die(store) == 0


def test_deaths_on_another_table_do_not_count(store: Store) -> None:
    assert [die(store, "old"), die(store, "old"), die(store)] == [0, 1, 0]


def test_a_marker_whose_lock_is_held_means_nothing(store: Store) -> None:
    for _ in range(DEATHS):
        die(store)
    live = Trial(store)
    assert live.begin(digest(store)) == DEATHS
    beside = Trial(store)
    before = marker(store).read_bytes()
    assert beside.begin(digest(store)) == 0
    beside.end()
    assert marker(store).read_bytes() == before
    live.leave()


def test_a_table_withdrawn_before_it_was_loaded_has_no_death_more(store: Store) -> None:
    die(store)
    trial = Trial(store)
    assert trial.begin(digest(store)) == 1
    trial.withdraw()
    assert die(store) == 1


def test_a_table_comes_back_when_a_start_without_it_dies_too(store: Store) -> None:
    trial, name = Trial(store), digest(store)
    trial.begin(name)
    aside = store.quarantine("starts_died")
    assert aside is not None
    trial.set_aside(aside, tuning=True)
    trial.leave()
    assert Trial(store).recover()
    assert digest(store) == name
    assert not Trial(store).recover()
    assert [die(store) for _ in range(4)] == [0, 0, 0, 0], "it was acquitted"


def test_a_table_set_aside_waits_for_a_start_without_it(store: Store) -> None:
    trial, name = Trial(store), digest(store)
    trial.begin(name)
    aside = store.quarantine("failed_run")
    assert aside is not None
    trial.set_aside(aside, tuning=False)
    trial.leave()
    assert not Trial(store).recover()
    without = Trial(store)
    without.begin_without()
    assert without.aside == aside
    without.leave()
    assert Trial(store).recover()
    assert digest(store) == name


def test_a_start_without_it_that_lives_settles_the_matter(store: Store) -> None:
    trial = Trial(store)
    trial.begin(digest(store))
    aside = store.quarantine("starts_died")
    assert aside is not None
    trial.set_aside(aside, tuning=True)
    trial.end()
    assert not Trial(store).recover()
    assert not store.path.exists()
    assert aside.exists()


def test_a_table_that_was_pruned_meanwhile_is_not_missed(store: Store) -> None:
    trial = Trial(store)
    trial.begin(digest(store))
    aside = store.quarantine("starts_died")
    assert aside is not None
    trial.set_aside(aside, tuning=True)
    trial.leave()
    aside.unlink()
    assert not Trial(store).recover()


def test_a_table_in_the_place_again_is_not_overwritten(store: Store) -> None:
    trial = Trial(store)
    trial.begin(digest(store))
    aside = store.quarantine("starts_died")
    assert aside is not None
    trial.set_aside(aside, tuning=True)
    trial.leave()
    other = {"('other', 'Alpha', ((1, 8),), ())": ["Alpha", 2]}
    store.publish(Table(other, dict(STAMPS)))
    assert not Trial(store).recover()
    table = store.read(STAMPS).table
    assert table is not None
    assert table.entries == other


ODD: list[Any] = [
    b"", b"\xff", b"null", b"[]", b"7", b"{", b"[" * 9000, b"{}",
    b'{"starts": "two"}', b'{"starts": true}', b'{"starts": 2, "more": 1}',
    b'{"starts": 2, "aside": "../../other.json", "digest": "", "acquitted": false}',
    b'{"starts": 1e999}', b"x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("junk", ODD, ids=range(len(ODD)))
def test_a_marker_that_is_not_one_says_nothing(store: Store, junk: bytes) -> None:
    marker(store).write_bytes(junk)
    assert not Trial(store).recover()
    trial = Trial(store)
    assert trial.begin(digest(store)) == 0
    trial.end()
    assert store.read(STAMPS).table is not None


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_what_stands_in_a_markers_place_stops_nothing(store: Store, kind: str) -> None:
    path = marker(store)
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    assert not Trial(store).recover()
    trial = Trial(store)
    assert trial.begin(digest(store)) == 0
    trial.end()


def test_where_no_lock_can_be_made_there_is_no_trial(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trial = Trial(Store(tmp_path / "file" / "world.json"))
    assert not trial.recover()
    trial.begin_without()
    assert trial.begin("d") == 0
    trial.set_aside(tmp_path / "aside", tuning=True)
    trial.withdraw()
    trial.end()
    assert (tmp_path / "file").read_text() == ""


def test_a_plain_cold_start_makes_nothing(tmp_path: Path) -> None:
    trial = Trial(Store(tmp_path / "none" / "world.json"))
    assert not trial.recover()
    trial.begin_without()
    trial.end()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("error", "stays"), [(ValueError, False), (KeyboardInterrupt, False), (RanksError, True)]
)
def test_only_a_lost_rank_counts_as_a_death(
    store: Store, error: type[BaseException], *, stays: bool
) -> None:
    trial = Trial(store)
    trial.begin(digest(store))
    with pytest.raises(error), trial.ending(leaves=RanksError):
        raise error("boom")
    assert marker(store).exists() is stays
    assert die(store) == int(stays), "its lock is free either way"


def test_a_start_that_ends_without_an_error_lived(store: Store) -> None:
    trial = Trial(store)
    with trial.ending(leaves=RanksError):
        trial.begin(digest(store))
    assert not marker(store).exists()


PROCESS = """
import signal, sys, time
from pathlib import Path
from fi_flags.errors import RanksError
from fi_flags.store import Store
from fi_flags.trial import Trial
trial = Trial(Store(Path(sys.argv[1])))
if sys.argv[3] == "chained":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if sys.argv[3] == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with trial.ending(leaves=RanksError):
    print(trial.begin(sys.argv[2]), flush=True)
    time.sleep(60)
"""


def start(store: Store, how: str = "") -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(store.path), digest(store), how],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        return process, int(process.stdout.readline())


@pytest.mark.parametrize(("how", "code"), [("", -signal.SIGTERM), ("chained", 7)])
def test_a_start_that_was_asked_to_stop_did_not_die(store: Store, how: str, code: int) -> None:
    process, _ = start(store, how)
    process.terminate()
    assert process.wait(20) == code
    assert not marker(store).exists()


def test_who_ignores_a_request_to_stop_goes_on(store: Store) -> None:
    process, _ = start(store, "ignored")
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert marker(store).exists()
    process.kill()
    process.wait(20)


def test_killed_processes_are_deaths_and_a_live_one_beside_them_is_none(store: Store) -> None:
    for deaths in (0, 1):
        process, found = start(store)
        assert found == deaths
        process.kill()
        process.wait(20)
    (live, found), (beside, none) = start(store), start(store)
    assert (found, none) == (2, 0)
    for process in (live, beside):
        process.kill()
        process.wait(20)


def test_a_signal_handler_is_put_back_and_threads_touch_none(store: Store) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Trial(store).ending(leaves=RanksError):
        assert signal.getsignal(signal.SIGTERM) is not before
        seen: list[Any] = []

        def other() -> None:
            with Trial(store).ending(leaves=RanksError):
                seen.append(signal.getsignal(signal.SIGTERM))

        thread = threading.Thread(target=other)
        inside = signal.getsignal(signal.SIGTERM)
        thread.start()
        thread.join()
        assert seen == [inside]
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_of_one_start_wait_for_each_others_look(store: Store) -> None:
    """Of many that look at once one brings the table back, and all find it there."""
    trial, name = Trial(store), digest(store)
    trial.begin(name)
    aside = store.quarantine("starts_died")
    assert aside is not None
    trial.set_aside(aside, tuning=True)
    trial.leave()
    gate, found, back = threading.Barrier(8), [], []

    def rank() -> None:
        gate.wait()
        back.append(Trial(store).recover())
        found.append(store.read(STAMPS).status.value)

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(back) == [False] * 7 + [True]
    assert found == ["ok"] * 8


def test_a_marker_is_plain_json(store: Store) -> None:
    trial = Trial(store)
    trial.begin(digest(store))
    assert json.loads(marker(store).read_bytes())["starts"] == 1
    trial.end()
