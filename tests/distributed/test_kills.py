"""SIGKILL in every phase, on the leader and on a worker; and many engines in one directory."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fi_flags.store import Store
from fi_flags.table import Status
from tests.distributed.crew import Crew, Ended, Fault

QUICK = {"autotune_join_s": 5, "autotune_timeout_s": 2, "autotune_stall_s": 5}
PATIENCE_S = 25.0
ENGINES = 8

# Where a rank is killed, whether the start is a warm one, and whether the peer is done by then: who
# is killed after the last vote is missed in the model's next collective, not in ours.
PLACES = [
    ("vote:1", False, False),
    ("phase:run", False, False),
    ("down", False, False),
    ("vote:2", False, False),
    ("phase:merge", False, False),
    ("vote:3", False, False),
    ("phase:publish", False, True),
    ("phase:load", True, False),
    ("vote:2", True, False),
    ("phase:run", True, False),
    ("vote:3", True, False),
]
IN_CI = {("phase:merge", False), ("phase:run", True)}


def outcomes(ended: list[Ended]) -> set[str]:
    return {end.result.get("report", {}).get("outcome", "none") for end in ended}


def only_here(rank: int) -> tuple[str, ...]:
    """Ops that differ from rank to rank, so that a merge follows every cold run."""
    return (f"only{rank}",)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("where", "warm", "may_end_well"),
    [
        pytest.param(*place, marks=[] if place[:2] in IN_CI else [pytest.mark.full])
        for place in PLACES
    ],
)
def test_a_rank_killed_in_any_phase_ends_its_peer_by_name_and_the_next_start_is_whole(
    where: str, warm: bool, may_end_well: bool, victim: int, tmp_path: Path
) -> None:
    if (where, victim) == ("phase:publish", 1):
        pytest.skip("the other rank publishes")
    crew = Crew(2, tmp_path, QUICK, limit=PATIENCE_S)
    if warm:
        assert outcomes(crew.start("on", ops=only_here)) == {"cold"}
        (path,) = (tmp_path / "tables").rglob("*.json")
        before = path.read_bytes()
    ended = crew.start("on", ops=only_here, fault=Fault(victim, where, "kill"))
    dead, peer = ended[victim], ended[1 - victim]
    assert dead.exit_code == -signal.SIGKILL
    assert peer.seconds < 20
    if not may_end_well:
        assert peer.exit_code in (4, 5)
        assert f"rank {victim}" in f"{peer.result}{peer.log}"
    if warm:
        assert path.read_bytes() == before, "a death costs the table nothing"
    after = crew.start("on", ops=only_here)
    assert outcomes(after) == ({"warm"} if warm else {"cold"})
    digests = {rank["digest"] for end in after for rank in end.result["report"]["ranks"]}
    assert len(digests) == 1
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("*.trial"))
    assert not list(tmp_path.rglob("*.quarantined-*"))


def test_eight_engines_that_start_cold_in_one_directory_and_a_reader_that_sees_no_torn_table(
    tmp_path: Path,
) -> None:
    done, statuses, torn = threading.Event(), set(), []

    def read() -> None:
        while not done.wait(0.0005):
            for path in (tmp_path / "tables").rglob("*.json"):
                found = Store(path).read({})
                statuses.add(found.status)
                if found.status is not Status.OK:
                    torn.append(f"{found.status}: {found.why}")

    def engine(_number: int) -> list[Ended]:
        return Crew(1, tmp_path).start("on")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with ThreadPoolExecutor(ENGINES) as pool:
            ended = [one for starts in pool.map(engine, range(ENGINES)) for one in starts]
    finally:
        done.set()
        reader.join()
    assert [one.exit_code for one in ended] == [0] * ENGINES
    assert outcomes(ended) <= {"cold", "warm"}
    assert not torn
    assert statuses == {Status.OK}
    assert len(list((tmp_path / "tables").rglob("*.json"))) == 1
    leftovers = [p.name for p in (tmp_path / "tables").rglob("*") if ".tmp" in p.name]
    assert not leftovers
    assert not list(tmp_path.rglob("*.quarantined-*"))
    assert outcomes(Crew(1, tmp_path).start("on")) == {"warm"}
