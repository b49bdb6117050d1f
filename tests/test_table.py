"""Tables: real ones from two releases, made-up ones, and bytes that are none."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fi_flags.table import (
    MAX_BYTES,
    Entries,
    Status,
    Table,
    chosen,
    content_digest,
    judge,
    merge,
    op_of,
    parse,
    rival_key,
    serving_digest,
    split_ops,
    surplus,
)

examples = settings(deadline=None)  # a busy machine is no failure
REAL = sorted((Path(__file__).parent / "data").glob("*.json"))
STAMPS = {"flashinfer_version": "0.7.4", "gpu": "NVIDIA H200", "cudnn_version": "91900"}


def key(op: str = "gemm", runner: str = "Alpha", rest: str = "(4, 8), ('bf16',)") -> str:
    return f"({op!r}, {runner!r}, {rest})"


def sound(entries: Entries | None = None, stamps: dict[str, Any] = STAMPS, **about: Any) -> bytes:
    usual: Entries = {key(): ["Alpha", 1], key("moe", "Beta"): ["Beta", [7, [[12, 36]]]]}
    return Table(usual if entries is None else entries, stamps, about).render()


def edited(**changes: Any) -> bytes:
    """A sound table whose fi_flags block is changed afterwards, its digest untouched."""
    document = json.loads(sound())
    document["_metadata"]["fi_flags"].update(changes)
    return json.dumps(document).encode()


# -- real tables ----------------------------------------------------------------------------


def entry_texts(data: bytes) -> dict[str, str]:
    """Each entry's JSON text as it stands in the file, unread."""
    lines = re.compile(r'^  ("(?:[^"\\]|\\.)*"): (.*?)(?:,?\n(?=  "|\}))', re.DOTALL | re.MULTILINE)
    return {json.loads(m[1]): m[2] for m in lines.finditer(data.decode())}


def test_there_are_real_tables_of_two_releases() -> None:
    assert len(REAL) == 2
    assert len({parse(path.read_bytes()).stamps["flashinfer_version"] for path in REAL}) == 2


@pytest.mark.parametrize("path", REAL, ids=lambda path: str(path.stem))
def test_a_real_table_is_ok_with_its_own_stamps_and_keeps_every_entrys_text(path: Path) -> None:
    data = path.read_bytes()
    table = parse(data)
    verdict = judge(table.render(), table.stamps)
    assert verdict.status is Status.OK
    assert verdict.table is not None
    assert verdict.table.entries == table.entries
    before, after = entry_texts(data), entry_texts(table.render())
    assert before.keys() - after.keys() <= {"_generation"}
    for texts in (before, after):
        for name in [name for name in texts if name.startswith("_")]:
            del texts[name]
    assert len(before) == len(table.entries) > 10
    assert before == after
    assert parse(table.render()).render() == table.render()


@pytest.mark.parametrize("path", REAL, ids=lambda path: str(path.stem))
def test_a_real_table_without_our_block_is_suspect_and_keeps_upstreams_stamps(path: Path) -> None:
    data = path.read_bytes()
    stamps = json.loads(data)["_metadata"]
    verdict = judge(data, stamps)
    assert (verdict.status, verdict.why) == (Status.SUSPECT, "schema None, not 1")
    rendered = json.loads(parse(data).render())["_metadata"]
    assert {name: rendered[name] for name in stamps} == stamps
    assert rendered.keys() - stamps.keys() == {"fi_flags"}


def test_real_tables_merge_with_the_first_table_whole_and_every_call_once() -> None:
    older, newer = (parse(path.read_bytes()).entries for path in REAL)
    merged = merge([newer, older])
    assert {name: merged[name] for name in newer} == newer
    assert {rival_key(k) for k in merged} == {rival_key(k) for k in [*older, *newer]}
    assert merge([older]) == older


@pytest.mark.parametrize("path", REAL, ids=lambda path: str(path.stem))
def test_real_keys_split_into_op_runner_and_the_rest(path: Path) -> None:
    entries = parse(path.read_bytes()).entries
    for name, entry in entries.items():
        op = op_of(name)
        assert name.startswith(f"('{op}', '{entry[0]}', ")
        assert rival_key(name) == name.replace(f"'{entry[0]}', ", "", 1)
    ops = {op_of(name) for name in entries}
    assert "" not in ops
    others, chosen = split_ops(entries, {"bf16_gemm"})
    assert chosen
    assert {op_of(name) for name in chosen} == {"bf16_gemm"}
    assert others | chosen == entries
    assert split_ops(entries, ()) == (entries, {})


# -- keys -----------------------------------------------------------------------------------


