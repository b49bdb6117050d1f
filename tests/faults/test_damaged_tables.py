"""F16: real H200 tables, cut at every byte and mutated at random: a miss, never an error.

A seed makes a test's mutations, so that a failure is found again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fi_flags.table import Status, Table, judge, parse

REAL = sorted((Path(__file__).parents[1] / "data").glob("*.json"))
MUTATIONS = 10_000
each_table = pytest.mark.parametrize("path", REAL, ids=lambda path: str(path.stem))


def kept(path: Path) -> tuple[Table, bytes]:
    table = parse(path.read_bytes())
    return table, table.render()


@each_table
def test_a_real_table_cut_at_any_byte_is_a_miss(path: Path) -> None:
    table, whole = kept(path)
    assert judge(whole, table.stamps).status is Status.OK
    for length in range(len(whole) - 1):  # the last byte is a line feed
        verdict = judge(whole[:length], table.stamps)
        assert verdict.status is Status.SUSPECT, length
        assert verdict.table is None
        assert verdict.why


def flip_a_bit(draw: random.Random, data: bytearray) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def write_a_byte(draw: random.Random, data: bytearray) -> None:
    data[draw.randrange(len(data))] = draw.choice(b'\x00\xff"{}[],:0-9eE.\\nN')


def cut_out(draw: random.Random, data: bytearray) -> None:
    at = draw.randrange(len(data))
    del data[at : at + draw.randint(1, 400)]


def repeat(draw: random.Random, data: bytearray) -> None:
    at = draw.randrange(len(data))
    data[at:at] = data[at : at + draw.randint(1, 400)]


def move(draw: random.Random, data: bytearray) -> None:
    at, size = draw.randrange(len(data)), draw.randint(1, 400)
    part = data[at : at + size]
    del data[at : at + size]
    to = draw.randint(0, len(data))
    data[to:to] = part


def blank_a_page(draw: random.Random, data: bytearray) -> None:
    """What a file system leaves of a page that never came to the disk."""
    at = draw.randrange(len(data)) // 4096 * 4096
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))


DAMAGE: list[Callable[[random.Random, bytearray], None]] = [
    flip_a_bit, write_a_byte, cut_out, repeat, move, blank_a_page,
]  # fmt: skip


def said(data: bytes) -> tuple[Any, Any]:
    document = json.loads(data)
    metadata = document.pop("_metadata")
    return document, {name: metadata[name] for name in metadata if name != "fi_flags"}


@each_table
def test_a_mutated_real_table_is_ok_only_if_it_says_the_same(path: Path) -> None:
    table, whole = kept(path)
    draw = random.Random(path.stem)  # noqa: S311 - a seed, no secret
    refused = 0
    for number in range(MUTATIONS):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            draw.choice(DAMAGE)(draw, data)
        verdict = judge(bytes(data), table.stamps)
        if verdict.status is Status.OK:
            assert verdict.table is not None, number
            entries, stamps = said(bytes(data))
            assert entries == said(whole)[0], number
            assert {name: stamps.get(name) for name in table.stamps} == table.stamps, number
        else:
            refused += 1
            assert verdict.table is None, number
            assert verdict.why, number
    assert refused > 0.9 * MUTATIONS


def positions(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value stands in a document, for every value in it."""
    found = [path]
    if isinstance(value, dict | list):
        names = value if isinstance(value, dict) else range(len(value))
        for name in names:
            found += positions(value[name], (*path, name))
    return found


ODD: list[Any] = [None, True, -1, 2**70, 1.5, "text", [], {}, [None], {"a": [1]}]


@each_table
def test_a_wrong_type_at_any_place_of_a_real_table_is_a_miss(path: Path) -> None:
    table, whole = kept(path)
    document = json.loads(whole)
    keys = [name for name in document if name != "_metadata"][:6]
    few = Table({name: document[name] for name in keys}, table.stamps).render()
    document = json.loads(few)
    for where in positions(document)[1:]:
        *parents, last = where
        place = document
        for name in parents:
            place = place[name]
        before = place[last]
        for odd in ODD:
            if json.dumps(odd) == json.dumps(before):
                continue
            place[last] = odd
            verdict = judge(json.dumps(document).encode(), table.stamps)
            harmless = where[:2] == ("_metadata", "fi_flags") and where[-1] not in (
                "digest", "schema", "fi_flags",
            )  # fmt: skip
            # "*" aside, a stamp that differs makes a table foreign, or suspect where none is told.
            assert harmless or verdict.status is not Status.OK, (where, odd)
        place[last] = before


@pytest.mark.parametrize("odd", [*ODD, float("nan")])
def test_a_document_of_another_kind_is_a_miss(odd: Any) -> None:
    assert judge(json.dumps(odd).encode(), {"gpu": "NVIDIA H200"}).status is Status.SUSPECT


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32", "cp037"])
def test_a_real_table_in_another_encoding_is_a_miss(encoding: str) -> None:
    table, whole = kept(REAL[0])
    verdict = judge(whole.decode().encode(encoding), table.stamps)
    assert verdict.status is Status.SUSPECT
