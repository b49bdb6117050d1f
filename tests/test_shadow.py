"""Shadow: serve as off, hold the stored table against what was tuned, and refresh it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flashinfer.autotuner import AutoTuner
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fi_flags import logs, shadow
from fi_flags.cli import app
from fi_flags.decision import Reason
from fi_flags.errors import WorkloadError
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome, Report
from fi_flags.settings import FlashInferSettings
from fi_flags.shadow import Comparison, Timed, compare, history, history_path, remember, summary
from fi_flags.store import Store
from fi_flags.table import parse, spelt
from fi_flags.tuner import Tuner
from fi_flags.warmup import warm_up
from tests.toy import Crowd, Toy, fresh_tuner, own_tuners, this_thread

PROFILES = 6  # of a toy: two ops, three buckets
best: dict[str, int] = {}  # the tactic that is the fastest now


@pytest.fixture(autouse=True)
def tuners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    best["all"] = 1
    cost: Callable[[int, str, Any], float] = lambda rank, name, tactic: (  # noqa: E731
        abs(float(tactic) - best.get(str(rank), best["all"])) + (name == "Beta")
    )
    with own_tuners(monkeypatch, cost):
        yield
    best.clear()


def start(
    tmp_path: Path, world: int = 2, toy: Callable[[int], Toy] = lambda _: Toy(), **given: Any
) -> tuple[list[Report], list[dict[Any, Any]]]:
    def work(ranks: Ranks) -> tuple[Report, dict[Any, Any]]:
        fresh_tuner()
        mine = toy(ranks.rank)
        asked: dict[str, Any] = {"persistent_cache": "shadow"} | given
        settings = FlashInferSettings(autotune_cache_dir=tmp_path / "tables", **asked)
        return warm_up(mine, ranks=ranks, settings=settings), mine.serving()

    done = Crowd(world).all(work)
    return [report for report, _ in done], [served for _, served in done]


def table(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "tables").rglob("*.json")
    return path


def found(reports: list[Report]) -> Comparison:
    (one,) = {report.shadow for report in reports}
    assert one is not None
    return one


def test_the_first_start_has_nothing_to_compare_with_and_writes_a_table(tmp_path: Path) -> None:
    reports, _ = start(tmp_path)
    assert {report.outcome for report in reports} == {Outcome.UNCACHED}
    assert reports[0].shadow is None
    assert reports[0].decision.reason is Reason.SHADOW
    assert "there is no usable table to compare with: absent (ranks 0, 1)" in reports[0].plan.why
    assert len(parse(table(tmp_path).read_bytes()).entries) == PROFILES
    assert not history_path(table(tmp_path)).exists()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_is_tuned_as_before_agrees(world: int, tmp_path: Path) -> None:
    for _ in range(3):
        reports, _ = start(tmp_path, world)
    one = found(reports)
    assert (one.compared, one.equal, one.different, one.missing) == (
        PROFILES * world, PROFILES * world, 0, 0,
    )  # fmt: skip
    assert one.agreed
    assert summary(table(tmp_path)) == {
        "starts": 2, "agreed": 2, "compared": 2 * PROFILES * world, "equal": 2 * PROFILES * world,
        "different": 0, "slower": 0, "missing": 0, "last": history(table(tmp_path))[-1],
    }  # fmt: skip


def test_another_tactic_is_different_is_served_and_refreshes_the_table(tmp_path: Path) -> None:
    start(tmp_path)
    best["all"] = 2
    reports, served = start(tmp_path)
    one = found(reports)
    assert (one.equal, one.different, one.missing, one.agreed) == (0, 2 * PROFILES, 0, False)
    assert {tactic for calls in served for _, tactic in calls.values()} == {2}, "as off serves"
    entries = parse(table(tmp_path).read_bytes()).entries
    assert {entry[1] for entry in entries.values()} == {2}
    assert found(start(tmp_path)[0]).agreed


def test_a_new_op_is_missing_and_what_no_longer_runs_stays_in_the_table(tmp_path: Path) -> None:
    class Renamed(Toy):  # the same workload to its identity
        pass

    start(tmp_path)
    reports, _ = start(tmp_path, toy=lambda _: Renamed(ops=("gemm", "attention")))
    one = found(reports)
    assert (one.equal, one.different, one.missing) == (PROFILES, 0, PROFILES)
    assert len(parse(table(tmp_path).read_bytes()).entries) == PROFILES + PROFILES // 2


def test_ranks_serve_what_each_tuned_and_the_table_has_the_leaders(tmp_path: Path) -> None:
    best["1"] = 0
    reports, served = start(tmp_path)
    assert {tactic for _, tactic in served[0].values()} == {1}
    assert {tactic for _, tactic in served[1].values()} == {0}
    entries = parse(table(tmp_path).read_bytes()).entries
    assert {entry[1] for entry in entries.values()} == {1}
    assert len({rank.digest for rank in reports[0].ranks}) == 2


def test_what_shadow_wrote_a_start_with_the_flag_on_loads(tmp_path: Path) -> None:
    _, served = start(tmp_path)
    reports, warm = start(tmp_path, persistent_cache="on")
    assert {report.outcome for report in reports} == {Outcome.WARM}
    assert warm == served


def test_shadow_serves_what_off_serves_and_leaves_the_tuner_as_off_does(tmp_path: Path) -> None:
    def held(flag: str) -> list[Any]:
        def work(ranks: Ranks) -> Any:
            tuner = fresh_tuner()
            settings = FlashInferSettings(
                persistent_cache=flag, autotune_cache_dir=tmp_path / "tables"
            )
            # Two runners of one class that differ in an attribute: a file mixes them up.
            warm_up(Toy(ops=("gemm", "gemm/x", "moe/broken")), ranks=ranks, settings=settings)
            kept = ("profiling_cache", "_file_configs", "_dirty", "_namespaced_records")
            return {name: repr(getattr(tuner, name, None)) for name in kept}

        return Crowd(2).all(work)

    off = held("off")
    assert [held("shadow") for _ in range(2)] == [off, off]


def test_seconds_that_loading_would_have_saved_are_those_of_tuning(tmp_path: Path) -> None:
    start(tmp_path)
    one = found(start(tmp_path)[0])
    assert 0 <= one.saved_seconds < 5
    timed = [Timed(["a", "b"], 2.0, {}), Timed(["b"], 1.0, {}), Timed(["c"], 4.0, {})]
    assert compare({"a": ["A", 1]}, {"b": ["B", 1]}, timed).saved_seconds == 3.0


# -- where it may not write, or cannot ------------------------------------------------------


def test_read_only_compares_and_changes_nothing_on_the_disk(tmp_path: Path) -> None:
    start(tmp_path)

    def disk() -> list[tuple[str, int, int]]:
        paths = [tmp_path, *sorted(tmp_path.rglob("*"))]
        return [(str(p), p.stat().st_ino, p.stat().st_mtime_ns) for p in paths]

    before = disk()
    best["all"] = 2
    reports, _ = start(tmp_path, autotune_cache_access="ro")
    assert found(reports).different == 2 * PROFILES
    assert reports[0].table is None
    assert disk() == before


def test_write_only_reads_nothing_and_refreshes(tmp_path: Path) -> None:
    start(tmp_path)
    best["all"] = 2
    reports, _ = start(tmp_path, autotune_cache_access="wo")
    assert reports[0].shadow is None
    entries = parse(table(tmp_path).read_bytes()).entries
    assert {entry[1] for entry in entries.values()} == {2}


@pytest.mark.parametrize("what", ["table", "history"])
def test_a_disk_that_refuses_costs_one_warning(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, world=1)
    best["all"] = 2
    caplog.clear()
    real = os.replace

    def refuse(source: str, target: Path) -> None:
        if Path(target).name == ("world.json" if what == "table" else "world.shadow"):
            raise OSError(30, "Read-only file system")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    reports, _ = start(tmp_path, world=1)
    assert found(reports).different == PROFILES
    warned = [r.__dict__["fi_flags"] for r in caplog.records if r.levelno >= logging.WARNING]
    assert [one["event"] for one in warned] == [logs.NOT_KEPT]
    assert "Read-only file system" in warned[0]["why"]
    suffix = ".json" if what == "table" else ".shadow"
    assert warned[0]["path"].endswith(suffix)


def test_a_bad_table_is_set_aside_and_replaced(tmp_path: Path) -> None:
    start(tmp_path)
    table(tmp_path).write_text("{")
    reports, _ = start(tmp_path)
    assert reports[0].shadow is None
    assert len(Store(table(tmp_path)).quarantined()) == 1
    assert found(start(tmp_path)[0]).agreed


def test_a_rank_that_cannot_say_what_it_serves_costs_the_refresh_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path)
    before = table(tmp_path).read_bytes()
    best["all"] = 2
    real = Tuner.export

    def export(tuner: Tuner, *args: Any) -> Any:
        if this_thread.rank == 1:
            raise OSError("no space left for its scratch file")
        return real(tuner, *args)

    monkeypatch.setattr(Tuner, "export", export)
    reports, _ = start(tmp_path)
    assert {report.outcome for report in reports} == {Outcome.UNCACHED}
    assert found(reports).compared == PROFILES, "rank 0's"
    assert table(tmp_path).read_bytes() == before
    warned = [r.__dict__["fi_flags"] for r in caplog.records if r.levelno >= logging.WARNING]
    assert [(one["event"], one["rank"]) for one in warned] == [(logs.NOT_KEPT, 0)]
    assert "rank 1: OSError: no space left" in warned[0]["why"]


def test_a_workload_that_fails_fails_as_with_the_flag_off(tmp_path: Path) -> None:
    def boom(_op: str) -> None:
        raise ValueError("no such op")

    start(tmp_path)
    before = table(tmp_path).read_bytes()
    with pytest.raises(AssertionError) as raised:
        start(tmp_path, toy=lambda rank: Toy(between=boom) if rank else Toy())
    assert isinstance(raised.value.__cause__, WorkloadError)
    assert table(tmp_path).read_bytes() == before
    assert not history_path(table(tmp_path)).exists()


def test_ranks_in_other_modes_compare_nothing(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Report:
        fresh_tuner()
        flag = "off" if ranks.rank else "shadow"
        settings = FlashInferSettings(persistent_cache=flag, autotune_cache_dir=tmp_path / "tables")
        return warm_up(Toy(), ranks=ranks, settings=settings)

    reports = Crowd(2).all(work)
    assert {report.outcome for report in reports} == {Outcome.UNCACHED}
    assert "nothing is compared, since reason differs: SHADOW (rank 0), OPERATOR_OFF (rank 1)" in (
        reports[0].plan.why
    )
    assert not (tmp_path / "tables").exists()


def test_a_workload_without_tunable_ops_makes_no_file(tmp_path: Path) -> None:
    for _ in range(2):
        reports, _ = start(tmp_path, toy=lambda _: Toy(ops=()))
        assert reports[0].shadow is None
    assert not list(tmp_path.rglob("*.json"))
    assert not list(tmp_path.rglob("*.shadow"))


def test_a_table_that_lacks_the_whole_workload_is_compared_too(tmp_path: Path) -> None:
    start(tmp_path)
    assert AutoTuner  # the real one
    reports, _ = start(tmp_path, toy=lambda _: Toy(ops=("attention",)))
    assert found(reports).missing == PROFILES


# -- the comparison, and its history --------------------------------------------------------

names = st.sampled_from(["A", "B"])
keys = st.builds(
    lambda op, runner, m: f"('{op}', '{runner}', ({m},), ())", names, names, st.integers(0, 2)
)
entries = st.dictionaries(keys, st.tuples(names, st.integers(0, 2)).map(list), max_size=8)


@given(entries, entries)
def test_every_key_is_equal_different_or_missing(
    tuned: dict[str, list[Any]], stored: dict[str, list[Any]]
) -> None:
    one = compare(tuned, stored, [])
    assert one.equal + one.different + one.missing == one.compared == len(tuned)
    assert min(one.equal, one.different, one.missing) >= 0
    assert compare(tuned, tuned, []).equal == len(tuned)
    assert compare(tuned, {}, []).missing == len(tuned)


@pytest.mark.parametrize(
    ("stored", "slower"),
    [(["Beta", 0], 0), (["Alpha", 2], 0), (["Alpha", [3, []]], 1), (["Beta", 9], 1)],
)
def test_another_tactic_that_is_as_fast_is_different_and_no_disagreement(
    stored: list[Any], slower: int
) -> None:
    names = [f"('op', '{runner}', (1,), ())" for runner in ("Alpha", "Beta")]
    times = {spelt("Alpha", 1): 1.0, spelt("Alpha", 2): 1.04, spelt("Beta", 0): 1.0}
    times[spelt("Alpha", (3, ()))] = 1.06
    there = names[stored[0] == "Beta"]
    found = compare({names[0]: ["Alpha", 1]}, {there: stored}, [Timed(names, 1.0, times)])
    assert (found.different, found.slower, found.agreed) == (1, slower, not slower)


def test_a_start_whose_tactics_are_as_fast_as_the_stored_ones_agrees(tmp_path: Path) -> None:
    start(tmp_path)
    best["all"] = 2  # tactic 1 then takes 1 ms longer than the best, which takes none
    assert found(start(tmp_path)[0]).slower == 2 * PROFILES


def test_another_runner_for_the_same_call_is_different() -> None:
    tuned = {"('op', 'Alpha', (1,), ())": ["Alpha", 1]}
    stored = {"('op', 'Beta', (1,), ())": ["Beta", 1]}
    assert compare(tuned, stored, []).different == 1


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "world.json")


def test_the_history_keeps_the_newest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "_KEPT", 3)
    for number in range(1, 6):
        remember(store, Comparison(number, number), when=str(number))
    assert [one["when"] for one in history(store.path)] == ["3", "4", "5"]


@pytest.mark.parametrize(
    "text",
    ["", "null", "{}", "[1]", '[{"compared": "6"}]', "[" * 5000, '[{"compared": 1, "equal": 1}]'],
)
def test_a_history_that_nobody_of_us_wrote_says_nothing_and_is_begun_anew(
    text: str, store: Store
) -> None:
    history_path(store.path).write_text(text)
    assert history(store.path) == []
    assert summary(store.path) is None
    remember(store, Comparison(6, 6), when="now")
    assert [one["when"] for one in history(store.path)] == ["now"]


def test_a_link_in_the_place_of_a_history_is_not_followed(store: Store, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps([Comparison(1, 1).to_json()]))
    history_path(store.path).symlink_to(secret)
    assert history(store.path) == []
    before = secret.read_bytes()
    remember(store, Comparison(6, 6))
    assert secret.read_bytes() == before


def test_show_says_how_often_it_agreed(tmp_path: Path) -> None:
    for _ in range(3):
        start(tmp_path)
    shown = CliRunner().invoke(app, ["cache", "show", str(table(tmp_path))], env={"COLUMNS": "200"})
    assert (
        "agreed in 2 of 2 starts; 24 of 24 keys were equal, 0 different, "
        "0 of them slower, 0 missing" in (shown.stdout)
    )
    done = CliRunner().invoke(app, ["cache", "show", str(table(tmp_path)), "--json"])
    assert json.loads(done.stdout)["table"]["shadow"]["agreed"] == 2


def test_pruning_a_table_takes_its_history_along(tmp_path: Path) -> None:
    for _ in range(2):
        start(tmp_path)
    options = ["cache", "prune", "--older-than", "0", "--yes", "--json"]
    env = {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(tmp_path / "tables")}
    assert CliRunner().invoke(app, options, env=env).exit_code == 0
    assert not list(tmp_path.rglob("*.shadow"))


def test_a_report_in_shadow_says_what_was_found(tmp_path: Path) -> None:
    start(tmp_path)
    best["all"] = 2
    reports, _ = start(tmp_path)
    document = reports[0].to_json()
    assert document["shadow"]["agreed"] is False
    assert set(document["shadow"]) == {
        "compared", "equal", "different", "slower", "missing", "saved_seconds", "agreed",
    }  # fmt: skip
    assert "shadow" not in start(tmp_path, persistent_cache="on")[0][0].to_json()
