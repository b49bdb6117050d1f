"""Writes what is made from the settings model: README's table, the samples and the JSON schema.

`make generate` runs it; `tests/test_config.py` fails when a file is not what this would write.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from fi_flags.layers import FLAGS_FILE, PREFIX, toml_key, toml_path, variable
from fi_flags.settings import FlashInferSettings
from fi_flags.values import (
    Mode,
    Word,
    parse_directory,
    parse_names,
    parse_percent,
    parse_seconds,
    parse_switch,
)

ROOT: Final = Path(__file__).parents[1]
FIELDS: Final = FlashInferSettings.model_fields
SCHEMA: Final = "config/fi_flags.schema.json"
MARKS: Final = ("<!-- settings: made by `make generate` -->\n", "<!-- end of settings -->\n")

# What the samples show where the default depends on the machine.
_EXAMPLES: Final = {"autotune_cache_dir": "~/.cache/fi_flags", "rollout_id": ""}
_TEXT: Final = {"type": "string", "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$"}
# Stricter than the loader, which also takes a number as text, for example.
_KINDS: Final[dict[Callable[..., object], dict[str, Any]]] = {
    parse_directory: {"type": "string", "pattern": r"^~?/[^$\u0000-\u001f\u007f-\u009f]*$"},
    parse_names: {"type": "array", "items": _TEXT},
    parse_percent: {"type": "number", "minimum": 0, "maximum": 100},
    parse_seconds: {"type": "number", "exclusiveMinimum": 0},
    parse_switch: {"enum": [True, False, "on", "off"]},
}


def rendered() -> dict[str, str]:
    """The text of every file that is made here, by its path in the repository."""
    return {
        "README.md": with_table((ROOT / "README.md").read_text()),
        ".env.example": dotenv_sample(),
        "config/fi_flags.toml": toml_sample(),
        SCHEMA: json.dumps(schema(), indent=2) + "\n",
    }


def with_table(readme: str) -> str:
    """README with the settings table between its marks."""
    before, _, rest = readme.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    heads = ["setting", f"variable, after `{PREFIX}`", "TOML", "default", "meaning"]
    rows = [heads, *(table_row(name, field) for name, field in FIELDS.items())]
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    lines.insert(1, "|---" * len(heads) + "|\n")
    return before + MARKS[0] + "".join(lines) + MARKS[1] + after


def table_row(name: str, field: FieldInfo) -> list[str]:
    """One setting for README."""
    shown = as_variable(field.default) if not field.is_required() else ""
    default = "see meaning" if field.is_required() else f"`{shown}`" if shown else "none"
    names = (name, variable(name).removeprefix(PREFIX), toml_key(name))
    return [*(f"`{one}`" for one in names), default, str(field.description)]


def dotenv_sample() -> str:
    """`.env.example`: every variable, commented out, at its default."""
    head = (
        '# Settings of fi_flags, each at its default. Copy to .env and remove a "#" to change one.',
        "# The environment wins over .env, and .env over a TOML file; empty counts as not set.\n\n",
    )
    named = comment("the TOML file to read instead of looking for one") + f"#{FLAGS_FILE}=\n"
    entries = [
        comment(str(field.description)) + f"#{variable(name)}={as_variable(example(name))}\n"
        for name, field in FIELDS.items()
    ]
    return "\n".join(head) + "\n".join([named, *entries])


def toml_sample() -> str:
    """`config/fi_flags.toml`: every setting, commented out, at its default."""
    head = (
        f"#:schema ./{Path(SCHEMA).name}\n"
        '# Settings of fi_flags, each at its default. Remove a "#" to change one.\n'
        "# Arguments, environment and .env win over this file; `fi-flags explain` shows who won.\n"
    )
    sections: dict[str, list[str]] = {}
    for name, field in FIELDS.items():
        *section, key = toml_path(name)
        entry = comment(str(field.description)) + f"#{key} = {as_toml(example(name))}\n"
        sections.setdefault("".join(section), [head] if not sections else []).append(entry)
    return "\n".join(
        (f"[{section}]\n" if section else "") + "\n".join(entries)
        for section, entries in sorted(sections.items())
    )


def schema() -> dict[str, Any]:
    """The JSON schema of the TOML file, for editors."""
    document = table_schema()
    for name, field in FIELDS.items():
        *section, key = toml_path(name)
        table = document
        if section:
            table = document["properties"].setdefault(section[0], table_schema())
        told = {"description": field.description, **kind(field)}
        if not field.is_required() and field.default is not None:
            told["default"] = json.loads(as_toml(field.default))
        table["properties"][key] = told
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Settings of fi_flags",
        **document,
    }


def table_schema() -> dict[str, Any]:
    """A TOML table that holds nothing but what is added to it."""
    return {"type": "object", "additionalProperties": False, "properties": {}}


def kind(field: FieldInfo) -> dict[str, Any]:
    """What a setting takes, by its type if that is a list of words, else by its parser."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, Word):
        words: list[Any] = [word.value for word in field.annotation]
        return {"enum": words + [True, False] * (field.annotation is Mode)}
    parsers = [one.func for one in field.metadata if isinstance(one, BeforeValidator)]
    return next((_KINDS[parser] for parser in parsers if parser in _KINDS), _TEXT)


def example(name: str) -> object:
    """A setting's default; where there is none, what the samples show."""
    return _EXAMPLES[name] if FIELDS[name].is_required() else FIELDS[name].default


def as_variable(value: object) -> str:
    """A value as the environment has it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | frozenset):
        return ",".join(sorted(value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def as_toml(value: object) -> str:
    """A value as TOML has it; for all that occurs here, JSON has it alike."""
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple | frozenset):
        return json.dumps(sorted(value))
    return as_variable(value) if isinstance(value, float) else json.dumps(as_variable(value))


def comment(text: str) -> str:
    """A text as comment lines."""
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, 96))


if __name__ == "__main__":
    for name, text in rendered().items():
        (ROOT / name).write_text(text)
