from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_flags.facts import Facts
from fi_flags.rollout import draw, preview, roll_out
from fi_flags.settings import FlashInferSettings

HERE = Facts(
    flashinfer="0.7.4", torch=None, python="3.11", host="Node-07.cluster", capability=(9, 0)
)
texts = st.text(st.characters(codec="utf-8"), max_size=8)


def included(facts: Facts = HERE, **settings: Any) -> bool:
    given_settings = {
        "rollout_id": "me",
        **{f"rollout_{name}": value for name, value in settings.items()},
    }
    return roll_out(
        FlashInferSettings.load(environ={}, dotenv=None, **given_settings), facts
    ).included


def test_draw_is_the_same_everywhere_and_for_ever() -> None:
    assert draw("", "me") == pytest.approx(28.16, abs=0.01)
    assert draw("salt", "me") == pytest.approx(65.62, abs=0.01)


@given(texts, texts)
def test_draw_lies_within_the_scale(salt: str, identity: str) -> None:
    assert 0 <= draw(salt, identity) < 100
    assert draw(salt, identity) == draw(salt, identity)


@given(texts.filter(str.isprintable), st.floats(0, 100), st.floats(0, 100))
def test_raising_the_percentage_turns_nobody_off(identity: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    if included(percent=low, id=identity):
        assert included(percent=high, id=identity)


@pytest.mark.parametrize("percent", [1, 10, 50, 90])
def test_share_is_near_the_percentage(percent: float) -> None:
    drawn = [draw("a", f"host-{number}") < percent for number in range(10_000)]
    assert sum(drawn) / 100 == pytest.approx(percent, abs=1.5)


def test_another_salt_draws_another_sample() -> None:
    ids = [f"host-{number}" for number in range(1000)]
    one, other = ({name for name in ids if draw(salt, name) < 10} for salt in ("a", "b"))
    assert len(one & other) < len(one) / 2
    assert draw("a", "bc") != draw("ab", "c")


@given(st.lists(texts, max_size=9), st.floats(0, 100), texts.filter(str.isprintable))
def test_preview_draws_each_id_once_as_the_roll_out_does(
    ids: list[str], percent: float, salt: str
) -> None:
    settings = FlashInferSettings.load(
        environ={}, dotenv=None, rollout_percent=percent, rollout_salt=salt
    )
    places = preview(settings, ids)
    assert [one.id for one in places] == list(dict.fromkeys(ids))
    for one in places:
        assert one.place == draw(settings.rollout_salt, one.id)
        if one.id.strip() == one.id and one.id.isprintable() and one.id:
            assert one.included is included(percent=percent, salt=salt, id=one.id)


def test_nobody_at_nought_and_everybody_at_a_hundred() -> None:
    for number in range(200):
        assert not included(percent=0, id=str(number))
        assert included(percent=100, id=str(number))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"hosts": "node-*"}, True),
        ({"hosts": "NODE-0?.*, x"}, True),
        ({"hosts": "node-07"}, False),
        ({"hosts": []}, False),
        ({"deny_hosts": "*-07.*"}, False),
        ({"hosts": "node-07.cluster", "deny_hosts": "node-07.cluster"}, False),
        ({"deny_hosts": "other"}, True),
        ({"archs": "sm90"}, True),
        ({"archs": "SM9*, sm100"}, True),
        ({"archs": "sm100"}, False),
        ({"hosts": "node-*", "percent": 0}, False),
    ],
)
def test_hosts_and_architectures(settings: dict[str, Any], expected: bool) -> None:
    assert included(**settings) is expected


def test_machine_without_a_gpu_is_in_for_any_architecture_only() -> None:
    bare = replace(HERE, capability=None)
    assert included(bare)
    assert not included(bare, archs="sm90")


def test_why_names_the_rule() -> None:
    settings = FlashInferSettings.load(environ={}, dotenv=None, rollout_deny_hosts="a*,*.cluster")
    assert roll_out(settings, HERE).why == "host Node-07.cluster is denied by *.cluster"