@examples
@given(st.text(), st.text(), st.text(), st.lists(st.text() | st.integers()))
def test_any_op_and_runner_are_read_back_from_their_key(
    op: str, one: str, other: str, rest: list[Any]
) -> None:
    name = str((op, one, tuple(rest), (op,)))
    assert op_of(name) == op
    assert rival_key(name) == rival_key(str((op, other, tuple(rest), (op,))))
    assert rival_key(name) != rival_key(str((op + "x", one, tuple(rest), (op,))))


@pytest.mark.parametrize(
    ("op", "quoted"),
    [("it's", '"it\'s"'), ('say "hi"', "'say \"hi\"'"), ("both'\"", "'both\\'\"'"), ("a\\b", "")],
)
def test_a_quoted_or_escaped_op_is_read(op: str, quoted: str) -> None:
    name = str((op, "Alpha", (1,)))
    assert quoted in name
    assert op_of(name) == op
    assert rival_key(name) == f"({op!r}, (1,))"


@pytest.mark.parametrize(
    "odd", ["", "gemm", "('gemm')", "('gemm', 'Alpha')", "(gemm, Alpha, 1)", "('a', 'b, 1)", "()"]
)
def test_a_key_of_another_form_has_no_op_and_is_its_own_rival(odd: str) -> None:
    assert op_of(odd) == ""
    assert rival_key(odd) == odd


@examples
@given(st.text())
def test_any_text_as_a_key_has_an_answer(text: str) -> None:
    assert isinstance(op_of(text), str)
    assert isinstance(rival_key(text), str)


# -- merge ----------------------------------------------------------------------------------

names = st.builds(
    key,
    st.sampled_from(["gemm", "moe"]),
    st.sampled_from(["Alpha", "Beta", "Gamma"]),
    st.sampled_from(["(1, 8), ()", "(2, 8), ()", "(2, 8), ('x',)"]),
) | st.sampled_from(["odd", "odder"])
tactics = st.integers(-1, 9) | st.lists(st.integers(), max_size=3)


@st.composite
def tables(draw: st.DrawFn) -> Entries:
    chosen = draw(st.lists(names, unique=True, max_size=8))
    return {name: [name.split("'")[3] if "'" in name else "Odd", draw(tactics)] for name in chosen}


def calls(entries: Entries) -> set[str]:
    return {rival_key(name) for name in entries}


@examples
@given(st.lists(tables(), max_size=4))
def test_a_merge_answers_every_call_from_the_first_table_that_does_and_from_it_alone(
    several: list[Entries],
) -> None:
    before = copy.deepcopy(several)
    merged = merge(several)
    assert several == before
    assert calls(merged) == {call for table in several for call in calls(table)}
    for call in calls(merged):
        answering = [table for table in several if call in calls(table)]
        # FlashInfer's default in place of a tactic wins only where nobody has one.
        first = next((table for table in answering if call in calls(chosen(table))), answering[0])
        assert {n: e for n, e in merged.items() if rival_key(n) == call} == {
            n: e for n, e in first.items() if rival_key(n) == call
        }


@examples
@given(tables(), tables(), tables())
def test_a_merge_is_idempotent_and_associative(a: Entries, b: Entries, c: Entries) -> None:
    assert merge([a, a]) == merge([a]) == a
    assert merge([merge([a, b]), b]) == merge([a, b]) == merge([merge([a, b]), a])
    assert merge([a, merge([b, c])]) == merge([merge([a, b]), c]) == merge([a, b, c])


@examples
@given(tables(), tables())
def test_surplus_is_what_the_base_does_not_answer(base: Entries, entries: Entries) -> None:
    more = surplus(base, entries)
    assert calls(more) == calls(entries) - calls(base)
    assert more.items() <= entries.items()
    assert surplus(entries, entries) == {}
    assert surplus((), entries) == entries
    assert merge([base, entries]) == {**base, **more} or chosen(base) != base


def test_a_call_that_one_table_gave_up_is_answered_by_one_that_has_a_tactic() -> None:
    given_up, works = {key(runner="Alpha"): ["Alpha", -1]}, {key(runner="Beta"): ["Beta", 2]}
    assert merge([given_up, works]) == merge([works, given_up]) == works
    assert merge([given_up]) == given_up
    assert (chosen(given_up), chosen(works)) == ({}, works)


def test_rivals_of_other_runners_give_way_to_the_first_table() -> None:
    first, second = {key(runner="Alpha"): ["Alpha", 1]}, {key(runner="Beta"): ["Beta", 2]}
    assert merge([first, second]) == first
    assert merge([second, first]) == second


# -- digests --------------------------------------------------------------------------------


