"""Pure: parse, check, merge and digest a table; no file is opened here.

A table is the JSON object that FlashInfer's ``AutoTuner.save_configs`` writes: file keys mapped
to ``[runner, tactic, ...]``, and beside them ``_metadata``, which stamps the environment. Our own
block sits inside ``_metadata``, because FlashInfer ignores names there that it does not know; so
plain ``load_configs`` reads our files.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = [
    "DEFAULT_TACTIC",
    "MAX_BYTES",
    "SCHEMA",
    "Entries",
    "Status",
    "Table",
    "Verdict",
    "chosen",
    "content_digest",
    "judge",
    "merge",
    "op_of",
    "parse",
    "rival_key",
    "serving_digest",
    "spelt",
    "split_ops",
    "surplus",
    "unanswered",
]

Entries: TypeAlias = dict[str, list[Any]]
"""File key to ``[runner, tactic]``, from some releases on with a policy and a timing record."""

DEFAULT_TACTIC = -1
"""What FlashInfer serves where it has no tactic: the first runner's own choice."""

SCHEMA = 1
MAX_BYTES = 16 * 1024 * 1024
"""Larger files are refused unread: the largest real table known is under 10 MB."""

_BLOCK = "fi_flags"
_METADATA = "_metadata"
_NOT_ENTRIES = (_METADATA, "_records", "_generation")
_MAX_DEPTH = 32
_LONGEST_S = 1e9  # decades; a larger integer may be none that a float can hold

# FlashInfer's file key is str((op, runner, profile, extras)): two quoted names, then the rest.
_NAME = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_KEY = re.compile(rf"\((?P<op>{_NAME}), (?P<runner>{_NAME}), (?P<rest>.*)\)", re.DOTALL)
# What repr() puts into a name that is not plain text.
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4}|.)", re.DOTALL)


class Status(str, enum.Enum):
    """What was found where a table should be; imported: none, but others of its environment."""

    ABSENT = "absent"
    IMPORTED = "imported"
    UNREADABLE = "unreadable"
    FOREIGN = "foreign"
    EMPTY = "empty"
    SUSPECT = "suspect"
    OK = "ok"


