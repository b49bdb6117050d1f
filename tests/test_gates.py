from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_flags.facts import UNREADABLE, Facts
from fi_flags.gates import Effect, Gate, load_gates


def facts(version: str | None) -> Facts:
    return Facts(flashinfer=version, torch=None, python="3.11", host="here")


def gate(affected: str) -> Gate:
    return Gate("g", "title", "https://example.invalid/1", affected, Effect.CLOSE_CACHE)


@pytest.mark.parametrize(
    ("version", "closed"),
    [
        ("0.6.8", True),
        ("0.6.12", True),
        ("0.6.12.post1", True),
        ("0.6.12+cu130", True),
        ("0.6.13.dev20260520", True),
        ("0.6.13rc1", True),
        ("0.6.13", False),
        ("0.6.13+cu130", False),
        ("0.6.13.post1", False),
        ("0.6.14.dev1", False),
        ("0.7.4", False),
        ("0.10.0", False),
        ("1!0.1", False),
        (UNREADABLE, True),
        ("", True),
        ("0.6.x", True),
        (None, True),
    ],
)
def test_file_key_gate_closes_before_the_fix(version: str | None, closed: bool) -> None:
    (file_key,) = load_gates()
    assert file_key.closed(facts(version)) is closed


@pytest.mark.parametrize(
    ("affected", "version", "closed"),
    [
        (">=0.6.17,<0.6.19", "0.6.18.post1", True),
        (">=0.6.17,<0.6.19", "0.6.16.post9", False),
        (">0.6.18", "0.6.18.post1", True),
        (">0.6.18", "0.6.18+cu130", False),
        ("<=0.6.18", "0.6.18+cu130", True),
        ("==0.6.18", "0.6.18+cu130", True),
        ("==0.6.18", "0.6.18.post1", False),
        ("!=0.6.18", "0.6.18", False),
    ],
)
def test_versions_compare_in_plain_order(affected: str, version: str, closed: bool) -> None:
    assert gate(affected).closed(facts(version)) is closed


@given(st.text(max_size=12) | st.none())
def test_any_version_is_open_or_closed(version: str | None) -> None:
    assert all(isinstance(one.closed(facts(version)), bool) for one in load_gates())


def test_shipped_gates_are_complete_and_unlike() -> None:
    gates = load_gates()
    assert len({one.id for one in gates}) == len(gates) == 1
    for one in gates:
        assert one.title
        assert one.url.startswith("https://github.com/")
        assert isinstance(one.effect, Effect)