def test_timings_count_for_the_content_digest_and_not_for_the_serving_digest() -> None:
    entry = ["Alpha", 1, ["policy", 3], {"time_ms": 0.5}]
    one, other = {key(): entry}, {key(): [*entry[:3], {"time_ms": 0.25}]}
    assert content_digest(one) != content_digest(other)
    assert serving_digest(one) == serving_digest(other) == serving_digest({key(): entry[:2]})


@examples
@given(tables(), tables())
def test_digests_are_equal_exactly_where_entries_are(one: Entries, other: Entries) -> None:
    shuffled = dict(reversed(one.items()))
    assert content_digest(one) == content_digest(shuffled)
    assert serving_digest(one) == serving_digest(shuffled)
    assert (content_digest(one) == content_digest(other)) == (one == other)
    assert (serving_digest(one) == serving_digest(other)) == (one == other)


# -- what is no table -----------------------------------------------------------------------


def test_a_table_truncated_at_any_byte_is_never_ok_and_never_an_error() -> None:
    data = sound(host="a host", workload={"name": "toy"})
    assert judge(data, STAMPS).status is Status.OK
    for length in range(len(data) - 1):  # the last byte is a line feed
        verdict = judge(data[:length], STAMPS)
        assert verdict.status is Status.SUSPECT
        assert verdict.table is None
        assert verdict.why


def test_a_real_table_truncated_at_any_of_many_bytes_is_never_ok() -> None:
    table = parse(REAL[0].read_bytes())
    data = table.render()
    for length in range(0, len(data) - 1, 97):
        assert judge(data[:length], table.stamps).status is Status.SUSPECT


@examples
@given(st.binary(max_size=200))
def test_random_bytes_are_never_ok_and_never_an_error(data: bytes) -> None:
    assert judge(data, STAMPS).status is Status.SUSPECT


def parts_of(data: bytes) -> tuple[Any, Any, Any]:
    """Entries, stamps and digest as Python reads them."""
    document = json.loads(data)
    stamps = document.pop("_metadata")
    return document, {name: stamps.get(name) for name in STAMPS}, stamps["fi_flags"]["digest"]


@examples
@given(st.data())
def test_a_mutated_table_is_never_an_error_and_ok_only_if_it_says_the_same(
    data: st.DataObject,
) -> None:
    whole = sound()
    mutated = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        if data.draw(st.booleans()):
            mutated[at] = data.draw(st.integers(0, 255))
        else:
            mutated[at : at + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=3))
    verdict = judge(bytes(mutated), STAMPS)
    assert (verdict.table is not None) == (verdict.status is Status.OK)
    if verdict.status is Status.OK:
        assert parts_of(bytes(mutated)) == parts_of(whole)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@examples
@given(st.dictionaries(st.text() | names, json_values, max_size=3), json_values, json_values)
def test_any_json_is_judged_without_an_error(
    entries: dict[str, Any], stamps: Any, block: Any
) -> None:
    metadata = {**STAMPS, **(stamps if isinstance(stamps, dict) else {}), "fi_flags": block}
    for document in (entries, stamps, {"_metadata": stamps}, {**entries, "_metadata": metadata}):
        verdict = judge(json.dumps(document).encode(), STAMPS)
        assert verdict.status is not Status.OK  # no digest fits by chance
        assert len(verdict.why) <= 300
        verdict.why.encode()


@examples
@given(names, json_values, json_values)
def test_whatever_value_is_accepted_can_be_written_and_read_again(
    name: str, tactic: Any, timing: Any
) -> None:
    runner = name.split("'")[3] if "'" in name else "Odd"
    entries = {name: [runner, tactic, [], timing]}
    verdict = judge(Table(entries, STAMPS).render(), STAMPS)
    if verdict.table is not None:
        again = judge(verdict.table.render(), STAMPS)
        assert again.table is not None
        assert again.table.entries == entries


