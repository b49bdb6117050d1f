"""FlashInfer does what we rely on: in the oldest release with its keys, a middle one, the newest.

`make compat` runs the same checks on every supported release, and `make full` on all of these.
"""

from __future__ import annotations

import pytest

from tests.contract.releases import MARKS, OLDER, PAGE, PASSED, check, column, installed, names

NOT_IN_CI = {*OLDER} - {"0.6.12", "0.6.18.post1"}


@pytest.mark.timeout(1000)  # the first time, a release is downloaded
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(version, marks=[pytest.mark.full] if version in NOT_IN_CI else [])
        for version in (*OLDER, installed())
    ],
)
def test_release_passes_every_check_that_it_can_and_the_page_says_so(version: str) -> None:
    found = check(version)
    assert {name: how for name, how in found.items() if how.startswith("failed")} == {}
    assert PASSED in found.values()
    page = column(PAGE.read_text(), version)
    assert {name: mark == "✓" for name, mark in page.items() if name != "check"} == {
        name.removeprefix("test_").replace("_", " "): how == PASSED for name, how in found.items()
    }


def test_page_holds_the_table_of_names_as_it_is_in_the_code() -> None:
    made = PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert made.endswith(f"\n{names()}\n")
