"""The roll call: whoever is alive meets, whatever the store still holds of those who are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fi_flags.errors import RanksError
from fi_flags.roll import call_the_roll
from fi_flags.watch import Deadlines
from fi_flags.wire import Wire

CALM = Deadlines(join=20)
QUICK = Deadlines(join=0.3, report=0.1)


class Hall:
    """Ranks as threads over one store; a rank's result is its name for the meeting, or an error."""

    def __init__(self, store: HashStore | None = None) -> None:
        self.store = store or HashStore()
        self.waited: list[list[int]] = []

    def call(self, rank: int, world: int, deadlines: Deadlines = CALM) -> str | RanksError:
        wire = Wire(self.store, 20, direct=True)
        try:
            return call_the_roll(
                wire, rank, world, deadlines, lambda ranks, _s: self.waited.append(ranks)
            )
        except RanksError as error:
            return error

    def all(self, world: int, deadlines: Deadlines = CALM, *, but: tuple[int, ...] = ()) -> Any:
        results: dict[int, str | RanksError] = {}

        def work(rank: int) -> None:
            results[rank] = self.call(rank, world, deadlines)

        threads = [threading.Thread(target=work, args=(r,)) for r in range(world) if r not in but]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return results


@pytest.mark.parametrize("world", [2, 3, 64])
def test_all_ranks_agree_on_a_name_and_on_another_the_next_time(world: int) -> None:
    hall = Hall()
    names = [set(hall.all(world).values()) for _ in range(3)]
    assert all(len(one) == 1 for one in names)
    assert len(set.union(*names)) == 3


@pytest.mark.parametrize("missing", [(1,), (1, 3)])
def test_who_does_not_come_is_named_on_every_rank_that_came(missing: tuple[int, ...]) -> None:
    results = Hall().all(4, QUICK, but=missing)
    numbers = ", ".join(map(str, missing))
    for error in results.values():
        assert isinstance(error, RanksError)
        assert f"{numbers} did not join in phase join: not heard within 0.3 s" in str(error)
        assert error.fields == {"ranks": list(missing), "phase": "join", "kind": "absent"}


def test_without_rank_0_the_others_name_it() -> None:
    for error in Hall().all(3, QUICK, but=(0,)).values():
        assert "rank 0 did not join" in str(error)


def test_rank_0_tells_for_whom_it_waits() -> None:
    hall = Hall()
    hall.all(3, QUICK, but=(2,))
    assert hall.waited
    assert set(map(tuple, hall.waited)) == {(2,)}


def in_vain(hall: Hall) -> None:
    """All but rank 1 came, and gave up."""
    hall.all(3, QUICK, but=(1,))


def died_before_rank_0_answered(hall: Hall) -> None:
    """Ranks 1 and 2 answered a rank 0 that then was gone."""
    hall.store.set("leader", "dead")
    for rank in (1, 2):
        hall.call(rank, 3, Deadlines(join=0.05))


@pytest.mark.parametrize(
    "before",
    [
        lambda hall: hall.all(3),
        in_vain,
        died_before_rank_0_answered,
        lambda hall: hall.call(0, 3, Deadlines(join=0.05)),
        lambda hall: hall.call(1, 3, Deadlines(join=0.05)),
    ],
)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_restart_on_the_same_store_meets_whatever_ended_before(
    before: Callable[[Hall], Any], late: int
) -> None:
    hall = Hall()
    before(hall)
    results: dict[int, Any] = {}

    def work(rank: int) -> None:
        time.sleep(0.05 * (rank == late))
        results[rank] = hall.call(rank, 3)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(results.values())) == 1, results
    assert isinstance(results[0], str)