def text_of(entry: str, name: str = key()) -> bytes:
    return b'{"_metadata": %b, %b: %b}' % (
        json.dumps(STAMPS).encode(),
        json.dumps(name).encode(),
        entry.encode(),
    )


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("1", "not a list of runner and tactic"),
        ("{}", "not a list of runner and tactic"),
        ('["Alpha"]', "not a list of runner and tactic"),
        ("[1, 1]", "the runner is not a name"),
        ('["", 1]', "the runner is not a name"),
        ('["Beta", 1]', "runner Beta under another runner's key"),
        ('["Alpha", {}]', "the tactic is neither a number, a string, nor a list"),
        ('["Alpha", [1, [{}]]]', "the tactic is neither a number, a string, nor a list"),
        ('["Alpha", 1, null]', "the policy is not a list"),
        ('["Alpha", 1, "policy"]', "the policy is not a list"),
        ('["Alpha", 1, [{}]]', "the policy is not a list"),
        ('["Alpha", NaN]', "NaN is not JSON"),
        ('["Alpha", 1, [], {"time_ms": Infinity}]', "Infinity is not JSON"),
        ('["Alpha", -Infinity]', "-Infinity is not JSON"),
        ('["Alpha", 1e999]', "1e999 is not a number"),
        ('["Alpha", 1, [], {"time_ms": -1e999}]', "-1e999 is not a number"),
        ('["Alpha", 1, [], {"a": 1, "a": 1}]', "a name stands twice"),
        ('["Alpha", ' + "[" * 40 + "]" * 40 + "]", "nested too deeply"),
        ('["Alpha", 1, [], ' + "[" * 40 + "]" * 40 + "]", "nested too deeply"),
        ('["Alpha", 1, [], ' + '{"a":' * 40 + "1" + "}" * 40 + "]", "nested too deeply"),
        ('["Alpha", ' + "[" * 100_000, "nested too deeply"),
        ('["Alpha", ' + "[" * 100_000 + "]" * 100_000 + "]", "nested too deeply"),
    ],
    ids=lambda text: str(text)[:40],
)
def test_a_wrong_entry_is_suspect_and_says_what_is_wrong(entry: str, why: str) -> None:
    verdict = judge(text_of(entry), STAMPS)
    assert verdict.status is Status.SUSPECT
    assert why in verdict.why


def test_an_entry_nested_to_any_depth_is_judged_without_an_error() -> None:
    for depth in range(1, 1100):
        document = json.loads(edited())
        data = json.dumps(document).encode()[:-1] + b', "odd": ["Odd", 1, [], %b]}'
        verdict = judge(data % (b"[" * depth + b"]" * depth), STAMPS)
        assert verdict.status is Status.SUSPECT


def test_metadata_nested_too_deeply_is_suspect() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    assert "nested too deeply" in judge(sound(odd=deep), STAMPS).why
    assert "nested too deeply" in judge(sound(stamps={**STAMPS, "odd": deep}), STAMPS).why


@pytest.mark.parametrize("digits", [20, 400, 4000, 5000, 100_000])
def test_a_huge_number_is_kept_or_suspect_and_never_an_error(digits: int) -> None:
    data = text_of(f'["Alpha", 1{"0" * digits}]')
    assert judge(data, STAMPS).status is Status.SUSPECT
    if digits <= 4000:
        assert parse(parse(data).render()).entries == {key(): ["Alpha", 10**digits]}


def test_lone_surrogates_survive_a_round_trip_and_can_be_told() -> None:
    entries = {key("\ud800"): ["Alpha", "\udfff"]}
    verdict = judge(sound(entries), STAMPS)
    assert verdict.table is not None
    assert verdict.table.entries == entries
    foreign = judge(sound(stamps={**STAMPS, "gpu": "\ud800"}), STAMPS)
    assert foreign.why == r"gpu is \ud800 there, NVIDIA H200 here"
    wrong = judge(text_of("1", "\ud800"), STAMPS)
    assert wrong.why.encode().startswith(rb"entry \ud800: ")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b"[]", "a JSON list where an object should be"),
        (b'"text"', "a JSON str where an object should be"),
        (b"null", "a JSON NoneType where an object should be"),
        (b"{}", "no _metadata object"),
        (b'{"_metadata": []}', "no _metadata object"),
        (b'{"_metadata": {"fi_flags": 1}}', "_metadata.fi_flags is not an object"),
        (b'{"_metadata": {}, "_metadata": {}}', "a name stands twice"),
        (b"\xff\xfe{}", "can't decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (sound() + sound(), "Extra data"),
    ],
)
def test_what_is_no_table_is_suspect_and_says_why(data: bytes, why: str) -> None:
    verdict = judge(data, STAMPS)
    assert verdict.status is Status.SUSPECT
    assert why in verdict.why


def test_a_name_that_stands_twice_is_suspect() -> None:
    data = sound()
    name = json.dumps(key()).encode()
    assert data.count(name) == 1
    twice = data.replace(name, name + b': ["Alpha", 1], ' + name)
    assert "a name stands twice" in judge(twice, STAMPS).why


def test_a_file_that_is_too_large_is_suspect_unread() -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_BYTES}"):
        parse(b" " * (MAX_BYTES + 1))


