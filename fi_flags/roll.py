"""The roll call that opens a meeting: keys that no earlier process of these ranks has used.

A store may outlive its ranks. torchrun keeps one through its restarts, and neither its restart
count (it differs from node to node) nor anything else in the environment tells one attempt from the
next. So rank 0 names each meeting afresh, every other rank answers with a word of its own, and only
who finds that word in what rank 0 then posts has met the living.
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from fi_flags.errors import RanksError
from fi_flags.watch import Deadlines, Failure
from fi_flags.wire import Wire

__all__ = ["call_the_roll"]

_LEADER = "leader"
_WORD = 8
_NOBODY = "-" * _WORD
_TO_SAY_SO_S = 2.0
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_PAUSE_PER_RANK_S = 5e-5


def call_the_roll(
    wire: Wire,
    rank: int,
    world: int,
    deadlines: Deadlines,
    waiting: Callable[[list[int], float], object] = lambda _ranks, _seconds: None,
) -> str:
    """Meet every rank of the world once, and agree on a name for what follows.

    Args:
        wire: A connection to the world's part of the store.
        rank: This process's rank.
        world: How many there are.
        deadlines: For how long rank 0 waits for the others, and they for it.
        waiting: Told on rank 0 now and then for which ranks it waits, and since how many seconds.

    Raises:
        RanksError: A rank did not come; it is named.
    """
    if rank == 0:
        return _lead(wire, world, deadlines, waiting)
    return _answer(wire, rank, world, deadlines)


def _lead(
    wire: Wire, world: int, deadlines: Deadlines, waiting: Callable[[list[int], float], object]
) -> str:
    name = uuid.uuid4().hex[: 2 * _WORD]
    wire.set(_LEADER, name)
    keys = {rank: _here(name, rank) for rank in range(1, world)}
    began = reported = time.monotonic()
    pauses = _pauses(1)
    while not wire.check(list(keys.values())):
        now = time.monotonic()
        if now - reported > deadlines.report or now - began > deadlines.join:
            reported = now
            missing = [rank for rank, key in keys.items() if not wire.check([key])]
            if now - began > deadlines.join and missing:
                gone = _absent(missing, deadlines)
                here = [
                    wire.get(k).decode() if r not in missing else _NOBODY for r, k in keys.items()
                ]
                wire.set(_all(name), json.dumps(["".join(here), dataclasses.asdict(gone)]))
                raise _error(gone)
            waiting(missing, round(now - began, 1))
        time.sleep(next(pauses))
    words = b"".join(wire.multi_get(list(keys.values()))).decode()
    wire.set(_all(name), json.dumps([words, None]))
    return name


def _answer(wire: Wire, rank: int, world: int, deadlines: Deadlines) -> str:
    word = uuid.uuid4().hex[:_WORD]
    mine = slice((rank - 1) * _WORD, rank * _WORD)
    name = ""
    until = time.monotonic() + deadlines.join
    pauses = _pauses(world)
    while time.monotonic() < until:
        # The name may be that of a meeting long over, whose rank 0 will not answer any more.
        latest = wire.get(_LEADER).decode() if wire.check([_LEADER]) else ""
        if latest != name:
            name = latest
            wire.set(_here(name, rank), word)
            # Whoever else is missing, rank 0 is to say so.
            until = time.monotonic() + deadlines.join + _TO_SAY_SO_S
        if name and wire.check([_all(name)]):
            words, gone = json.loads(wire.get(_all(name)))
            if words[mine] == word:
                if gone is not None:
                    raise _error(Failure(**{**gone, "ranks": tuple(gone["ranks"])}))
                wire.delete_key(_here(name, rank))
                return name
        time.sleep(next(pauses))
    raise _error(_absent([0], deadlines))


def _pauses(readers: int) -> Any:  # noqa: ANN401 - an endless iterator
    """How long to wait between looks: where many look, their looks add up."""
    pause = max(_SHORTEST_PAUSE_S, _PAUSE_PER_RANK_S * readers)
    longest = max(_LONGEST_PAUSE_S, 2 * pause)
    while True:
        yield pause
        pause = min(1.5 * pause, longest)


def _here(name: str, rank: int) -> str:
    return f"{name}/here/{rank}"


def _all(name: str) -> str:
    return f"{name}/all"


def _absent(ranks: list[int], deadlines: Deadlines) -> Failure:
    cause = f"not heard within {deadlines.join:g} s; is fi_flags on for that rank?"
    return Failure("absent", tuple(ranks), "", "join", cause)


def _error(gone: Failure) -> RanksError:
    return RanksError(
        gone.describe(),
        hint="look into that rank's own log, then restart all ranks",
        ranks=list(gone.ranks),
        phase=gone.phase,
        kind=gone.kind,
    )
