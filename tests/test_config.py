"""The files in config/: what is generated is up to date, and each loads and decides as it says."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fi_flags.decision import Reason, decide
from fi_flags.errors import SettingsError
from fi_flags.facts import Facts
from fi_flags.layers import toml_path
from fi_flags.settings import FlashInferSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "config"
FILES = sorted(path.name for path in CONFIG.glob("*.toml"))
GENERATED = runpy.run_path(str(ROOT / "docs" / "generate.py"))
SCHEMA = json.loads((CONFIG / "fi_flags.schema.json").read_text())
HERE = Facts(
    flashinfer="0.7.4", torch=None, python="3.11", host="canary-1.cluster", capability=(9, 0)
)
KNOWN = {
    *("$schema", "title", "description", "default", "type", "properties", "additionalProperties"),
    *("items", "enum", "pattern", "minimum", "maximum", "exclusiveMinimum"),
}


def load(file: str, **init: Any) -> FlashInferSettings:
    return FlashInferSettings.load(environ={}, dotenv=None, config=CONFIG / file, **init)


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a schema that uses no more than ours does."""
    assert set(schema) <= KNOWN, schema
    kind = schema.get("type")
    if kind == "object":
        known = schema["properties"]
        return isinstance(value, dict) and all(
            name in known and valid(deep, known[name]) for name, deep in value.items()
        )
    if kind == "array":
        return isinstance(value, list) and all(valid(item, schema["items"]) for item in value)
    if kind == "string":
        return isinstance(value, str) and bool(re.search(schema["pattern"], value))
    if kind == "number":
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return bool(low <= value <= high and value > schema.get("exclusiveMinimum", -math.inf))
    return any(value == word and type(value) is type(word) for word in schema["enum"])


def of_field(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = SCHEMA
    for key in toml_path(name):
        schema = schema["properties"][key]
    return schema


# -- generated ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED["rendered"]())
def test_generated_file_is_what_make_generate_would_write(name: str) -> None:
    text: str = GENERATED["rendered"]()[name]
    assert (ROOT / name).read_text() == text, "run `make generate`"


def test_readme_is_changed_between_the_marks_only() -> None:
    before, after = GENERATED["MARKS"]
    made = GENERATED["with_table"](f"above\n{before}STALE\n{after}below\n")
    assert made.startswith(f"above\n{before}| setting |")
    assert made.endswith(f"|\n{after}below\n")
    assert "STALE" not in made


# -- the files ------------------------------------------------------------------------------


def decided(file: str, host: str, identity: str) -> Reason:
    settings = load(file, rollout_id=identity)
    return decide(settings, replace(HERE, host=host), ()).reason


@pytest.mark.parametrize(
    ("file", "host", "identity", "reason"),
    [
        ("fi_flags.toml", "any", "a", Reason.DEFAULT_OFF),
        ("canary.toml", "canary-1.cluster", "team-29", Reason.AUTO_ELIGIBLE),
        ("canary.toml", "GPU-07.cluster", "team-29", Reason.AUTO_ELIGIBLE),
        ("canary.toml", "canary-1.cluster", "team-1", Reason.ROLLOUT_EXCLUDED),
        ("canary.toml", "gpu-17.cluster", "team-29", Reason.ROLLOUT_EXCLUDED),
        ("production.toml", "any", "a", Reason.OPERATOR_ON),
        ("ci.toml", "any", "a", Reason.OPERATOR_ON),
    ],
)
def test_file_leads_to_its_decision(file: str, host: str, identity: str, reason: Reason) -> None:
    assert decided(file, host, identity) is reason


def test_every_file_is_checked_for_its_decision() -> None:
    (mark,) = [
        mark
        for mark in vars(test_file_leads_to_its_decision)["pytestmark"]
        if mark.name == "parametrize"
    ]
    assert sorted({case[0] for case in mark.args[1]}) == FILES


def test_canary_takes_a_tenth() -> None:
    settings = load("canary.toml")
    assert settings.rollout_percent == 10
    assert len(settings.rollout_hosts) == 2
    reasons = [decided("canary.toml", "canary-1", str(number)) for number in range(1000)]
    assert reasons.count(Reason.AUTO_ELIGIBLE) / 10 == pytest.approx(10, abs=3)


def test_ci_reads_nothing_that_an_earlier_job_left_and_waits_minutes_at_most() -> None:
    settings = load("ci.toml")
    assert settings.autotune_cache_access == "wo"
    assert max(settings.autotune_join_s, settings.autotune_timeout_s) <= 60
    assert settings.autotune_stall_s <= 300


@pytest.mark.parametrize("file", FILES)
def test_file_names_the_schema_and_fits_it(file: str) -> None:
    text = (CONFIG / file).read_text()
    (named,) = re.findall(r"^#:schema \./(.*)$", text.splitlines()[0])
    assert (CONFIG / named).is_file()
    assert valid(tomllib.loads(text), SCHEMA)
    assert load(file).warnings == () or file == "canary.toml"


# -- the schema -----------------------------------------------------------------------------

LITERALS: list[Any] = [
    *("off", "on", "auto", "shadow", "force", "rw", "ro", "all", "leader", "raise", "json"),
    *("", " ", "a,b", "a\x07", "/t", "~/t", "~x/t", "t", "/t/$X", "/t\n", "maybe", "1"),
    *(True, False, 0, 1, -1, 0.5, 100, 101, 1e9, [], ["a"], ["a\x7f"], [1], {}, {"a": 1}),
]


@pytest.mark.parametrize("name", FlashInferSettings.model_fields)
def test_schema_takes_nothing_that_the_loader_refuses(name: str) -> None:
    schema = of_field(name)
    taken = [value for value in LITERALS if valid(value, schema)]
    assert 0 < len(taken) < len(LITERALS)
    assert valid(schema.get("default", taken[0]), schema)
    for value in taken:
        given: dict[str, Any] = {name: value}
        FlashInferSettings.load(environ={}, dotenv=None, **given)


@pytest.mark.parametrize("words", [["persistent_cache"], ["autotune", "join_s"], ["rollout", "id"]])
def test_schema_knows_no_other_name(words: list[str]) -> None:
    document: dict[str, Any] = {f"{words[-1]}x": "off"}
    for table in reversed(words[:-1]):
        document = {table: document}
    assert not valid(document, SCHEMA)
    assert SCHEMA["additionalProperties"] is False
    given: dict[str, Any] = {f"{words[-1]}x": "off"}
    with pytest.raises(SettingsError):
        FlashInferSettings(**given)
