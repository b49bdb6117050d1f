"""Votes and waits: threads over an in-memory store, processes over TCP; every wait ends."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from fi_flags import ranks as ranks_module
from fi_flags.errors import RanksError
from fi_flags.ranks import Meeting, Ranks
from fi_flags.watch import Deadlines
from fi_flags.wire import Wire
from tests.toy import Crowd

T = TypeVar("T")

LIMIT_S = 20.0
CALM = Deadlines(join=LIMIT_S, silence=LIMIT_S, standstill=LIMIT_S)
# Beats every 0.08 s.
QUICK = Deadlines(join=0.4, silence=0.4, standstill=LIMIT_S, grace=0.2)


@pytest.fixture
def no_roll_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may open a meeting though the others are not there."""
    monkeypatch.setattr(ranks_module, "call_the_roll", lambda *_: "1")


@dataclass
class Ended:
    """Stands in for the end of a process: the pulse of a rank stays in it, as if dead."""

    codes: list[int] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)
    out: threading.Event = field(default_factory=threading.Event)

    def __call__(self, status: int, /) -> None:
        self.codes.append(status)
        self.enough.wait(LIMIT_S)
        self.out.set()


def meet(
    world: int,
    talk: Callable[[Meeting], T],
    deadlines: Deadlines = CALM,
    *,
    crowd: Crowd | None = None,
    **options: Any,
) -> list[T | BaseException]:
    """What each rank's side of one meeting returned or raised."""

    def work(ranks: Ranks) -> T:
        with ranks.meet(deadlines, **options) as meeting:
            return talk(meeting)

    return (crowd or Crowd(world, limit=LIMIT_S)).each(work)


def met(*args: Any, **options: Any) -> list[Any]:
    """As ``meet``, where no rank may raise."""
    results = meet(*args, **options)
    for result in results:
        if isinstance(result, BaseException):
            raise AssertionError(repr(result)) from result
    return results


