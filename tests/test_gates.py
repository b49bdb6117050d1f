from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from fi_flags.errors import SettingsError
from fi_flags.facts import UNREADABLE, Facts
from fi_flags.gates import PROBES, Effect, Gate, load_gates

SHIPPED = {one.id: one for one in load_gates()}
OWN = """
[[gate]]
id = "ours"
title = "It is slow here"
url = "https://example.invalid/7"
affected = ">=0.7"
effect = "skip_ops"
archs = ["sm9*"]
ops = ["moe"]
"""


def facts(version: str | None, capability: tuple[int, int] | None = None) -> Facts:
    return Facts(flashinfer=version, torch=None, python="3.11", host="here", capability=capability)


def gate(affected: str, **more: Any) -> Gate:
    fields = {"effect": Effect.CLOSE_CACHE} | more
    return Gate("g", "title", "https://example.invalid/1", affected, **fields)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "gates.toml"
    file.write_text(text)
    return file


def refusal(path: Path) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load_gates(path)
    assert str(caught.value).isprintable()
    assert str(path) in str(caught.value)
    return caught.value


# Versions


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
    assert SHIPPED["file-key-extras"].closed(facts(version)) is closed


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
    for one in SHIPPED.values():
        standing = one.standing(facts(version))
        assert one.closed(facts(version)) is (standing.state == "closed")
        assert standing.evidence


@pytest.mark.parametrize("effect", Effect)
def test_unreadable_version_closes_everything_and_is_said(effect: Effect) -> None:
    one = gate("<0.6.13", effect=effect)
    assert one.closed(facts("0.6.x"))
    assert one.standing(facts("0.6.x")).evidence == "FlashInfer's version cannot be read: '0.6.x'"
    assert one.standing(facts(None)).evidence == "FlashInfer is not installed"


@pytest.mark.parametrize(
    ("affected", "fixed"),
    [
        ("<0.6.13", "0.6.13"),
        (">=0.6.17,<0.6.19", "0.6.19"),
        (">=0.6.15", None),
        ("<=0.7.4", None),
        ("<0.8,<0.7", "0.7"),
    ],
)
def test_fix_is_where_the_affected_versions_end(affected: str, fixed: str | None) -> None:
    assert gate(affected).fixed_in == fixed


def test_evidence_names_the_version_and_the_bounds() -> None:
    assert gate("<0.6.13").standing(facts("0.6.12")).evidence == "FlashInfer 0.6.12 is <0.6.13"
    assert gate("<0.6.13").standing(facts("0.7.4")).evidence == "FlashInfer 0.7.4 is not <0.6.13"


# Architectures


@pytest.mark.parametrize(
    ("archs", "capability", "closed"),
    [
        ((), None, True),
        (("sm120",), (12, 0), True),
        (("SM12*",), (12, 1), True),
        (("sm100", "sm103"), (10, 3), True),
        (("sm120",), (9, 0), False),
        (("sm120",), None, False),
        (("*",), (9, 0), True),
    ],
)
@pytest.mark.parametrize("version", ["0.6.12", "unreadable"])
def test_gate_concerns_its_architectures_alone(
    archs: tuple[str, ...], capability: tuple[int, int] | None, closed: bool, version: str
) -> None:
    assert gate("<0.6.13", archs=archs).closed(facts(version, capability)) is closed


def test_evidence_of_another_architecture_names_both() -> None:
    one = gate("<1", archs=("sm100", "sm103"))
    assert one.standing(facts("0.7", (9, 0))).evidence == "sm90 here; it is about sm100 and sm103"
    assert one.standing(facts("0.7")).evidence.startswith("no GPU here;")


# Probes


@pytest.mark.parametrize(
    ("version", "found", "state", "contradicted"),
    [
        ("0.6.12", True, "closed", False),
        ("0.6.12", False, "open", True),
        ("0.7.4", True, "closed", True),
        ("0.7.4", False, "open", False),
        ("unreadable", False, "open", True),
    ],
)
def test_probe_wins_over_the_table(
    version: str, found: bool, state: str, contradicted: bool
) -> None:
    standing = SHIPPED["file-key-extras"].standing(facts(version), {"key_extras": found})
    assert (standing.state, standing.contradicted) == (state, contradicted)
    assert ("but FlashInfer" in standing.evidence) is contradicted


