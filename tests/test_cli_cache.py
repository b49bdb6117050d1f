"""`fi-flags cache` as an operator runs it: what is there, and is it sound."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fi_flags.cli import app
from fi_flags.store import Store
from fi_flags.table import Table, parse
from fi_flags.trial import Trial

REAL = sorted((Path(__file__).parent / "data").glob("*.json"))
WHERE = "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A cache directory with a real table of each of two releases."""
    cache_dir = tmp_path / "cache"
    for path in REAL:
        table = parse(path.read_bytes())
        release = table.stamps["flashinfer_version"]
        store = Store.at(cache_dir, f"{release}-NVIDIA_H200-abc", "llama-def", "world")
        about = {"written": "2026-12-01T10:00:00+00:00", "cold_seconds": 170.25, "host": "node7"}
        store.publish(Table(table.entries, table.stamps, about))
    return cache_dir


def run(place: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments], env={WHERE: str(place)})


def shown(place: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    result = run(place, *arguments, "--json")
    assert result.exit_code == code, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.json"))


def test_tables_are_listed_with_what_they_hold(place: Path) -> None:
    document = shown(place, "list")
    assert document["cache_dir"] == str(place)
    older, newer = document["tables"]
    assert older["environment"].startswith("0.6.18")
    assert newer["environment"].startswith("0.7.4")
    for row, path in zip((older, newer), files(place), strict=True):
        assert row["status"] == "ok"
        assert row["path"] == str(path)
        assert (row["workload"], row["group"]) == ("llama-def", "world")
        assert row["entries"] == len(parse(path.read_bytes()).entries)
        assert row["bytes"] == path.stat().st_size
        assert row["cold_seconds"] == 170.25
        assert (row["on_trial"], row["quarantined"]) == (False, [])


def test_a_person_sees_each_path_on_a_line_of_its_own(place: Path) -> None:
    result = run(place, "list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[::2] == [str(path) for path in files(place)]
    for line in lines[1::2]:
        assert line.startswith("  ok, ")
        assert "tuned in 170.2 s, written 2026-12-01" in line


def test_a_directory_that_is_not_there_has_no_tables_and_is_not_made(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert shown(nowhere, "list")["tables"] == []
    assert f"no tables under {nowhere}" in run(nowhere, "list").stdout
    assert not nowhere.exists()


def test_a_check_of_a_directory_that_is_not_there_is_no_success(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    result = run(nowhere, "verify")
    assert (result.exit_code, f"there is no directory {nowhere}" in result.stderr) == (3, True)
    nowhere.mkdir()
    assert shown(nowhere, "verify")["tables"] == []


def test_where_nobody_can_be_asked_nothing_is_removed_and_that_is_said(place: Path) -> None:
    before = files(place)
    result = run(place, "prune", "--older-than", "0")
    assert (result.exit_code, "give --yes" in result.stderr) == (2, True)
    quiet = run(place, "prune", "--older-than", "0", "--json")
    assert (quiet.exit_code, "nothing was removed: give --yes" in quiet.stderr) == (0, True)
    assert files(place) == before


def test_looking_changes_nothing(place: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in place.rglob("*")}

    before = state()
    run(place, "list")
    run(place, "show", str(files(place)[0]))
    run(place, "verify")
    assert state() == before


def test_a_table_is_shown_with_stamps_and_ops(place: Path) -> None:
    path = files(place)[1]
    table = shown(place, "show", str(path))["table"]
    assert table["stamps"]["flashinfer_version"] == "0.7.4"
    assert table["about"]["host"] == "node7"
    assert sum(table["ops"].values()) == table["entries"]
    text = run(place, "show", str(path)).stdout
    assert "node7" in text
    for op in table["ops"]:
        assert op in text


def test_a_table_set_aside_and_one_on_trial_are_told(place: Path) -> None:
    first, second = files(place)
    Store(first).quarantine("starts_died")
    trial = Trial(Store(second))
    trial.begin("d")
    older, newer = shown(place, "list")["tables"]
    assert older["status"] == "absent"
    assert [name.rpartition("-")[2] for name in older["quarantined"]] == ["starts_died"]
    assert newer["on_trial"]
    assert "on trial" in run(place, "list").stdout
    assert "died on it" in run(place, "show", str(second)).stdout
    assert "starts_died" in run(place, "show", str(first)).stdout
    trial.end()
    assert [row["path"] for row in shown(place, "verify")["tables"]] == [str(second)]


@pytest.mark.parametrize("damage", ["cut", "link", "directory"])
def test_a_table_that_is_not_sound_fails_verification_by_name(place: Path, damage: str) -> None:
    path = files(place)[0]
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-9])
    elif damage == "link":
        path.symlink_to(os.devnull)
    else:
        path.mkdir()
    bad, good = shown(place, "verify", code=3)["tables"]
    assert bad["path"] == str(path)
    assert bad["status"] in ("suspect", "unreadable")
    assert bad["why"]
    assert good["status"] == "ok"
    assert shown(place, "verify", good["path"])["tables"] == [good]
    assert run(place, "verify", str(path)).exit_code == 3


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_file_that_is_not_there_is_an_error_that_names_it(command: str, place: Path) -> None:
    error = shown(place, command, "nothing.json", code=3)["error"]
    assert "nothing.json" in error["message"]
    assert "cache list" in error["hint"]


# prune


def age(path: Path, days: float) -> None:
    when = time.time() - days * 86400
    os.utime(path, (when, when))


def chosen(document: dict[str, Any]) -> list[Path]:
    return [Path(one["path"]) for one in document["chosen"]]


def test_prune_tells_what_it_would_remove_and_removes_it_when_told(place: Path) -> None:
    old, new = files(place)
    document = shown(place, "prune", "--flashinfer", "<0.7")
    assert chosen(document) == [old]
    assert (document["removed"], document["kept"]) == ([], {})
    assert files(place) == [old, new]
    document = shown(place, "prune", "--flashinfer", "<0.7", "--yes")
    assert document["removed"] == [str(old)]
    assert files(place) == [new]


@pytest.mark.parametrize(("answer", "left"), [("n\n", 2), ("y\n", 1), ("", 2)])
def test_prune_prints_its_plan_and_asks(place: Path, answer: str, left: int) -> None:
    _, newer = files(place)
    result = CliRunner().invoke(
        app, ["cache", "prune", "--flashinfer", "0.7.4"], env={WHERE: str(place)}, input=answer
    )
    assert result.stdout.splitlines()[0] == str(newer)
    assert "Remove them?" in result.stdout
    assert len(files(place)) == left


def test_prune_by_age_and_by_what_was_set_aside(place: Path) -> None:
    old, new = files(place)
    aside = Store(new).quarantine("starts_died")
    assert aside is not None
    age(old, 40)
    age(aside, 20)
    assert chosen(shown(place, "prune", "--older-than", "30")) == [old]
    assert chosen(shown(place, "prune", "--older-than", "10")) == [old, aside]
    assert chosen(shown(place, "prune", "--quarantined")) == [aside]
    assert chosen(shown(place, "prune", "--quarantined", "--older-than", "30")) == []
    assert chosen(shown(place, "prune", "--quarantined", "--flashinfer", "<0.7")) == []
    assert "nothing to remove" in run(place, "prune", "--older-than", "99").stdout
    assert shown(place, "prune", "--quarantined", "--yes")["removed"] == [str(aside)]
    assert old.exists()


def test_a_table_that_cannot_be_read_counts_by_the_version_in_its_directory(place: Path) -> None:
    old, _ = files(place)
    old.write_bytes(b"{")
    assert chosen(shown(place, "prune", "--flashinfer", "<0.7")) == [old]


def test_prune_without_a_criterion_or_with_a_bad_one_is_refused(place: Path) -> None:
    assert "--older-than" in shown(place, "prune", code=2)["error"]["hint"]
    error = shown(place, "prune", "--flashinfer", "newest", code=2)["error"]
    assert (error["fields"]["name"], error["fields"]["value"]) == ("--flashinfer", "newest")
    assert "<0.7" in error["hint"]
    assert len(files(place)) == 2


def test_what_cannot_be_removed_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    document = shown(place, "prune", "--flashinfer", "<0.7", "--yes", code=3)
    assert document["removed"] == []
    (why,) = document["kept"].values()
    assert "Permission denied" in why
