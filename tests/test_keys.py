"""Keys and memory values as every supported release spells them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_flags.keys import KeyFormat, extras_of, runner_of
from fi_flags.table import op_of, rival_key

KEY = ("gemm", "Alpha", 12345, ((4, 8),), ("8x4", 1))


@pytest.mark.parametrize(
    ("with_extras", "name"),
    [
        (True, "('gemm', 'Alpha', ((4, 8),), ('8x4', 1))"),
        (False, "('gemm', 'Alpha', ((4, 8),))"),
    ],
)
def test_a_tuple_is_called_by_its_fields_but_the_hash(with_extras: bool, name: str) -> None:
    assert KeyFormat(with_extras).file_key(KEY) == name
    assert (op_of(name), runner_of(KEY), extras_of(KEY)) == ("gemm", "Alpha", ("8x4", 1))


def test_a_key_that_knows_its_name_is_asked() -> None:
    class Key:
        file_key = "its own"
        runner_class_name = "Beta"
        extras = (2,)

    assert KeyFormat(with_extras=False).file_key(Key()) == "its own"
    assert (runner_of(Key()), extras_of(Key())) == ("Beta", (2,))


def test_runners_of_one_call_are_rivals_in_both_formats() -> None:
    other = (KEY[0], "Beta", *KEY[2:])
    for with_extras in (True, False):
        name = KeyFormat(with_extras).file_key
        assert rival_key(name(KEY)) == rival_key(name(other))
        assert name(KEY) != name(other)


tactics = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.integers()))


@given(st.booleans(), st.integers(0, 9), tactics, tactics)
def test_a_tactic_put_into_a_value_is_what_comes_out(
    with_index: bool, index: int, first: Any, second: Any
) -> None:
    form = KeyFormat(with_index=with_index)
    value = form.value(index, first)
    assert len(value) == 2 + with_index
    assert form.tactic(value) == first
    changed = form.with_tactic(value, second)
    assert form.tactic(changed) == second
    assert form.with_tactic(changed, first) == value
    assert value[0] == index or not with_index