def test_probe_says_nothing_of_gates_that_it_does_not_cover() -> None:
    one = SHIPPED["cluster-z-results"]
    assert one.standing(facts("0.6.9"), {"key_extras": False}) == one.standing(facts("0.6.9"))
    elsewhere = gate("<1", probe="key_extras", archs=("sm90",))
    assert elsewhere.standing(facts("0.7"), {"key_extras": True}).state == "open"


# What is shipped


def test_shipped_gates_are_complete_and_unlike() -> None:
    assert len(load_gates()) == len(SHIPPED) == 5
    assert {one.effect for one in SHIPPED.values()} == set(Effect)
    for one in SHIPPED.values():
        assert one.title.isprintable()
        assert one.url.startswith("https://github.com/flashinfer-ai/flashinfer/issues/")
        assert bool(one.ops) is (one.effect is Effect.SKIP_OPS)
        assert one.probe in ("", *PROBES)


@pytest.mark.parametrize(
    ("version", "capability", "closed"),
    [
        ("0.6.10.post1", None, {"file-key-extras", "cluster-z-results", "unagreed-hits"}),
        ("0.6.11", None, {"file-key-extras", "unagreed-hits"}),
        ("0.6.12", (12, 0), {"file-key-extras", "unagreed-hits"}),
        ("0.6.13", (10, 0), {"unagreed-hits"}),
        ("0.6.14", (10, 3), {"unagreed-hits"}),
        ("0.6.15", (10, 3), {"unagreed-hits", "split-k-rounded-buckets"}),
        ("0.6.16.post4", (12, 0), {"unagreed-hits"}),
        ("0.6.17", (12, 0), {"unagreed-hits", "sm120-tactics"}),
        ("0.6.18.post1", (12, 0), {"unagreed-hits", "sm120-tactics"}),
        ("0.6.18.post1", (9, 0), {"unagreed-hits"}),
        ("0.7.0.post1", (10, 0), {"unagreed-hits", "split-k-rounded-buckets"}),
        ("0.7.1", (10, 0), {"unagreed-hits"}),
        ("0.7.2.post1", (12, 0), {"unagreed-hits"}),
        ("0.7.4", (12, 0), set()),
        ("0.7.4", (10, 0), set()),
    ],
)
def test_closed_gates_of_a_release_on_a_gpu(
    version: str, capability: tuple[int, int] | None, closed: set[str]
) -> None:
    found = {one.id for one in load_gates() if one.closed(facts(version, capability))}
    assert found == closed


# An operator's own file


def test_own_gate_is_added_after_ours(tmp_path: Path) -> None:
    *ours, added = load_gates(written(tmp_path, OWN))
    assert tuple(ours) == load_gates()
    assert (added.id, added.archs, added.ops) == ("ours", ("sm9*",), ("moe",))
    assert added.closed(facts("0.7.4", (9, 0)))


def test_own_gate_of_a_known_id_replaces_it(tmp_path: Path) -> None:
    file = written(tmp_path, OWN.replace('"ours"', '"unagreed-hits"'))
    assert len(load_gates(file)) == len(SHIPPED)
    (replaced,) = [one for one in load_gates(file) if one.id == "unagreed-hits"]
    assert replaced.title == "It is slow here"


@pytest.mark.parametrize("lift", ['["file-key-extras", "ours"]', '"file-key-extras, ours"'])
def test_lifted_gate_is_open_whatever_is_found(lift: str, tmp_path: Path) -> None:
    file = written(tmp_path, f"lift = {lift}\n{OWN}")
    gates = {one.id: one for one in load_gates(file)}
    for version in ("0.6.12", "0.7.4", "unreadable"):
        one = gates["file-key-extras"]
        assert not one.closed(facts(version))
        standing = one.standing(facts(version), {"key_extras": True})
        assert standing.state == "lifted"
        assert standing.evidence.startswith(f"lifted by {file}; the probe found the defect")
    assert gates["ours"].standing(facts("0.7.4")).state == "lifted"
    assert gates["cluster-z-results"].closed(facts("0.6.9"))


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_gates(written(tmp_path, "")) == load_gates()


