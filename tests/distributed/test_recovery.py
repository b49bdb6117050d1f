"""Starts that die on a loaded table: two in a row set it aside; one without it brings it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from fi_flags import logs
from tests.distributed.crew import Crew, Ended, Fault

QUICK = {"autotune_join_s": 5, "autotune_timeout_s": 2, "autotune_stall_s": 2}


def outcome(ended: list[Ended]) -> str:
    (outcome,) = {end.result["report"]["outcome"] for end in ended}
    return str(outcome)


def digest(ended: list[Ended]) -> str:
    (one,) = {rank["digest"] for end in ended for rank in end.result["report"]["ranks"]}
    return str(one)


def aside(place: Path) -> list[str]:
    return sorted(path.name for path in place.rglob("*.quarantined-*"))


@pytest.mark.parametrize("bad", [0, 1])
def test_two_deaths_in_a_row_condemn_a_table_and_the_next_start_tunes(
    bad: int, tmp_path: Path
) -> None:
    crew = Crew(2, tmp_path, QUICK)
    assert outcome(crew.start("on")) == "cold"
    first = crew.start("on", fault=Fault(bad, "down", "die"))
    assert logs.START_DIED not in first[0].log
    second = crew.start("on", fault=Fault(bad, "down", "die"))
    assert logs.START_DIED in second[0].log
    assert not aside(tmp_path)
    third = crew.start("on")
    assert outcome(third) == "cold"
    assert "2 starts in a row died on" in third[0].log
    assert [name.rpartition("-")[2] for name in aside(tmp_path)] == ["starts_died"]
    fourth = crew.start("on")
    assert outcome(fourth) == "warm"
    assert digest(third) == digest(fourth)
    assert not list(tmp_path.rglob("*.trial"))


def test_one_death_and_a_start_that_lives_condemn_nothing(tmp_path: Path) -> None:
    crew = Crew(2, tmp_path, QUICK)
    cold = crew.start("on")
    for _ in range(2):
        crew.start("on", fault=Fault(1, "down", "die"))
        warm = crew.start("on")
        assert outcome(warm) == "warm"
        assert digest(warm) == digest(cold)
    assert not aside(tmp_path)


def test_a_table_comes_back_when_a_start_without_it_dies_as_well(tmp_path: Path) -> None:
    crew = Crew(2, tmp_path, QUICK)
    cold = crew.start("on")
    for _ in range(3):
        crew.start("on", fault=Fault(1, "down", "die"))
    assert len(aside(tmp_path)) == 1, "the third start went without it, and died"
    again = crew.start("on")
    assert outcome(again) == "warm"
    assert digest(again) == digest(cold)
    assert logs.BROUGHT_BACK in again[0].log + again[1].log
    assert not aside(tmp_path)