def lost(results: list[Any], but: int = -1) -> list[RanksError]:
    """The errors of all ranks but one, which must be RanksErrors."""
    errors = [result for rank, result in enumerate(results) if rank != but]
    assert all(isinstance(error, RanksError) for error in errors), results
    return errors


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def for_each(ranks: Iterable[int], check: Callable[[int], object]) -> None:
    """Check for each of these ranks, all at the same time: such checks mostly wait."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(check, ranks))


# -- speaking -------------------------------------------------------------------------------

WORLDS = [1, 2, 3, 8, 64]


@pytest.mark.parametrize("world", WORLDS)
def test_a_vote_brings_every_ballot_to_every_rank_in_the_order_of_ranks(world: int) -> None:
    def talk(meeting: Meeting) -> list[Any]:
        mine = meeting.ranks.rank
        time.sleep((world - mine) % 7 * 0.003)
        votes = [meeting.vote({"rank": mine, "vote": number}) for number in range(3)]
        assert meeting.votes == 3
        return votes

    expected = [[{"rank": r, "vote": n} for r in range(world)] for n in range(3)]
    assert met(world, talk) == [expected] * world


@pytest.mark.parametrize("world", WORLDS)
def test_gather_and_share_bring_values_to_and_from_any_rank(world: int) -> None:
    def talk(meeting: Meeting) -> list[Any]:
        mine, last = meeting.ranks.rank, world - 1
        gathered = meeting.gather(last, mine)
        shared = meeting.share(last, f"from {mine}" if mine == last else None)
        return [gathered, shared, meeting.vote(mine)]

    everyone = list(range(world))
    for rank, (gathered, shared, votes) in enumerate(met(world, talk)):
        assert gathered == (everyone if rank == world - 1 else None)
        assert shared == f"from {world - 1}"
        assert votes == everyone


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_message_of_several_chunks_arrives_whole(world: int) -> None:
    def text(rank: int) -> str:
        return f"{rank}ä\n" * 700_000  # over 5 MiB in JSON

    def talk(meeting: Meeting) -> list[Any]:
        return meeting.vote(text(meeting.ranks.rank))

    assert met(world, talk) == [[text(rank) for rank in range(world)]] * world


def test_a_message_over_the_limit_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fi_flags.ranks._MAX_MESSAGE", 1000)

    def talk(meeting: Meeting) -> list[Any]:
        return meeting.vote("x" * 2000 if meeting.ranks.rank == 1 else "")

    for error in lost(meet(2, talk, QUICK)):
        assert "2002 bytes is over 1000" in str(error)


VALUES = [None, True, 0, -1.5, "", "\ud800", [], {}, [1, [2, {"a": None}]], {"ä": [1]}]


def test_json_values_arrive_as_they_are_and_a_tuple_as_a_list() -> None:
    assert met(2, lambda meeting: meeting.vote(VALUES)) == [[VALUES, VALUES]] * 2
    mixed = met(2, lambda meeting: meeting.vote((1, 2)))
    assert mixed[1][0] == [1, 2]


def test_what_is_not_json_is_refused_and_the_others_are_told() -> None:
    def talk(meeting: Meeting) -> list[Any]:
        return meeting.vote({1, 2} if meeting.ranks.rank == 1 else {})

    results = meet(2, talk, QUICK)
    assert isinstance(results[1], TypeError)
    (error,) = lost(results, but=1)
    assert "rank 1 (host1) was lost in phase join: TypeError" in str(error)


def test_a_single_rank_needs_no_store_and_no_deadline() -> None:
    with Ranks().meet(Deadlines(join=0.1, silence=0.1, standstill=0.1)) as meeting:
        time.sleep(0.2)
        assert meeting.vote({"a": 1}) == [{"a": 1}]
        assert meeting.first_failure() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [((2, 2), "rank 2 of a world of 2"), ((-1, 1), "rank -1"), ((0, 2), "needs a store")],
)
def test_ranks_that_cannot_be_are_refused(given: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ranks(*given)


def test_without_torch_distributed_there_is_one_rank() -> None:
    ranks = Ranks.detect()
    assert (ranks.rank, ranks.world, ranks.store) == (0, 1, None)


# -- parts of a world -----------------------------------------------------------------------


@pytest.mark.parametrize("names", [("pp0", "pp1"), ("0", "beat"), ("group/0", "failure")])
def test_parts_of_a_world_vote_on_their_own_and_are_numbered_as_in_the_world(
    names: tuple[str, str],
) -> None:
    def work(ranks: Ranks) -> tuple[Any, ...]:
        with ranks.meet(CALM) as meeting:
            mine = ranks.rank
            first = meeting.vote([mine, ranks.group])
            talk = meeting.among([rank for rank, group in first if group == ranks.group])
            votes = [talk.vote([mine, number]) for number in range(2 + mine % 2)]
            to = talk.members[-1]
            gathered = talk.gather(to, mine)
            shared = talk.share(to, mine if mine == to else None)
            assert talk.first == (mine in (0, 1))
            last = meeting.vote(mine)
            return votes[-1], gathered, shared, last, meeting.all_votes

    crowd = Crowd(4, limit=LIMIT_S, groups=lambda rank: names[rank % 2])
    for rank, (votes, gathered, shared, last, taken) in enumerate(crowd.all(work)):
        members = [rank % 2, rank % 2 + 2]
        assert votes == [[member, 1 + rank % 2] for member in members]
        assert gathered == (members if rank == members[-1] else None)
        assert shared == members[-1]
        assert last == [0, 1, 2, 3]
        assert taken == 4 + rank % 2


def test_a_part_that_is_the_world_is_the_same_conversation() -> None:
    def talk(meeting: Meeting) -> bool:
        return meeting.among(range(2)) is meeting

    assert met(2, talk) == [True, True]


def test_a_rank_of_another_part_that_leaves_is_named() -> None:
    def work(ranks: Ranks) -> Any:
        with ranks.meet(QUICK) as meeting:
            meeting.vote(0)
            talk = meeting.among([0, 1] if ranks.rank < 2 else [2, 3])
            if ranks.rank == 3:
                raise KeyError("boom")
            talk.vote(1)
            return meeting.vote(2)

    results = Crowd(4, limit=LIMIT_S, groups=lambda rank: f"pp{rank // 2}").each(work)
    for error in lost(results[:3]):
        assert "rank 3 (host3) was lost in phase join: KeyError: 'boom'" in str(error)


def test_what_is_counted_reaches_every_rank_and_only_the_first_counts() -> None:
    counting: list[int] = []

    def talk(meeting: Meeting) -> Any:
        def count(ballots: list[Any]) -> Any:
            counting.append(meeting.rank)
            return {"sum": sum(ballots)}

        return meeting.vote(meeting.rank, count)

    assert met(3, talk) == [{"sum": 3}] * 3
    assert counting == [0]


def test_counting_that_fails_is_told_to_the_others() -> None:
    nothing: dict[str, int] = {}
    results = meet(2, lambda meeting: meeting.vote(0, lambda _ballots: nothing["x"]), QUICK)
    assert isinstance(results[0], KeyError)
    (error,) = lost(results, but=0)
    assert "KeyError: 'x'" in str(error)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
rows = st.lists(values, min_size=1) | st.sets(st.text(), max_size=4).flatmap(
    lambda names: st.lists(st.fixed_dictionaries(dict.fromkeys(names, values)), min_size=1)
)


@settings(deadline=None)
@given(rows)
def test_packed_values_come_out_as_they_went_in(given_rows: list[Any]) -> None:
    wired = json.loads(json.dumps(ranks_module._pack(given_rows)))
    # As text, since to Python 1, 1.0 and True are equal.
    assert json.dumps(ranks_module._unpack(wired)) == json.dumps(given_rows)


def test_what_all_ranks_say_alike_is_sent_once() -> None:
    said = [{"rank": rank, "long": "x" * 1000} for rank in range(100)]
    assert len(json.dumps(ranks_module._pack(said))) < 2000


# -- one meeting after another --------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 8])
def test_successive_meetings_on_one_store_stay_apart(world: int) -> None:
    crowd = Crowd(world, limit=LIMIT_S)
    for number in range(3):

        def talk(meeting: Meeting, number: int = number) -> list[Any]:
            assert meeting.first_failure() is None
            votes = [meeting.vote([number, meeting.ranks.rank]) for _ in range(number + 1)]
            meeting.fail(ValueError(f"in meeting {number}"))
            return votes[-1]

        expected = [[number, rank] for rank in range(world)]
        assert met(world, talk, crowd=crowd) == [expected] * world


def test_an_error_in_one_meeting_does_not_reach_the_next() -> None:
    crowd = Crowd(2, limit=LIMIT_S)

    def fail(meeting: Meeting) -> None:
        meeting.vote(0)
        raise ValueError(str(meeting.ranks.rank))

    assert [type(r) for r in meet(2, fail, crowd=crowd)] == [ValueError, ValueError]
    assert met(2, lambda meeting: meeting.vote(1), crowd=crowd) == [[1, 1]] * 2


def test_ranks_one_meeting_apart_wait_for_each_other_by_name() -> None:
    def work(ranks: Ranks) -> list[Any]:
        with ranks.meet(QUICK) as meeting:
            votes = meeting.vote("first")
        if ranks.rank == 1:
            return votes
        with ranks.meet(QUICK) as meeting:
            return meeting.vote("second")

    first, second = Crowd(2, limit=LIMIT_S).each(work)
    assert second == ["first", "first"]
    assert "rank 1 did not join" in str(*lost([first]))


def test_worlds_on_one_store_do_not_hear_each_other() -> None:
    store = HashStore()

    def work(ranks: Ranks) -> list[list[Any]]:
        results = []
        for name in ("a", "b"):
            mine = Ranks(ranks.rank, 2, store, name=name)
            with mine.meet(CALM) as meeting:
                results.append(meeting.vote([name, ranks.rank]))
        return results

    expected = [[[name, rank] for rank in (0, 1)] for name in ("a", "b")]
    assert Crowd(2, limit=LIMIT_S).all(work) == [expected] * 2


@pytest.mark.parametrize("votes", [1, 2, 3])
def test_posted_keys_are_removed_after_the_meeting_but_for_the_last_vote(
    votes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(3, limit=LIMIT_S)
    big = "x" * 1_200_000

    def talk(meeting: Meeting) -> set[tuple[int, str]]:
        for _ in range(votes - 1):
            meeting.vote(big)
            meeting.gather(1, big)
            meeting.share(2, big if meeting.ranks.rank == 2 else None)
        meeting.vote("last")
        return {(step, key) for step, key in meeting._posted}

    monkeypatch.setattr(ranks_module, "call_the_roll", lambda *_: "1")
    posted = set().union(*met(3, talk, crowd=crowd))
    last = max(step for step, _ in posted)
    assert last == (votes - 1) * 5 + 1
    for step, key in posted:
        there = crowd.store.check([f"fi_flags/1/world/1/{key}"])
        assert there == (step >= last - 1), key
    # One gather and one share for each vote: linear in ranks.
    assert len([key for step, key in posted if step >= last - 1]) == 3


# -- ranks that do not come -----------------------------------------------------------------


def test_a_rank_that_never_comes_is_named_on_all_others_within_the_join_deadline() -> None:
    def check(missing: int) -> None:
        def work(ranks: Ranks) -> Any:
            if ranks.rank == missing:
                return None
            began = time.monotonic()
            with ranks.meet(QUICK) as meeting:
                try:
                    return meeting.vote(ranks.rank)
                finally:
                    assert 0.3 < time.monotonic() - began < 3

        for error in lost(Crowd(3, limit=LIMIT_S).each(work), but=missing):
            assert f"rank {missing} did not join in phase join: not heard within 0.4 s" in str(
                error
            )
            assert error.fields == {"ranks": [missing], "phase": "join", "kind": "absent"}

    for_each(range(3), check)


def test_all_ranks_that_never_come_are_named() -> None:
    def work(ranks: Ranks) -> Any:
        if ranks.rank in (1, 3):
            return None
        with ranks.meet(QUICK) as meeting:
            return meeting.vote(0)

    results = Crowd(4, limit=LIMIT_S).each(work)
    for rank in (0, 2):
        assert "ranks 1, 3 did not join" in str(*lost([results[rank]]))


def test_a_rank_that_comes_late_but_in_time_is_waited_for() -> None:
    def work(ranks: Ranks) -> Any:
        time.sleep(0.2 * ranks.rank)
        with ranks.meet(Deadlines(join=5, silence=0.5, standstill=0.5)) as meeting:
            return meeting.vote(ranks.rank)

    assert Crowd(3, limit=LIMIT_S).all(work) == [[0, 1, 2]] * 3


@dataclass
class Waiting:
    """Holds one rank until all others gave up waiting for it."""

    others: int
    gave_up: int = 0
    enough: threading.Event = field(default_factory=threading.Event)

    def hold(self) -> None:
        assert self.enough.wait(LIMIT_S)

    def vote(self, meeting: Meeting) -> Any:
        try:
            with within(3):
                return meeting.vote("never")
        finally:
            self.gave_up += 1
            if self.gave_up == self.others:
                self.enough.set()


def test_a_rank_that_stops_beating_is_named_with_its_host_and_when_it_was_last_heard() -> None:
    def check(silent: int) -> None:
        waiting = Waiting(2)

        def talk(meeting: Meeting) -> Any:
            meeting.vote("all there")
            meeting.at("merge")
            if meeting.ranks.rank != silent:
                return waiting.vote(meeting)
            time.sleep(0.2)
            meeting._pulse._stop.set()
            return waiting.hold()

        for error in lost(meet(3, talk, QUICK), but=silent):
            text = f"rank {silent} (host{silent}) was lost in phase merge: last heard 0."
            assert error.message.startswith(text)
            assert error.message.endswith(" s ago")
            assert error.fields == {"ranks": [silent], "phase": "merge", "kind": "lost"}

    for_each(range(3), check)


def test_a_rank_that_lives_without_progress_is_named_with_what_it_does() -> None:
    def check(stuck: int) -> None:
        waiting = Waiting(2)

        def talk(meeting: Meeting) -> Any:
            meeting.at("run")
            if meeting.ranks.rank != stuck:
                return waiting.vote(meeting)
            for number in range(5):
                meeting.progress("gemm", number, 9)
                time.sleep(0.06)
            return waiting.hold()

        for error in lost(meet(3, talk, Deadlines(join=5, silence=5, standstill=0.4)), but=stuck):
            text = f"rank {stuck} (host{stuck}) is stuck in phase run: alive, but no progress for "
            assert error.message.startswith(text)
            assert error.message.endswith(" s, at gemm, 4 profiles done")
            assert error.fields["kind"] == "stuck"

    for_each(range(3), check)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_rank_that_raises_between_votes_is_named_at_once(bad: int) -> None:
    def talk(meeting: Meeting) -> Any:
        meeting.vote(0)
        meeting.at("merge")
        if meeting.ranks.rank == bad:
            raise ValueError("boom\nand more")
        with within(3):
            return meeting.vote(1)

    results = meet(3, talk, Deadlines(join=1.0))
    assert isinstance(results[bad], ValueError)
    for error in lost(results, but=bad):
        expected = f"rank {bad} (host{bad}) was lost in phase merge: ValueError: boom"
        assert error.message == expected
        assert "that rank's own log" in error.hint


@pytest.mark.usefixtures("no_roll_call")
def test_an_answer_that_came_before_a_rank_left_counts() -> None:
    crowd = Crowd(2, limit=LIMIT_S)
    with crowd.ranks(1).meet(CALM) as meeting:

        def answer_and_leave() -> None:
            meeting._wire.set("1", '1:{"rows":["the answer"]}')
            raise RanksError("rank 0 was lost in phase run: WorkloadError")

        meeting._pulse.raise_if_gone = answer_and_leave  # type: ignore[method-assign]
        assert meeting.vote("mine") == ["the answer"]


# -- failures inside the model --------------------------------------------------------------


@dataclass
class Inside:
    """Rank 0 fails; rank 1 is inside the model, for a time or until it is ended."""

    stay: float = LIMIT_S
    progress: float = 0.0
    ended: Ended = field(default_factory=Ended)
    told: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    stayed: float = 0.0

    def run(self, deadlines: Deadlines) -> list[Any]:
        def work(ranks: Ranks) -> Any:
            def tell(event: str, **fields: Any) -> None:
                self.told.append((ranks.rank, event, fields))

            with ranks.meet(deadlines, tell=tell, end_process=self.ended) as meeting:
                meeting.vote("start")
                meeting.at("run")
                if ranks.rank == 0:
                    return self._fail(meeting)
                with meeting.inside():
                    self._remain(meeting)
                return None if self.ended.codes else meeting.vote("after")

        return Crowd(2, limit=LIMIT_S).each(work)

    def _fail(self, meeting: Meeting) -> Any:
        meeting.fail(ValueError("boom"))
        try:
            return meeting.vote("after")
        finally:
            self.ended.enough.set()

    def _remain(self, meeting: Meeting) -> None:
        began = time.monotonic()
        for done in itertools.count():
            self.stayed = time.monotonic() - began
            if self.stayed > self.stay:
                return
            if self.stayed < self.progress:
                meeting.progress("gemm", done, 99)
            if self.ended.out.wait(0.02) or self.ended.codes:
                return

    def events(self, name: str) -> list[dict[str, Any]]:
        return [fields for _, event, fields in self.told if event == name]


def test_a_peer_that_stays_inside_is_ended_after_the_grace_and_named() -> None:
    inside = Inside()
    results = inside.run(QUICK)
    assert inside.ended.codes == [4]
    assert 0.2 <= inside.stayed < 3
    (error,) = lost(results, but=1)
    assert "rank 1 (host1) was lost in phase run: its watchdog ended it, since rank 0" in str(error)
    assert "before that, rank 0 (host0) failed in phase run: ValueError: boom" in str(error)
    (failed,) = inside.events("peer_failed")
    assert failed == {"cause": "rank 0 (host0) failed in phase run: ValueError: boom", "grace": 0.2}
    (ended,) = inside.events("ended")
    assert ended == {"cause": failed["cause"], "exit_code": 4}
    assert {rank for rank, _, _ in inside.told} == {1}


def test_a_peer_that_comes_out_in_time_is_not_ended() -> None:
    inside = Inside(stay=0.3)
    assert inside.run(Deadlines(join=0.5, grace=5.0)) == [["after", "after"]] * 2
    assert inside.ended.codes == []
    assert len(inside.events("peer_failed")) == 1


def test_a_peer_is_never_ended_without_a_grace() -> None:
    inside = Inside(stay=0.6)
    assert inside.run(Deadlines(join=0.5, grace=None)) == [["after", "after"]] * 2
    assert inside.ended.codes == []
    assert len(inside.events("peer_failed")) == 1
    assert inside.events("ended") == []


def test_a_patient_group_does_not_end_a_peer_that_makes_progress() -> None:
    inside = Inside(stay=0.8, progress=0.8)
    patient = Deadlines(join=0.25, silence=LIMIT_S, grace=0.3, patient=True)
    assert inside.run(patient) == [["after", "after"]] * 2
    assert inside.ended.codes == []


def test_an_impatient_group_ends_a_peer_though_it_makes_progress() -> None:
    inside = Inside(progress=LIMIT_S)
    inside.run(Deadlines(join=0.25, silence=LIMIT_S, grace=0.3, patient=False))
    assert inside.ended.codes == [4]


def test_a_patient_group_ends_a_peer_whose_progress_stops() -> None:
    inside = Inside(progress=0.5)
    inside.run(Deadlines(join=0.25, silence=LIMIT_S, grace=0.3, patient=True))
    assert inside.ended.codes == [4]
    assert inside.stayed >= 0.7


def test_without_a_failure_nobody_is_ended_however_long_it_stays() -> None:
    ended = Ended()

    def talk(meeting: Meeting) -> Any:
        with meeting.inside():
            time.sleep(0.3)
        return meeting.vote(0)

    deadlines = Deadlines(join=0.25, grace=0.0)
    assert met(2, talk, deadlines, end_process=ended) == [[0, 0]] * 2
    assert ended.codes == []


def test_a_lost_rank_ends_peers_inside_too() -> None:
    ended = Ended()

    def talk(meeting: Meeting) -> Any:
        meeting.vote("start")
        if meeting.ranks.rank == 1:
            meeting._pulse._stop.set()
            assert ended.out.wait(LIMIT_S)
            return None
        with meeting.inside():
            while not ended.codes:
                time.sleep(0.01)
            ended.enough.set()
        return None

    with within(5):
        meet(2, talk, QUICK, end_process=ended)
    assert ended.codes == [4]


def test_a_peer_that_wakes_up_when_torchs_group_is_aborted_is_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = Inside()
    group = SimpleNamespace(WORLD=SimpleNamespace(abort=inside.ended.out.set))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "group", group)
    # The grace is also how long an abort may take.
    assert inside.run(Deadlines(join=0.25, grace=0.5)) == [["after", "after"]] * 2
    assert inside.ended.codes == []
    assert 0.5 <= inside.stayed < 3


def test_an_abort_that_hangs_or_raises_does_not_save_a_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = Inside()

    def hang() -> None:
        inside.ended.enough.wait(LIMIT_S)
        raise RuntimeError("too late")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(abort=hang)))
    inside.run(QUICK)
    assert inside.ended.codes == [4]


def test_the_first_failure_is_the_one_that_all_ranks_see() -> None:
    def talk(meeting: Meeting) -> Any:
        if meeting.ranks.rank == 1:
            meeting.fail(ValueError("first"))
        meeting.vote(0)
        meeting.fail(ValueError("later"))
        meeting.vote(0)
        first = meeting.first_failure()
        return first and (first.ranks, first.cause)

    assert met(3, talk) == [((1,), "ValueError: first")] * 3


# -- a store that dies ----------------------------------------------------------------------


class Dead:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            raise self.error

        return fail


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Broken pipe"), dist.DistStoreError("timed out"), dist.DistNetworkError()],
)
@pytest.mark.usefixtures("no_roll_call")
@pytest.mark.parametrize("step", ["vote", "fail", "first_failure"])
def test_a_dead_store_is_a_ranks_error_that_says_so(error: Exception, step: str) -> None:
    steps: dict[str, Callable[[Meeting], Any]] = {
        "vote": lambda meeting: meeting.vote(0),
        "fail": lambda meeting: meeting.fail(ValueError()),
        "first_failure": lambda meeting: meeting.first_failure(),
    }

    def talk(meeting: Meeting) -> None:
        meeting._wire._store = Dead(error)
        steps[step](meeting)

    (caught,) = lost([alone(talk)])
    assert caught.message.startswith("the ranks' store does not answer: " + type(error).__name__)
    assert caught.fields == {"ranks": [0], "phase": "store"}
    assert caught.__cause__ is error


@pytest.mark.usefixtures("no_roll_call")
def test_a_store_that_dies_under_the_pulse_ends_the_wait() -> None:
    def talk(meeting: Meeting) -> None:
        meeting._pulse._wire._store = Dead(RuntimeError("gone\nfor good"))
        meeting.vote(0)

    with within(3):
        (caught,) = lost([alone(talk)])
    assert caught.message.endswith("in phase join: the ranks' store does not answer: gone")


def alone(talk: Callable[[Meeting], T], ranks: Ranks | None = None) -> T | BaseException:
    """What rank 1 of 2 returned or raised while rank 0 is not there."""
    try:
        with (ranks or Crowd(2).ranks(1)).meet(QUICK) as meeting:
            return talk(meeting)
    except RanksError as error:
        return error


def tcp_server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def tcp_client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


@pytest.mark.usefixtures("no_roll_call")
def test_a_tcp_server_that_dies_ends_the_wait() -> None:
    servers = [tcp_server()]
    ranks = Ranks(1, 2, tcp_client(servers[0].port), host="host1")

    def talk(meeting: Meeting) -> None:
        servers.clear()
        gc.collect()
        meeting.vote(0)

    with within(5):
        (caught,) = lost([alone(talk, ranks)])
    assert "the ranks' store does not answer" in caught.message


def test_a_store_that_is_dead_from_the_start_is_a_ranks_error_and_leaves_no_thread() -> None:
    server = tcp_server()
    ranks = Ranks(1, 2, tcp_client(server.port), host="host1")
    del server
    gc.collect()
    before = threading.active_count()
    with pytest.raises(RanksError, match="store does not answer"), ranks.meet(QUICK):
        pass
    until = time.monotonic() + 2
    while threading.active_count() > before:  # a thread ends a moment after it is told to
        assert time.monotonic() < until
        time.sleep(0.01)


# -- what rank 0 says -----------------------------------------------------------------------


@dataclass
class Heard:
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


def test_rank_0_reports_whom_it_waits_for_and_what_they_do() -> None:
    heard = {0: Heard(), 1: Heard(), 2: Heard()}

    def work(ranks: Ranks) -> Any:
        deadlines = Deadlines(join=0.5, silence=LIMIT_S, report=0.15)
        with ranks.meet(deadlines, tell=heard[ranks.rank]) as meeting:
            meeting.vote("all there")
            meeting.at("run")
            if ranks.rank == 2:
                meeting.progress("gemm", 3, 9)
                time.sleep(0.7)
            return meeting.vote("done")

    assert Crowd(3, limit=LIMIT_S).all(work) == [["done"] * 3] * 3
    assert {name for name, _ in heard[0].events} == {"waiting"}
    assert 2 <= len(heard[0].events) <= 5
    last = heard[0].events[-1][1]
    assert (last["ranks"], last["phase"]) == ([2], "run")
    assert last["doing"] == {"2": "run, at gemm, 3 profiles done"}
    assert 0.1 < last["seconds"] < 5
    assert heard[1].events == heard[2].events == []


def test_rank_0_reports_its_tuning_at_the_report_interval() -> None:
    heard = Heard()

    def talk(meeting: Meeting) -> Any:
        meeting.at("run")
        with meeting.inside():
            for done in range(10):
                meeting.progress("moe", done, 10)
                time.sleep(0.06)
        return meeting.vote(0)

    met(1, talk, Deadlines(join=0.1, report=0.2), tell=heard)  # a beat is 0.02 s
    assert {name for name, _ in heard.events} == {"tuning"}
    assert 2 <= len(heard.events) <= 4
    last = heard.events[-1][1]
    assert (last["phase"], last["op"], last["total"]) == ("run", "moe", 10)
    counts = [fields["done"] for _, fields in heard.events]
    assert counts == sorted(set(counts))


@pytest.mark.usefixtures("no_roll_call")
def test_rank_0_does_not_report_a_wait_that_has_its_answer() -> None:
    heard = Heard()

    with Crowd(3).ranks(0).meet(Deadlines(report=0.0), tell=heard) as meeting:
        pulse = meeting._pulse
        pulse._wire.set("there", "")
        for waiting in ({1: "there"}, {1: "there", 2: "not there"}):
            pulse.waiting = waiting
            pulse._report()
    assert [(name, fields["ranks"]) for name, fields in heard.events] == [("waiting", [2])]


def test_a_quick_meeting_reports_nothing() -> None:
    heard = Heard()
    met(2, lambda meeting: meeting.vote(0), tell=heard)
    assert heard.events == []


# -- processes ------------------------------------------------------------------------------

CHILD = """
import json, os, sys, time
from torch.distributed import TCPStore
from fi_flags.watch import Deadlines
from fi_flags.ranks import Ranks
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
ranks = Ranks(rank, 2, store, host=f"host{rank}")
for number in range(3):
    with ranks.meet(Deadlines(join=60)) as meeting:
        votes = meeting.vote({"rank": rank, "number": number, "big": str(rank) * (3 << 20)})
        assert [vote["rank"] for vote in votes] == [0, 1]
        assert [len(vote["big"]) for vote in votes] == [3 << 20] * 2
        assert {vote["number"] for vote in votes} == {number}
        assert meeting.share(1, "shared" if rank == 1 else None) == "shared"
        meeting.vote("end")