@pytest.mark.parametrize(
    ("old", "new", "name", "accepted"),
    [
        (OWN, "[[gates]]\nid = 'x'", "gates", "did you mean gate?"),
        (OWN, "wholly_other = 1", "wholly_other", "keys are: gate, lift"),
        (OWN, "gate = 3", "gate", "tables, [[gate]]"),
        (OWN, "gate = [3]", "gate", "tables, [[gate]]"),
        (OWN, "lift = 3", "lift", "an array of ids"),
        (OWN, "lift = [3]", "lift", "an array of ids"),
        (OWN, 'lift = ["file-key-extra"]', "file-key-extra", "did you mean file-key-extras?"),
        (OWN, 'lift = ["x"]', "x", "gates are: file-key-extras, cluster-z-results"),
        ('"ours"', '" "', "gate 1, id", "a text"),
        ('"ours"', "3", "gate 1, id", "a text"),
        ('"It is slow here"', '"\\u0007"', "gate 1, title", "a text without control"),
        ('">=0.7"', '"~=0.7"', "gate 1, affected", "bounds such as"),
        ('">=0.7"', '"===0.7"', "gate 1, affected", "bounds such as"),
        ('">=0.7"', '"==0.7.*"', "gate 1, affected", "bounds such as"),
        ('">=0.7"', '"0.7"', "gate 1, affected", "bounds such as"),
        ('">=0.7"', '","', "gate 1, affected", "bounds such as"),
        ('">=0.7"', "0.7", "gate 1, affected", "bounds such as"),
        ('"skip_ops"', '"skip"', "gate 1, effect", "close_cache, skip_ops, no_sync"),
        ('["sm9*"]', "9", "gate 1, archs", "names, separated by commas"),
        ('ops = ["moe"]', "", "gate 1, ops", "names of ops where effect is skip_ops"),
        ('"skip_ops"', '"no_sync"', "gate 1, ops", "names of ops where effect is skip_ops"),
        ('ops = ["moe"]', 'op = ["moe"]', "op", "did you mean ops?"),
        ('ops = ["moe"]', 'ops = ["moe"]\nprobe = "other"', "gate 1, probe", "key_extras"),
        ('affected = ">=0.7"', "", "gate 1", "also affected"),
        ('ops = ["moe"]\n', f'ops = ["moe"]\n{OWN}', "gate 2, id", "an id of its own"),
    ],
)
def test_bad_file_is_refused_by_file_key_value_and_what_is_accepted(
    old: str, new: str, name: str, accepted: str, tmp_path: Path
) -> None:
    assert OWN.count(old) == 1
    file = written(tmp_path, OWN.replace(old, new))
    error = refusal(file)
    assert error.fields["name"] == name
    assert error.fields["source"] == f"toml:{file}"
    assert accepted in str(error)
    assert error.fields["value"] in str(error)


@pytest.mark.parametrize(
    "content",
    [None, b"gate = ", b"\xff\xfe", b"a = " + b"[" * 100_000],
    ids=["missing", "not TOML", "not UTF-8", "too deep"],
)
def test_file_that_cannot_be_read_is_refused(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    if content is not None:
        file.write_bytes(content)
    assert refusal(file).fields["name"] == "VLLM_FLASHINFER_GATES_FILE"


literals = st.sampled_from(
    ["1", '"x"', '""', "[]", '["a"]', "[1]", "{}", '"<1"', '"close_cache"', '"skip_ops"', "nan"]
)
keys = ["id", "title", "url", "affected", "effect", "archs", "ops", "probe", "x"]


@given(
    st.binary(max_size=60)
    | st.dictionaries(st.sampled_from(keys), literals).map(
        lambda entry: "\n".join(["[[gate]]", *map(" = ".join, entry.items())]).encode()
    )
)
def test_random_file_is_never_worse_than_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "random-gates.toml"
    file.write_bytes(content)
    try:
        gates = load_gates(file)
    except SettingsError as error:
        assert str(error).isprintable()  # noqa: PT017 - either way is fine
    else:
        assert all(one.standing(facts("0.7.4", (9, 0))).evidence for one in gates)


@pytest.mark.parametrize(
    ("version", "closed"), [("0.6.17rc1", True), ("0.6.17.dev3", True), ("0.6.16.post3", False)]
)
def test_a_pre_release_has_a_defect_that_begins_with_its_release(
    version: str, closed: bool
) -> None:
    assert gate(">=0.6.17,<0.6.19").closed(facts(version)) is closed


@given(st.from_regex(r"(<|<=|>|>=|==|!=)[0-9]\.[0-9]{1,2}(\.post[0-9])?", fullmatch=True))
def test_version_is_inside_or_outside_one_bound(affected: str) -> None:
    bound = affected.lstrip("<>=!")
    operator = affected.removesuffix(bound)
    assert gate(affected).closed(facts(bound)) is ("=" in operator and operator != "!=")
    assert gate(affected).fixed_in == (str(Version(bound)) if operator == "<" else None)
