"""Ranks that raise, die or stall before, inside and after the forward: the others end, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.crew import Crew, Fault

QUICK = {"autotune_join_s": 3, "autotune_timeout_s": 2, "autotune_stall_s": 2}
PATIENCE_S = 25.0


def says(ended: object, text: str) -> bool:
    return text in f"{ended}"


@pytest.mark.parametrize("flag", ["on", "off"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("where", ["down", "after"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_ends_its_peer_by_name(
    flag: str,
    warm: bool,
    where: str,
    bad: int,
    tmp_path: Path,
) -> None:
    crew = Crew(2, tmp_path, QUICK, limit=PATIENCE_S)
    if warm:
        crew.start(flag)
    ended = crew.start(flag, fault=Fault(bad, where, "raise"))
    victim, peer = ended[bad], ended[1 - bad]
    # A rank inside the model's all-reduce is ended; one that came out raises.
    assert peer.exit_code in (4, 5)
    assert victim.result["error"] in ("WorkloadError", "RanksError")
    for end in ended:
        assert says(end, f"rank {bad}")
        assert says(end, "boom")


@pytest.mark.parametrize("flag", ["on", "off"])
@pytest.mark.parametrize("where", ["before", "down", "after"])
@pytest.mark.parametrize("how", ["die", "stall"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_dies_or_stalls_is_named_by_its_peer(
    flag: str, where: str, how: str, bad: int, tmp_path: Path
) -> None:
    crew = Crew(2, tmp_path, QUICK, limit=PATIENCE_S)
    # A rank that stalls before it joins is nobody's to end; the others must not wait for it.
    abandoned = (bad,) if (how, where) == ("stall", "before") else ()
    ended = crew.start(flag, fault=Fault(bad, where, how), abandoned=abandoned)
    victim, peer = ended[bad], ended[1 - bad]
    if how == "die":
        assert victim.exit_code == 139
    elif not abandoned:
        assert victim.exit_code == 4, "the watchdog ends a rank that is stuck inside the model"
    assert peer.exit_code in (4, 5)
    assert says(peer, f"rank {bad}")


@pytest.mark.parametrize("where", ["before", "down", "after"])
def test_the_death_of_the_rank_that_hosts_the_store_ends_the_others(
    where: str, tmp_path: Path
) -> None:
    crew = Crew(2, tmp_path, QUICK, limit=PATIENCE_S)
    ended = crew.start("on", fault=Fault(0, where, "die"), rank_0_hosts=True)
    assert ended[0].exit_code == 139
    assert ended[1].exit_code in (4, 5)
    assert says(ended[1], "rank 0") or says(ended[1], "store does not answer")


def test_a_rank_that_never_comes_is_named_within_the_join_deadline(tmp_path: Path) -> None:
    crew = Crew(4, tmp_path, QUICK, limit=PATIENCE_S)
    ended = crew.start("on", fault=Fault(2, "before", "raise"))
    for peer in (ended[0], ended[1], ended[3]):
        assert peer.result["error"] == "RanksError"
        assert "rank 2 did not join" in peer.result["message"]
        assert peer.seconds < PATIENCE_S / 2


def test_after_a_failed_start_the_next_one_is_as_if_nothing_had_been(tmp_path: Path) -> None:
    crew = Crew(2, tmp_path, QUICK, limit=PATIENCE_S)
    crew.start("on", fault=Fault(1, "down", "raise"))
    cold, warm = crew.start("on"), crew.start("on")
    assert {end.result["report"]["outcome"] for end in cold} == {"cold"}
    assert {end.result["report"]["outcome"] for end in warm} == {"warm"}