@dataclass(frozen=True)
class Table:
    """A table in memory: its entries, FlashInfer's environment stamps, and our own block."""

    entries: Entries
    stamps: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def cold_seconds(self) -> float:
        """How long the cold start took that made the table, or 0 if it does not say."""
        seconds = self.about.get("cold_seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            return 0.0
        return float(min(max(0, seconds), _LONGEST_S))

    def render(self) -> bytes:
        """The file's bytes: FlashInfer's format, metadata first, keys sorted, our digest fresh."""
        about = {"schema": SCHEMA, **self.about, "digest": content_digest(self.entries)}
        document: dict[str, Any] = {_METADATA: {**self.stamps, _BLOCK: about}}
        document.update(sorted(self.entries.items()))
        return (json.dumps(document, indent=2) + "\n").encode("ascii")


@dataclass(frozen=True)
class Verdict:
    """What a reader found: a status, the table if it may be used, and why it may not."""

    status: Status
    table: Table | None = None
    why: str = ""


def parse(data: bytes) -> Table:
    """Read a table's bytes, ours or plain FlashInfer's.

    Raises:
        ValueError: The bytes are not a table; the message says which field or entry is wrong.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, more than {MAX_BYTES}")
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not _is_flat(document):  # what we write again, a recursive encoder must survive
        raise ValueError("nested too deeply")
    if not isinstance(document, dict):
        raise ValueError(f"a JSON {type(document).__name__} where an object should be")
    stamps = document.get(_METADATA)
    if not isinstance(stamps, dict):
        raise ValueError("no _metadata object")
    about = stamps.pop(_BLOCK, {})
    if not isinstance(about, dict):
        raise ValueError(f"_metadata.{_BLOCK} is not an object")
    entries = {key: value for key, value in document.items() if key not in _NOT_ENTRIES}
    for key, value in entries.items():
        wrong = _wrong_entry(key, value)
        if wrong:
            raise ValueError(f"entry {_short(key)}: {wrong}")
    return Table(entries=entries, stamps=stamps, about=about)


def judge(data: bytes, stamps: Mapping[str, str]) -> Verdict:
    """Decide whether a table's bytes may be trusted in the environment that stamps describe.

    FlashInfer's own rule holds for stamps: a saved ``"*"`` matches anything, names that the
    running FlashInfer does not stamp are ignored, and each other one must be equal. Where a writer
    could not tell a stamp, the table belongs to nobody: suspect, not foreign.
    """
    try:
        table = parse(data)
    except ValueError as error:
        return Verdict(Status.SUSPECT, why=_short(str(error), 200))
    there = {name: str(table.stamps.get(name)) for name in stamps}
    differing = {
        name: f"{name} is {_short(there[name], 40)} there, {_short(current, 40)} here"
        # The GPU first, which tells most: what is long may be cut at its end.
        for name, current in sorted(stamps.items(), key=lambda stamp: stamp[0] != "gpu")
        if table.stamps.get(name) not in (current, "*")
    }
    if differing:
        untold = all(table.stamps.get(name) in (None, "unknown", "None") for name in differing)
        status = Status.SUSPECT if untold else Status.FOREIGN
        return Verdict(status, why="; ".join(differing.values()))
    if not table.entries:
        return Verdict(Status.EMPTY, why="no entries")
    schema = table.about.get("schema")
    if type(schema) is not int or schema != SCHEMA:  # to Python, 1 and True are equal
        why = f"schema {schema!r}, not {SCHEMA}"
        return Verdict(Status.SUSPECT, why=_short(why, 200))
    if table.about.get("digest") != content_digest(table.entries):
        return Verdict(Status.SUSPECT, why="the entries do not match their digest")
    return Verdict(Status.OK, table=table)


def op_of(key: str) -> str:
    """The op that a file key belongs to, or an empty string if the key has another form."""
    match = _KEY.fullmatch(key)
    return _unquote(match["op"]) if match else ""


def spelt(runner: str, tactic: Any) -> str:  # noqa: ANN401 - a tactic is whatever its runner likes
    """A runner's tactic as one text, the same whether it comes from a file or from memory."""
    return json.dumps([runner, tactic])


def rival_key(key: str) -> str:
    """What two file keys share when they answer the same call: all but the runner.

    FlashInfer stores the winning runner's key only, so ranks that chose different runners for one
    call share no key; they do share this.
    """
    match = _KEY.fullmatch(key)
    return f"({match['op']}, {match['rest']})" if match else key


def surplus(base: Iterable[str], entries: Entries) -> Entries:
    """The entries whose calls no key of base answers."""
    answered = {rival_key(key) for key in base}
    return {key: entry for key, entry in entries.items() if rival_key(key) not in answered}


def unanswered(
    base: Collection[str], entries: Entries, sites: Iterable[tuple[str, ...]]
) -> Entries:
    """The entries that serve calls which no key of base answers, call by call.

    Args:
        base: File keys that are there already.
        entries: What could be added.
        sites: Calls, each as the file keys of all runners that could serve it.
    """
    lacking = [site for site in sites if not any(key in base for key in site)]
    wanted = {key: entries[key] for site in lacking for key in site if key in entries}
    unseen = set(entries).difference(*sites) if sites else set(entries)
    return wanted | surplus(base, {key: entries[key] for key in sorted(unseen)})


def merge(tables: Iterable[Entries]) -> Entries:
    """One table from several: for each call the first table that answers it wins, whole.

    Give the leader's table first, then the others in the order of their ranks. FlashInfer's default
    in place of a tactic is no answer, so it wins only where no table has one.
    """
    tables = list(tables)
    merged: Entries = {}
    for entries in [*(chosen(entries) for entries in tables), *tables]:
        merged.update(surplus(merged, entries))
    return merged


def chosen(entries: Entries) -> Entries:
    """The entries of calls that have a tactic; the others were given up (``Tuner.give_up``)."""
    calls = {rival_key(key) for key, entry in entries.items() if entry[1] != DEFAULT_TACTIC}
    return {key: entry for key, entry in entries.items() if rival_key(key) in calls}


def split_ops(entries: Entries, ops: Collection[str]) -> tuple[Entries, Entries]:
    """Entries of other ops, and entries of these ops."""
    chosen = {key: entry for key, entry in entries.items() if op_of(key) in ops} if ops else {}
    return {key: entry for key, entry in entries.items() if key not in chosen}, chosen


def content_digest(entries: Entries) -> str:
    """A digest of everything in the entries, timing records too; guards a file's integrity."""
    return _digest(entries)


def serving_digest(entries: Entries) -> str:
    """A digest of what is served: runner and tactic of each key. Timings do not count."""
    return _digest({key: entry[:2] for key, entry in entries.items()})


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _wrong_entry(key: str, value: object) -> str:
    # FlashInfer's load_configs indexes [0] and [1] and makes a tuple of [2]: anything that would
    # raise there, or be turned into something that no runner understands, is refused here.
    if not isinstance(value, list) or len(value) < 2:  # noqa: PLR2004
        return "not a list of runner and tactic"
    runner, tactic = value[0], value[1]
    if not isinstance(runner, str) or not runner:
        return "the runner is not a name"
    match = _KEY.fullmatch(key)
    if match and _unquote(match["runner"]) != runner:
        return f"runner {_short(runner)} under another runner's key"
    if not _is_tactic(tactic):
        return "the tactic is neither a number, a string, nor a list of these"
    if len(value) > 2 and not (isinstance(value[2], list) and _is_tactic(value[2])):  # noqa: PLR2004
        return "the policy is not a list"
    return ""


def _is_tactic(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_tactic, value))
    return value is None or isinstance(value, str | int | float)


def _is_flat(document: object) -> bool:
    level = [document]
    for _ in range(_MAX_DEPTH):
        inner = [value for value in level if isinstance(value, dict | list)]
        level = [
            item
            for value in inner
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    return not level


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999 reads as infinity, which JSON cannot hold
        raise ValueError(f"{_short(text)} is not a number")
    return value


def _unquote(quoted: str) -> str:
    return _ESCAPE.sub(_unescape, quoted[1:-1])


def _unescape(match: re.Match[str]) -> str:
    text = match[1]
    if len(text) > 1:
        return chr(int(text[1:], 16))
    return {"n": "\n", "r": "\r", "t": "\t"}.get(text, text)


def _short(text: str, limit: int = 80) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be printed
    return text if len(text) <= limit else text[: limit - 1] + "…"
