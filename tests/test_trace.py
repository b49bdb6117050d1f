"""A trace: one file, every rank, what it did and for whom it waited."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fi_flags import logs, trace
from fi_flags.errors import RanksError, WorkloadError
from fi_flags.ranks import Ranks
from fi_flags.report import Report
from fi_flags.settings import FlashInferSettings
from fi_flags.trace import Timeline, render
from fi_flags.warmup import warm_up
from tests.toy import Crowd, Toy, fresh_tuner, own_tuners

WORLD = 3
PROFILES = 6  # of a toy: two ops, three buckets


@pytest.fixture(autouse=True)
def tuners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_tuners(monkeypatch):
        yield


def start(
    tmp_path: Path, crowd: Crowd, toy: Toy, flag: str = "on", writers: tuple[int, ...] = (0,)
) -> list[Report | BaseException]:
    def work(ranks: Ranks) -> Report:
        fresh_tuner()
        wanted: dict[str, Any] = {"autotune_trace": tmp_path / "trace.json"}
        settings = FlashInferSettings(
            persistent_cache=flag,
            autotune_cache_dir=tmp_path / "tables",
            **(wanted if ranks.rank in writers else {}),
        )
        return warm_up(toy, ranks=ranks, settings=settings)

    return crowd.each(work)


def read(tmp_path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    document = json.loads((tmp_path / "trace.json").read_bytes())
    return document, [event for event in document["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("flag", ["on", "off"])
def test_every_rank_is_a_process_with_its_phases_waits_and_profiles(
    flag: str, tmp_path: Path
) -> None:
    start(tmp_path, Crowd(WORLD), Toy(), flag)
    document, spans = read(tmp_path)
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(" (")[0] for name in names] == ["rank 0", "rank 1", "rank 2"]
    for rank in range(WORLD):
        mine = [span for span in spans if span["pid"] == rank]
        phases = [span["name"] for span in mine if span["cat"] == "phase"]
        assert phases[:2] == ["join", "run"]
        assert ("publish" in phases) == (flag == "on")  # each rank is a host of its own
        profiles = [span for span in mine if span["cat"] == "profile"]
        assert Counter(span["name"] for span in profiles) == {"gemm": 3, "moe": 3}
        assert all(span["args"]["tactics"] == 6 for span in profiles)  # two runners, three each
        run = next(span for span in mine if span["name"] == "run")
        assert all(run["ts"] <= p["ts"] <= run["ts"] + run["dur"] for p in profiles)
        assert any(span["cat"] == "wait" for span in mine)
    assert document["otherData"] == {"ended": "done", "spans_left_out": 0}
    assert min(span["ts"] for span in spans) == 0
    assert all(span["dur"] >= 0 for span in spans)


def test_who_waited_for_whom_can_be_seen(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Report:
        fresh_tuner()
        settings = FlashInferSettings(autotune_trace=tmp_path / "trace.json")
        slow = Toy(after=lambda: __import__("time").sleep(0.5)) if ranks.rank == 1 else Toy()
        return warm_up(slow, ranks=ranks, settings=settings)

    Crowd(2).all(work)
    _, spans = read(tmp_path)
    longest = max(
        (s for s in spans if s["pid"] == 0 and s["cat"] == "wait"), key=lambda s: s["dur"]
    )
    assert longest["name"] == "wait for rank 1"
    assert longest["args"] == {"ranks": [1]}
    assert longest["dur"] > 300_000  # microseconds, of the half second that rank 1 takes longer
    run = next(s for s in spans if s["pid"] == 1 and s["name"] == "run")
    assert run["ts"] < longest["ts"] < run["ts"] + run["dur"], "one clock for both ranks"


def test_a_warm_start_shows_no_profile(tmp_path: Path) -> None:
    for _ in range(2):
        start(tmp_path, Crowd(2), Toy())
    _, spans = read(tmp_path)
    assert not [span for span in spans if span["cat"] == "profile"]
    assert [s["name"] for s in spans if s["pid"] == 1 and s["cat"] == "phase"][:3] == [
        "join", "load", "run",
    ]  # fmt: skip


def test_a_start_that_fails_leaves_a_trace_that_says_so(tmp_path: Path) -> None:
    def boom(_op: str) -> None:
        raise ValueError("no such op")

    done = start(tmp_path, Crowd(WORLD), Toy(between=boom))
    assert all(isinstance(error, WorkloadError) for error in done)
    document, spans = read(tmp_path)
    assert {span["pid"] for span in spans} == set(range(WORLD))
    assert document["otherData"]["ended"].startswith("WorkloadError: the workload failed: ")


def test_where_a_rank_is_lost_rank_0_writes_what_it_did_itself(tmp_path: Path) -> None:
    class Leaves(Toy):
        def run(self) -> None:
            raise SystemExit(1)  # not the workload's failure: the rank is gone

    def work(ranks: Ranks) -> Report:
        fresh_tuner()
        settings = FlashInferSettings(autotune_trace=tmp_path / "trace.json")
        return warm_up(Leaves() if ranks.rank == 1 else Toy(), ranks=ranks, settings=settings)

    done = Crowd(2).each(work)
    assert isinstance(done[0], RanksError)
    document, spans = read(tmp_path)
    assert {span["pid"] for span in spans} == {0}
    assert document["otherData"]["ended"].startswith("RanksError: rank 1")


def test_a_trace_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fi_flags")
    (tmp_path / "trace.json").mkdir()
    done = start(tmp_path, Crowd(2), Toy())
    assert not [error for error in done if isinstance(error, BaseException)]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.__dict__["fi_flags"]["event"] for record in warnings] == [logs.NOT_TRACED]
    assert str(tmp_path / "trace.json") in warnings[0].getMessage()


def test_rank_0_decides_whether_there_is_one(tmp_path: Path) -> None:
    start(tmp_path, Crowd(WORLD), Toy(), writers=(1, 2))
    assert not (tmp_path / "trace.json").exists()


def test_pipeline_stages_share_one_trace(tmp_path: Path) -> None:
    start(tmp_path, Crowd(4, groups=lambda rank: f"stage{rank // 2}"), Toy())
    _, spans = read(tmp_path)
    assert {span["pid"] for span in spans} == {0, 1, 2, 3}


def test_more_spans_than_a_viewer_takes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_SPANS", 3)
    timeline = Timeline()
    for number in range(5):
        timeline.add("wait", f"w{number}", number, number + 1)
    document = json.loads(render([timeline.to_json(0, "a")], {}))
    assert len([e for e in document["traceEvents"] if e["ph"] == "X"]) == 3
    assert document["otherData"]["spans_left_out"] == 3  # two waits, and the phase


def test_times_count_from_when_the_ranks_met(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {}
    for rank, zero in ((0, 1000.0), (1, 5.0)):  # the machines' clocks disagree
        monkeypatch.setattr("time.perf_counter", lambda now=zero: now)
        timeline = Timeline()
        timeline.met()
        timeline.add("wait", "w", zero - 2 + rank, zero + 1)
        clocks[rank] = timeline.to_json(rank, "host")
    spans = json.loads(render(list(clocks.values()), {}))["traceEvents"]
    assert [(s["pid"], s["ts"], s["dur"]) for s in spans if s.get("cat") == "wait"] == [
        (0, 0, 3_000_000),
        (1, 1_000_000, 2_000_000),
    ]
