"""Who is absent, lost or stuck: judged from heartbeats and a clock, both given."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fi_flags.pulse import FAILURE, post_first
from fi_flags.watch import Deadlines, Failure, Watch
from fi_flags.wire import Wire

DEADLINES = Deadlines(join=100, silence=60, standstill=1000)


def beat(n: int, **more: Any) -> dict[str, Any]:
    return {"phase": "run", "host": "h", "n": n, **more}


def watch(*ranks: int, deadlines: Deadlines = DEADLINES) -> Watch:
    return Watch(deadlines, frozenset(ranks), began=0.0)


def heard(rank: int, *beats: tuple[float, dict[str, Any]], of: Watch | None = None) -> Watch:
    """A watch that heard these beats, each at its time."""
    result = watch(rank) if of is None else of
    for now, said in beats:
        result.hear(rank, said, now)
    return result


def kind(failure: Failure | None) -> tuple[str, tuple[int, ...]] | None:
    return None if failure is None else (failure.kind, failure.ranks)


# -- absent ---------------------------------------------------------------------------------


def test_ranks_that_never_came_are_absent_after_the_join_deadline_and_all_named() -> None:
    group = heard(2, (99.0, beat(1)), of=watch(1, 2, 3))
    assert group.judge(100.0, failed=False) is None
    failure = group.judge(100.1, failed=False)
    assert kind(failure) == ("absent", (1, 3))
    assert failure is not None
    assert failure.describe() == (
        "ranks 1, 3 did not join in phase join: "
        "not heard within 100 s; is fi_flags on for that rank?"
    )


def test_a_rank_that_came_is_not_absent() -> None:
    assert heard(1, (50.0, beat(1)), (101.0, beat(2))).judge(110.0, failed=False) is None


def test_a_failure_elsewhere_makes_nobody_absent_sooner() -> None:
    assert watch(1).judge(99.0, failed=True) is None


# -- silence --------------------------------------------------------------------------------


def test_a_rank_whose_heartbeat_stands_still_is_lost_after_the_silence_deadline() -> None:
    silent = heard(1, (0.0, beat(1)), (5.0, beat(2)), (30.0, beat(2)), (65.0, beat(2)))
    assert silent.judge(65.0, failed=False) is None
    failure = silent.judge(65.5, failed=False)
    assert failure == Failure("lost", (1,), "h", "run", "last heard 60.5 s ago")


def test_a_heartbeat_in_time_counts_anew() -> None:
    alive = heard(1, *((50.0 * n, beat(n)) for n in range(10)))
    assert alive.judge(500.0, failed=False) is None


def test_a_lost_rank_is_named_with_what_it_last_did() -> None:
    silent = heard(1, (0.0, beat(1, op="gemm", done=3)))
    failure = silent.judge(61.0, failed=False)
    assert failure is not None
    assert failure.describe() == (
        "rank 1 (h) was lost in phase run: last heard 61.0 s ago, at gemm, 3 profiles done"
    )


def test_after_a_failure_silence_is_judged_sooner() -> None:
    silent = heard(1, (0.0, beat(1)))
    assert silent.judge(10.0, failed=True) is None
    assert kind(silent.judge(10.5, failed=True)) == ("lost", (1,))
    assert silent.judge(10.5, failed=False) is None


def test_after_a_failure_a_shorter_silence_deadline_stays() -> None:
    silent = heard(1, (0.0, beat(1)), of=watch(1, deadlines=Deadlines(silence=2.0)))
    assert silent.judge(2.0, failed=True) is None
    assert kind(silent.judge(2.5, failed=True)) == ("lost", (1,))


def test_a_waiting_rank_that_falls_silent_is_lost() -> None:
    silent = heard(1, (0.0, beat(1, waiting=True)))
    assert kind(silent.judge(61.0, failed=False)) == ("lost", (1,))


# -- standstill -----------------------------------------------------------------------------


def alive(of: Watch, start: int, end: int, **more: Any) -> Watch:
    """Rank 1 beats every 10 s from start to end, and does nothing else."""
    return heard(1, *((float(t), beat(t, **more)) for t in range(start, end + 1, 10)), of=of)


def test_a_rank_that_lives_without_progress_is_stuck_after_the_standstill_deadline() -> None:
    group = alive(watch(1), 0, 1010, op="gemm", done=3)
    assert group.judge(1000.0, failed=False) is None
    failure = group.judge(1010.0, failed=False)
    assert failure is not None
    assert failure.describe() == (
        "rank 1 (h) is stuck in phase run: "
        "alive, but no progress for 1010.0 s, at gemm, 3 profiles done"
    )


@pytest.mark.parametrize("change", [{"phase": "merge"}, {"op": "moe"}, {"done": 4}])
def test_another_phase_op_or_count_is_progress(change: dict[str, Any]) -> None:
    group = alive(watch(1), 0, 990, op="gemm", done=3)
    group = alive(group, 1000, 1980, **({"op": "gemm", "done": 3} | change))
    assert group.judge(1980.0, failed=False) is None
    group = alive(group, 1990, 2010, **({"op": "gemm", "done": 3} | change))
    assert kind(group.judge(2010.0, failed=False)) == ("stuck", (1,))


def test_a_rank_that_waits_for_one_that_moves_is_not_stuck() -> None:
    group = alive(watch(1, 2), 0, 5000, waiting=True)
    heard(2, *((float(t), beat(t, op="gemm", done=t)) for t in range(0, 5001, 10)), of=group)
    assert group.judge(5000.0, failed=False) is None


def test_the_end_of_waiting_is_progress() -> None:
    group = alive(alive(watch(1), 0, 900, waiting=True), 910, 1890)
    assert group.judge(1890.0, failed=False) is None
    assert kind(alive(group, 1900, 1920).judge(1920.0, failed=False)) == ("stuck", (1,))


def test_the_progress_of_one_rank_excuses_all() -> None:
    group = alive(watch(1, 2), 0, 5000, op="gemm", done=3)
    heard(2, *((float(t), beat(t, op="gemm", done=t)) for t in range(0, 5001, 10)), of=group)
    assert group.judge(5000.0, failed=False) is None
    heard(2, *((float(t), beat(t, op="gemm", done=9)) for t in range(5010, 6021, 10)), of=group)
    group = alive(group, 5010, 6020, op="gemm", done=3)
    assert kind(group.judge(6020.0, failed=False)) == ("stuck", (1,))


def test_where_nobody_moves_those_furthest_behind_are_stuck_and_nobody_else() -> None:
    group = watch(0, 1, 2, 3, 4)
    behind = {"op": "gemm", "done": 3}
    says: list[dict[str, Any]] = [{"op": "moe", "done": 4}, behind, behind]
    says += [{"waiting": True}, {"left": True}]
    for now in range(0, 1011, 10):
        for rank, said in enumerate(says):
            group.hear(rank, beat(now, **said), float(now))
    failure = group.judge(1010.0, failed=False)
    assert kind(failure) == ("stuck", (1, 2))
    assert failure is not None
    assert failure.cause.endswith(", at gemm, 3 profiles done")


def test_a_rank_that_did_nothing_yet_is_behind_one_that_did() -> None:
    group = alive(watch(0, 1), 0, 1010, op="gemm", done=1)
    heard(0, *((float(t), beat(t)) for t in range(0, 1011, 10)), of=group)
    assert kind(group.judge(1010.0, failed=False)) == ("stuck", (0,))


def test_a_rank_that_sees_only_some_judges_nobody_stuck() -> None:
    group = alive(Watch(DEADLINES, frozenset({1}), 0.0, sees_all=False), 0, 5000)
    assert group.judge(5000.0, failed=False) is None
    assert kind(group.judge(5061.0, failed=False)) == ("lost", (1,))


# -- the end --------------------------------------------------------------------------------


def test_a_rank_that_said_it_was_ended_is_lost_at_once() -> None:
    ended = heard(1, (0.0, beat(1)), (1.0, beat(2, ended="its watchdog ended it")))
    failure = ended.judge(1.0, failed=False)
    assert failure == Failure("lost", (1,), "h", "run", "its watchdog ended it")


def test_a_rank_that_left_is_neither_lost_nor_stuck() -> None:
    gone = heard(1, (0.0, beat(1)), (1.0, beat(2, left=True)))
    assert gone.judge(1e9, failed=True) is None


# -- two faults -----------------------------------------------------------------------------


def test_an_absent_rank_is_named_before_a_lost_one() -> None:
    group = heard(1, (0.0, beat(1)), of=watch(1, 2))
    assert kind(group.judge(61.0, failed=False)) == ("lost", (1,))
    assert kind(group.judge(101.0, failed=False)) == ("absent", (2,))


def test_of_two_lost_ranks_the_lower_is_named() -> None:
    group = heard(3, (0.0, beat(1)), of=watch(1, 2, 3))
    heard(2, (1.0, beat(1)), of=group)
    heard(1, (50.0, beat(1)), of=group)
    assert kind(group.judge(70.0, failed=False)) == ("lost", (2,))


def test_a_silent_rank_that_also_stands_still_is_lost() -> None:
    group = heard(1, (0.0, beat(1)), of=watch(1, deadlines=Deadlines(silence=5, standstill=5)))
    assert kind(group.judge(6.0, failed=False)) == ("lost", (1,))


def test_a_rank_that_left_does_not_hide_a_lost_one() -> None:
    group = heard(1, (0.0, beat(1, left=True)), of=watch(1, 2))
    heard(2, (0.0, beat(1)), of=group)
    assert kind(group.judge(61.0, failed=False)) == ("lost", (2,))


def test_nobody_to_watch_is_no_fault() -> None:
    assert watch().judge(1e9, failed=True) is None


# -- failures on the wire -------------------------------------------------------------------


def test_the_first_failure_that_was_posted_stays() -> None:
    store = Wire(HashStore(), 5.0)
    first = Failure("failed", (1,), "a", "run", "ValueError: first")
    second = Failure("failed", (2,), "b", "load", "ValueError: second")
    assert post_first(store, FAILURE, first) == first
    assert post_first(store, FAILURE, second) == first
    assert Failure.of(store.get(FAILURE)) == first


def test_a_failure_is_posted_as_json() -> None:
    store = Wire(HashStore(), 5.0)
    failure = Failure("lost", (1, 2), "h", "run", 'a "cause"\nin two lines')
    post_first(store, "gone", failure)
    assert json.loads(store.get("gone")) == dataclasses.asdict(failure) | {"ranks": [1, 2]}


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (Failure("failed", (1,), "h", "run", "x"), "rank 1 (h) failed in phase run: x"),
        (Failure("absent", (1, 2), "", "join", "x"), "ranks 1, 2 did not join in phase join: x"),
        (Failure("lost", (0,), "", "load", "x"), "rank 0 was lost in phase load: x"),
        (Failure("stuck", (0,), "h", "run", "x"), "rank 0 (h) is stuck in phase run: x"),
    ],
)
def test_a_failure_in_words(failure: Failure, line: str) -> None:
    assert failure.describe() == line


@pytest.mark.parametrize(
    ("deadlines", "tick"),
    [
        (Deadlines(), 1.0),
        (Deadlines(silence=1.0), 0.2),
        (Deadlines(join=0.5), 0.1),
        (Deadlines(standstill=0.001), 0.02),
    ],
)
def test_a_pulse_beats_several_times_within_every_deadline(
    deadlines: Deadlines, tick: float
) -> None:
    assert deadlines.tick == tick


def test_ranks_that_all_wait_for_each_other_are_stuck_once_all_have_come() -> None:
    watch = Watch(Deadlines(join=100, silence=100, standstill=5), frozenset({0, 1}), 0.0)
    watch.hear(0, {"phase": "merge", "waiting": True, "n": 1}, 0.0)
    assert watch.judge(6.0, failed=False) is None, "rank 1 has not come yet: that is for the join"
    watch.hear(1, {"phase": "merge", "waiting": True, "n": 1}, 6.0)
    watch.hear(0, {"phase": "merge", "waiting": True, "n": 2}, 10.0)
    assert watch.judge(10.0, failed=False) is None
    stuck = watch.judge(11.1, failed=False)
    assert stuck is not None
    assert (stuck.kind, stuck.ranks) == ("stuck", (0, 1))