try:
    with ranks.meet(Deadlines(join=60, silence=1.0)) as meeting:
        meeting.vote("start")
        meeting.at("run")
        if rank == 1:
            time.sleep(0.5)
            os._exit(139)
        meeting.vote("never")
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def test_processes_over_tcp_vote_and_name_the_one_that_dies() -> None:
    server = tcp_server()
    command = [sys.executable, "-c", textwrap.dedent(CHILD)]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(server.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 139], said
    kind, text = json.loads(said[0][0])
    assert kind == "RanksError"
    assert "rank 1 (host1) was lost in phase run: last heard 1." in text


class Frozen:
    """A store whose server answers for a while, and then never again: a stopped or cut-off host."""

    def __init__(self, store: Any, freeze: threading.Event) -> None:
        self.store, self.freeze = store, freeze

    def clone(self) -> Frozen:
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self.freeze.is_set():
                threading.Event().wait(60)
            return getattr(self.store, name)(*arguments)

        return call


def test_a_wire_that_gets_no_answer_raises_then_and_at_once_ever_after() -> None:
    freeze = threading.Event()
    wire = Wire(Frozen(dist.HashStore(), freeze), 0.2)  # type: ignore[attr-defined, arg-type]
    wire.set("a", "1")
    assert wire.get("a") == b"1"
    freeze.set()
    for limit in (2.0, 0.15):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="no answer to check within"):
            wire.check(["a"])
        assert time.monotonic() - began < limit