# -- whose table it is ----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(STAMPS))
def test_a_table_of_another_environment_is_foreign_and_the_field_is_named(name: str) -> None:
    verdict = judge(sound(stamps={**STAMPS, name: "else"}), STAMPS)
    assert verdict.status is Status.FOREIGN
    assert verdict.why == f"{name} is else there, {STAMPS[name]} here"
    assert verdict.table is None


def test_every_differing_field_is_named() -> None:
    verdict = judge(sound(stamps={**STAMPS, "gpu": "A", "cudnn_version": "B"}), STAMPS)
    assert verdict.status is Status.FOREIGN
    assert verdict.why == "gpu is A there, NVIDIA H200 here; cudnn_version is B there, 91900 here"


def test_a_long_foreign_value_is_cut() -> None:
    verdict = judge(sound(stamps={**STAMPS, "gpu": "x" * 10_000}), STAMPS)
    assert verdict.status is Status.FOREIGN
    assert len(verdict.why) < 200


@pytest.mark.parametrize("value", [1, None, [], {}, True, 1.5])
def test_a_stamp_that_is_no_text_does_not_match(value: Any) -> None:
    assert judge(sound(stamps={**STAMPS, "gpu": value}), STAMPS).status is not Status.OK


def test_a_star_matches_and_stamps_that_we_do_not_have_are_ignored() -> None:
    assert judge(sound(stamps={**STAMPS, "gpu": "*"}), STAMPS).status is Status.OK
    assert judge(sound(stamps={**STAMPS, "new": "thing"}), STAMPS).status is Status.OK
    assert judge(sound(), {}).status is Status.OK


@pytest.mark.parametrize("value", ["unknown", "None", None])
def test_a_stamp_that_the_writer_could_not_tell_is_suspect_not_foreign(value: Any) -> None:
    verdict = judge(sound(stamps={**STAMPS, "cudnn_version": value}), STAMPS)
    assert verdict.status is Status.SUSPECT
    assert "cudnn_version" in verdict.why
    other = judge(sound(stamps={**STAMPS, "cudnn_version": value, "gpu": "else"}), STAMPS)
    assert other.status is Status.FOREIGN


def test_a_missing_stamp_is_suspect_not_foreign() -> None:
    verdict = judge(sound(stamps={"gpu": STAMPS["gpu"]}), STAMPS)
    assert verdict.status is Status.SUSPECT
    assert "flashinfer_version is None there" in verdict.why


def test_a_stamp_that_is_unknown_on_both_sides_is_equal() -> None:
    stamps = {**STAMPS, "cudnn_version": "unknown"}
    assert judge(sound(stamps=stamps), stamps).status is Status.OK


def test_a_table_without_entries_is_empty() -> None:
    assert judge(sound({}), STAMPS).status is Status.EMPTY


@pytest.mark.parametrize("digest", ["", "0" * 64, None, 1, []])
def test_a_digest_that_does_not_match_is_suspect(digest: Any) -> None:
    verdict = judge(edited(digest=digest), STAMPS)
    assert verdict.status is Status.SUSPECT
    assert verdict.why == "the entries do not match their digest"


@pytest.mark.parametrize("schema", [0, 2, None, "1", [1], "x" * 1000])
def test_another_schema_is_suspect(schema: Any) -> None:
    verdict = judge(edited(schema=schema), STAMPS)
    assert verdict.status is Status.SUSPECT
    assert verdict.why.startswith("schema ")
    assert len(verdict.why) <= 200


def test_a_changed_tactic_is_suspect() -> None:
    data = sound()
    changed = data.replace(b'"Alpha",\n    1', b'"Alpha",\n    2')
    assert changed != data
    assert judge(changed, STAMPS).status is Status.SUSPECT


def test_a_render_writes_its_own_digest_and_keeps_the_rest_of_our_block() -> None:
    about = {"digest": "stale", "host": "h", "cold_seconds": 1.5}
    table = parse(Table({key(): ["Alpha", 1]}, STAMPS, about).render())
    assert table.about == {**about, "schema": 1, "digest": content_digest(table.entries)}
    assert table.stamps == STAMPS


def test_flashinfers_own_bookkeeping_is_no_entry() -> None:
    document = {**json.loads(sound()), "_records": {"a": 1}, "_generation": "x"}
    verdict = judge(json.dumps(document).encode(), STAMPS)
    assert verdict.table is not None
    assert not {"_records", "_generation"} & verdict.table.entries.keys()


@pytest.mark.parametrize(
    ("said", "read"), [(2, 2.0), (1.5, 1.5), (-1, 0.0), ("long", 0.0), (True, 0.0), (None, 0.0)]
)
def test_cold_seconds_are_a_number_or_nothing(said: Any, read: float) -> None:
    assert Table({}, {}, {"cold_seconds": said}).cold_seconds == read