@pytest.mark.parametrize("inside", [False, True])
def test_a_store_that_freezes_ends_every_rank_wherever_it_is(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze, ended = threading.Event(), []
    opened = ranks_module._open

    def frozen_open(ranks: Ranks, deadlines: Deadlines, tell: Any) -> Any:
        stores = [Frozen(wire._store, freeze) for wire in opened(ranks, deadlines, tell)]
        return tuple(Wire(store, deadlines.silence) for store in stores)  # type: ignore[arg-type]

    monkeypatch.setattr(ranks_module, "_open", frozen_open)
    deadlines = Deadlines(join=5, silence=0.5, standstill=5, grace=0.2)
    out = threading.Event()

    def end(code: int, /) -> None:
        ended.append(code)
        out.set()

    def work(ranks: Ranks) -> None:
        with ranks.meet(deadlines, end_process=end) as meeting:
            meeting.vote(0)
            freeze.set()
            if inside:
                with meeting.inside():
                    assert out.wait(10), "still inside the model"
            meeting.vote(1)

    errors = Crowd(2, limit=15).each(work)
    assert all(isinstance(error, RanksError) for error in errors)
    assert all("no answer to" in str(error) for error in errors)
    assert bool(ended) == inside


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_whose_own_connection_breaks_is_named_by_the_others_at_once(broken: int) -> None:
    """Its pulse has a connection of its own, which may well live on and must not say good-bye."""

    def work(ranks: Ranks) -> None:
        with ranks.meet(Deadlines(join=5, silence=5, standstill=60)) as meeting:
            meeting.vote(0)
            if ranks.rank == broken:
                meeting._wire._store = Dead(RuntimeError("Broken pipe"))
            meeting.vote(1)

    began = time.monotonic()
    errors = Crowd(3, limit=15).each(work)
    assert time.monotonic() - began < 8
    assert all(isinstance(error, RanksError) for error in errors)
    for rank, error in enumerate(errors):
        if rank != broken:
            assert f"rank {broken}" in str(error)
            assert "it left with RanksError" in str(error)
