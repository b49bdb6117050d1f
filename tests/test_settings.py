from __future__ import annotations

import datetime as dt
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import fi_flags
from fi_flags.errors import SettingsError
from fi_flags.layers import Inputs, nearest, read_layers, toml_key, variable
from fi_flags.settings import (
    PERSISTENT_CACHE_DEFAULT,
    Access,
    FlashInferSettings,
    LogFormat,
    Mode,
    OnFailure,
    Split,
    describe,
    plan_values,
    settings_or_off,
)
from fi_flags.testing import override

FLAG = "VLLM_FLASHINFER_PERSISTENT_CACHE"
FLAGS_FILE = "VLLM_FLASHINFER_FLAGS_FILE"
FIELDS = tuple(FlashInferSettings.model_fields)
REPOSITORY = Path(fi_flags.__file__).parent.parent
SPELLINGS = {
    Mode.OFF: ["off", "0", "false", "no", "OFF", "No", " off ", "\tFalse\n"],
    Mode.ON: ["on", "1", "true", "yes", "ON", "Yes", " 1 ", "\tTRUE\n"],
    Mode.AUTO: ["auto", "AUTO", " Auto "],
    Mode.SHADOW: ["shadow", "SHADOW", " Shadow "],
    Mode.FORCE: ["force", "FORCE", " Force "],
}
REFUSED = ["2", "-1", "maybe", "onn", "o n", "enable", "y", "t", "none", "null", "1.0", "01"]


def load(environ: dict[str, str] | None = None, **more: Any) -> FlashInferSettings:
    return FlashInferSettings.load(environ=environ or {}, **{"dotenv": None, **more})


def refusal(call: Callable[[], object]) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        call()
    assert caught.value.exit_code == 2
    return caught.value


# The flag


@pytest.mark.parametrize(
    ("mode", "word"), [(mode, word) for mode, words in SPELLINGS.items() for word in words]
)
def test_flag_spelling_is_accepted_from_environment_toml_and_argument(
    mode: Mode, word: str, tmp_path: Path
) -> None:
    file = tmp_path / "flags.toml"
    file.write_text(f'persistent_cache = """{word}"""')
    assert load({FLAG: word}).persistent_cache is mode
    assert load(config=file).persistent_cache is mode
    assert load(persistent_cache=word).persistent_cache is mode


@pytest.mark.parametrize("word", REFUSED)
def test_other_spelling_is_refused_with_name_value_and_accepted_words(word: str) -> None:
    error = refusal(lambda: load({FLAG: word}))
    assert FLAG in str(error)
    assert repr(word) in str(error)
    assert "off (0, false, no), on (1, true, yes), auto, shadow or force" in str(error)
    assert error.fields["name"] == FLAG
    assert error.fields["source"] == "env"


@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
@pytest.mark.parametrize("weaker", ["on", "off"])
def test_blank_variable_falls_through_to_next_source(
    blank: str, weaker: str, surroundings: Path
) -> None:
    (surroundings / ".env").write_text(f"{FLAG}={weaker}\n")
    settings = FlashInferSettings.load(environ={FLAG: blank})
    assert settings.persistent_cache is Mode(weaker)
    assert settings.provenance["persistent_cache"].source == "dotenv"


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (True, Mode.ON),
        (False, Mode.OFF),
        (1, Mode.ON),
        (0, Mode.OFF),
        *((one, one) for one in Mode),
    ],
)
def test_flag_takes_booleans_and_modes_as_arguments(value: object, mode: Mode) -> None:
    assert load(persistent_cache=value).persistent_cache is mode


@pytest.mark.parametrize(("text", "mode"), [("true", Mode.ON), ("false", Mode.OFF), ("1", Mode.ON)])
def test_flag_takes_toml_booleans(text: str, mode: Mode, tmp_path: Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text(f"persistent_cache = {text}")
    assert load(config=file).persistent_cache is mode


@pytest.mark.parametrize("value", [2, 1.0, [], ["on"], {"on": 1}, b"on", object()])
def test_flag_of_another_type_is_refused(value: object) -> None:
    assert refusal(lambda: load(persistent_cache=value)).fields["source"] == "init"


def test_default_is_the_one_constant() -> None:
    assert PERSISTENT_CACHE_DEFAULT is False
    assert load().persistent_cache is Mode.OFF
    assert load().provenance["persistent_cache"].source == "default"


# Sources


def everywhere(surroundings: Path, strongest: str) -> FlashInferSettings:
    """Settings with a different join time in each source from strongest down."""
    order = ["init", "env", "dotenv", "toml", "default"]
    given = order[order.index(strongest) :]
    environ = {"VLLM_FLASHINFER_AUTOTUNE_JOIN_S": "2"} if "env" in given else {}
    if "dotenv" in given:
        (surroundings / ".env").write_text("VLLM_FLASHINFER_AUTOTUNE_JOIN_S=3\n")
    if "toml" in given:
        (surroundings / "config").mkdir()
        (surroundings / "config" / "fi_flags.toml").write_text("autotune.join_s = 4\n")
    init: dict[str, Any] = {"autotune_join_s": 1} if "init" in given else {}
    return FlashInferSettings.load(environ=environ, **init)


@pytest.mark.parametrize(
    ("strongest", "value"), [("init", 1), ("env", 2), ("dotenv", 3), ("toml", 4), ("default", 600)]
)
def test_stronger_source_wins_over_its_neighbour(
    strongest: str, value: float, surroundings: Path
) -> None:
    settings = everywhere(surroundings, strongest)
    assert settings.autotune_join_s == value
    source = settings.provenance["autotune_join_s"].source
    file = surroundings / "config" / "fi_flags.toml"
    assert source == (f"toml:{file}" if strongest == "toml" else strongest)


def test_what_lost_is_recorded_strongest_first(surroundings: Path) -> None:
    origin = everywhere(surroundings, "init").provenance["autotune_join_s"]
    assert [(one.source.split(":")[0], one.value) for one in origin.overridden] == [
        ("env", "2"),
        ("dotenv", "3"),
        ("toml", 4),
    ]
    assert origin.variable == "VLLM_FLASHINFER_AUTOTUNE_JOIN_S"
    assert origin.toml == "autotune.join_s"


def test_bad_value_that_lost_is_no_error() -> None:
    assert load({FLAG: "maybe"}, persistent_cache="on").persistent_cache is Mode.ON


@pytest.mark.parametrize("field", FIELDS)
def test_every_setting_can_come_from_environment_and_from_toml(field: str, tmp_path: Path) -> None:
    text, expected = {
        "persistent_cache": ("force", Mode.FORCE),
        "autotune_cache_dir": ("/tables", Path("/tables")),
        "autotune_cache_access": (" RO ", Access.RO),
        "autotune_skip_ops": (" a, b ,,a", frozenset({"a", "b"})),
        "autotune_distributed_sync": ("Yes", True),
        "autotune_split": ("Leader", Split.LEADER),
        "autotune_abort_peers": ("off", False),
        "autotune_on_failure": ("untuned", OnFailure.UNTUNED),
        "rollout_percent": ("12.5", 12.5),
        "rollout_salt": (" s ", "s"),
        "rollout_id": ("me", "me"),
        "rollout_hosts": ("a*, b", ("a*", "b")),
        "rollout_deny_hosts": ("c", ("c",)),
        "rollout_archs": ("sm90,sm100", ("sm90", "sm100")),
        "gates_file": (" /etc/gates.toml", Path("/etc/gates.toml")),
        "autotune_trace": (" /var/trace.json", Path("/var/trace.json")),
        "flags_log": ("JSON", LogFormat.JSON),
    }.get(field, ("7.5", 7.5))
    file = tmp_path / "flags.toml"
    file.write_text(f'{toml_key(field)} = "{text}"')
    for settings in (load({variable(field): text}), load(config=file)):
        assert getattr(settings, field) == expected
        assert settings.provenance[field].source != "default"


def test_lists_are_arrays_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text('[autotune]\nskip_ops = [" x", "y"]\n[rollout]\nhosts = []\narchs = ["sm90"]')
    settings = load(config=file)
    assert settings.autotune_skip_ops == {"x", "y"}
    assert settings.rollout_hosts == ()
    assert settings.rollout_archs == ("sm90",)


def test_process_surroundings_are_read_without_arguments(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLAG, "auto")
    (surroundings / ".env").write_text("VLLM_FLASHINFER_AUTOTUNE_SPLIT='leader' # why not\n")
    settings = FlashInferSettings(autotune_join_s=5)
    assert settings.persistent_cache is Mode.AUTO
    assert settings.autotune_split is Split.LEADER
    assert settings.autotune_join_s == 5


# Values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("autotune_join_s", "0"),
        ("autotune_join_s", "-1"),
        ("autotune_timeout_s", "inf"),
        ("autotune_stall_s", "nan"),
        ("autotune_heartbeat_s", "soon"),
        ("autotune_heartbeat_s", True),
        ("autotune_heartbeat_s", 10**400),
        pytest.param("autotune_heartbeat_s", 1 << 50_000, id="too long to print"),
        ("rollout_percent", "100.1"),
        ("rollout_percent", "-0.1"),
        ("rollout_percent", "10%"),
        ("rollout_percent", "nan"),
        ("autotune_split", "shard"),
        ("autotune_cache_access", "r"),
        ("autotune_on_failure", "ignore"),
        ("autotune_abort_peers", "maybe"),
        ("autotune_abort_peers", 2),
        ("flags_log", "xml"),
        ("rollout_salt", "a\x07b"),
        ("rollout_id", 3),
        ("rollout_hosts", 3),
        ("rollout_hosts", [3]),
        ("autotune_skip_ops", "a\udc80"),
        ("autotune_cache_dir", "relative/tables"),
        ("autotune_cache_dir", "./tables"),
        ("autotune_cache_dir", "/tables/${USER}"),
        ("autotune_cache_dir", "$HOME/tables"),
        ("autotune_cache_dir", "/tables\n/x"),
        ("autotune_cache_dir", "/tables/\udc80"),
        ("autotune_cache_dir", "~nobody-of-this-name/tables"),
        ("autotune_cache_dir", 3),
        ("gates_file", "gates.toml"),
    ],
)
def test_bad_value_is_refused_by_name(field: str, value: object) -> None:
    given: dict[str, Any] = {field: value}
    error = refusal(lambda: load(**given))
    assert error.fields["name"] == field
    assert error.fields["accepted"] in str(error)
    assert len(str(error)) < 400
    assert str(error).isprintable()


def test_split_names_what_is_accepted() -> None:
    assert refusal(lambda: load(autotune_split="shard")).fields["accepted"] == "all, leader"


def test_cache_directory_expands_home_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load(autotune_cache_dir="~/t").autotune_cache_dir == Path("/home/me/t")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"VLLM_CACHE_ROOT": "/root-of-vllm"}, "/root-of-vllm/fi_flags"),
        ({"VLLM_CACHE_ROOT": "/r", "XDG_CACHE_HOME": "/xdg"}, "/r/fi_flags"),
        ({"VLLM_CACHE_ROOT": " ", "XDG_CACHE_HOME": "/xdg"}, "/xdg/fi_flags"),
        ({"VLLM_CACHE_ROOT": "~/v"}, "/home/me/v/fi_flags"),
    ],
)
def test_default_cache_directory_follows_the_environment(
    environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = load(environ)
    assert settings.autotune_cache_dir == Path(expected)
    assert settings.provenance["autotune_cache_dir"].source == "default"


def test_default_cache_directory_without_xdg_is_the_users_own(tmp_path: Path) -> None:
    # platformdirs reads the process's environment, which the fixture has set.
    assert load({"XDG_CACHE_HOME": "relative"}).autotune_cache_dir == tmp_path / "cache/fi_flags"


def test_bad_cache_root_is_refused_by_its_own_name() -> None:
    assert "VLLM_CACHE_ROOT" in str(refusal(lambda: load({"VLLM_CACHE_ROOT": "not/absolute"})))


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("10.0.0.7", False),
        ("head.cluster", False),
        ("fd00::1", False),
        ("", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("Localhost.localdomain", True),
    ],
)
def test_default_id_is_the_masters_address_unless_loopback(
    address: str,
    own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "this-host")
    assert load({"MASTER_ADDR": address}).rollout_id == ("this-host" if own else address)


# Files


def test_first_usual_place_that_exists_is_read(surroundings: Path, tmp_path: Path) -> None:
    user = tmp_path / "config" / "fi-flags" / "fi_flags.toml"
    user.parent.mkdir(parents=True)
    user.write_text('persistent_cache = "auto"')
    assert FlashInferSettings.load().provenance["persistent_cache"].source == f"toml:{user}"
    (surroundings / "config").mkdir()
    (surroundings / "config" / "fi_flags.toml").write_text('persistent_cache = "shadow"')
    assert FlashInferSettings.load().persistent_cache is Mode.SHADOW


def test_named_file_wins_over_usual_places_and_config_over_the_name(
    surroundings: Path, tmp_path: Path
) -> None:
    (surroundings / "config").mkdir()
    (surroundings / "config" / "fi_flags.toml").write_text('persistent_cache = "shadow"')
    named, chosen = tmp_path / "named.toml", tmp_path / "chosen.toml"
    named.write_text('persistent_cache = "auto"')
    chosen.write_text('persistent_cache = "force"')
    environ = {FLAGS_FILE: str(named)}
    assert load(environ).persistent_cache is Mode.AUTO
    assert load(environ, config=chosen).persistent_cache is Mode.FORCE
    (surroundings / ".env").write_text(f"{FLAGS_FILE}={named}")
    assert load(dotenv=Path(".env")).persistent_cache is Mode.AUTO
    assert load({FLAGS_FILE: " "}).persistent_cache is Mode.SHADOW


@pytest.mark.parametrize(
    "content",
    [None, b"persistent_cache = ", b"\xff\xfe", b"a = " + b"[" * 100_000],
    ids=["missing", "not TOML", "not UTF-8", "too deep"],
)
def test_named_file_that_cannot_be_read_is_refused(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "named.toml"
    if content is not None:
        file.write_bytes(content)
    for call in (lambda: load({FLAGS_FILE: str(file)}), lambda: load(config=file)):
        assert str(file) in str(refusal(call))


def test_directory_as_file_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path) in str(refusal(lambda: load(config=tmp_path)))


@pytest.mark.parametrize(
    ("text", "name", "meant"),
    [
        ("persistant_cache = 1", "persistant_cache", "persistent_cache"),
        ("Persistent_Cache = 1", "Persistent_Cache", "persistent_cache"),
        ("[autotune]\nskip_op = []", "autotune.skip_op", "autotune.skip_ops"),
        ("[rollout]\nprecent = 1", "rollout.precent", "rollout.percent"),
        ("cache_access = 'ro'", "cache_access", "autotune.cache_access"),
        ("[autotune]\njoin_s = {x = 1}", "autotune.join_s", "a number"),
        ("autotune = 3", "autotune", "a table, [autotune]"),
        ("wholly_other = 1", "wholly_other", "settings are: persistent_cache"),
        ("[other]", "other", "settings are: persistent_cache"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(
    text: str, name: str, meant: str, tmp_path: Path
) -> None:
    file = tmp_path / "flags.toml"
    file.write_text(text)
    error = refusal(lambda: load(config=file))
    assert error.fields["name"] == name
    assert meant in str(error)
    assert str(file) in str(error)


@pytest.mark.parametrize(
    ("text", "name", "value", "accepted"),
    [
        ("persistent_cache = 3", "persistent_cache", "3", "off (0, false, no)"),
        ("gates_file = 3", "gates_file", "3", "an absolute path"),
        ("[autotune]\ncache_dir = ['/t']", "autotune.cache_dir", "['/t']", "an absolute path"),
        ("[autotune]\nskip_ops = 3", "autotune.skip_ops", "3", "in TOML an array of texts"),
        ("[autotune]\nskip_ops = [3]", "autotune.skip_ops", "[3]", "a text"),
        ("[autotune]\ndistributed_sync = 2", "autotune.distributed_sync", "2", "on (1, true"),
        ("[autotune]\njoin_s = true", "autotune.join_s", "True", "a number of seconds"),
        ("[rollout]\npercent = []", "rollout.percent", "[]", "a number from 0 to 100"),
        ("[rollout]\nid = 7", "rollout.id", "7", "a text"),
        ("log = 1979-05-27", "log", "datetime.date(1979, 5, 27)", "auto, json, console"),
        ("jion_s = 7", "jion_s", "7", "settings are: "),
        ("[autotune]\njion_s = 7", "autotune.jion_s", "7", "autotune.join_s"),
    ],
)
def test_wrong_type_or_key_in_toml_is_refused_by_file_key_value_and_what_is_accepted(
    text: str, name: str, value: str, accepted: str, tmp_path: Path
) -> None:
    file = tmp_path / "flags.toml"
    file.write_text(text)
    error = refusal(lambda: load(config=file))
    assert f"{name}" in error.message
    assert f"= {value} (toml:{file})" in error.message
    assert accepted in error.hint
    fields = {key: error.fields[key] for key in ("name", "value", "source")}
    assert fields == {"name": name, "value": value, "source": f"toml:{file}"}


def test_unknown_argument_is_refused_with_the_nearest() -> None:
    assert "autotune_split" in str(refusal(lambda: load(autotune_splitt="all")))


def test_blank_toml_text_counts_as_not_set(tmp_path: Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text('persistent_cache = " "\n[rollout]\nid = ""\n')
    assert set(load(config=file).provenance.values()) == set(load().provenance.values())


def test_dotenv_is_taken_as_written_and_foreign_lines_are_left_alone(surroundings: Path) -> None:
    (surroundings / ".env").write_bytes(
        b"\xef\xbb\xbfSECRET=\xff\xfe\nOTHER=${HOME}\nexport " + FLAG.encode() + b'="on"\n'
    )
    settings = FlashInferSettings.load(environ={})
    assert settings.persistent_cache is Mode.ON
    assert settings.warnings == ()
    (surroundings / ".env").write_text("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR=${HOME}/tables\n")
    assert "'${HOME}/tables' (dotenv)" in str(refusal(lambda: FlashInferSettings.load(environ={})))


@pytest.mark.parametrize("line", [f"{FLAG} on", f'{FLAG}="on', f"export {FLAG}: on"])
def test_a_line_of_ours_that_a_dotenv_cannot_hold_is_refused(line: str, surroundings: Path) -> None:
    (surroundings / ".env").write_text(f"OTHER things\n{line}\n")
    error = refusal(lambda: FlashInferSettings.load(environ={}))
    for part in (".env, line 2", line, f"write {FLAG}=value"):
        assert part in str(error)
    (surroundings / ".env").write_text(f"OTHER things\n{FLAG}\n")  # set to nothing: not set
    assert FlashInferSettings.load(environ={}).persistent_cache is Mode.OFF


def test_unreadable_dotenv_is_refused(surroundings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (surroundings / ".env").write_text("A=1")

    def refuse(_path: Path) -> bytes:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert ".env" in str(refusal(lambda: FlashInferSettings.load(environ={})))


def test_place_that_may_not_be_entered_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bool:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "is_file", refuse)
    assert FlashInferSettings.load(environ={}).persistent_cache is Mode.OFF


# What looks like a mistake


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VLLM_FLASHINFER_PERSISTANT_CACHE", FLAG),
        ("VLLM_FLASHINFER_PERSISTENT_CACHES", FLAG),
        ("vllm_flashinfer_persistent_cache", FLAG),
        ("FLASHINFER_PERSISTENT_CACHE", FLAG),
        ("VLLM_FLASHINFER_AUTOTUNE_CACHEDIR", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"),
        ("VLLM_FLASHINFER_ROLLOUT_PERCENTAGE", "VLLM_FLASHINFER_ROLLOUT_PERCENT"),
        ("VLLM_FLASHINFER_FLAG_FILE", FLAGS_FILE),
    ],
)
def test_misspelt_variable_is_reported_with_the_name_it_resembles(
    name: str, meant: str, surroundings: Path
) -> None:
    (warning,) = load({name: "on"}).warnings
    assert name in warning
    assert warning.endswith(f"did you mean {meant}?")
    (surroundings / ".env").write_text(f"{name}=on\n")
    assert load(dotenv=Path(".env")).warnings == (warning,)


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_FLASHINFER_MOE_BACKEND",
        "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE",
        "VLLM_FLASHINFER_ALLREDUCE_BACKEND",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_ONLY",
        "VLLM_FLASHINFER_SOMETHING_ELSE_ENTIRELY",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "FLASHINFER_WORKSPACE_BASE",
        "PERSISTENT_CACHE",
        *map(variable, FIELDS),
    ],
)
def test_variable_of_vllm_or_of_ours_is_not_reported(name: str) -> None:
    layers = read_layers(Inputs({name: "on"}, None, None, ()), FIELDS, {})
    assert layers.warnings == ()


def test_near_miss_of_a_vllm_name_would_be_reported_but_for_the_list() -> None:
    ours = [variable(field) for field in FIELDS]
    assert nearest("VLLM_FLASHINFER_AUTOTUNE_CACHE_ONLY", ours)


@pytest.mark.parametrize(
    ("mode", "percent", "identity", "warned"),
    [
        ("auto", "100", None, False),
        ("auto", "10", None, True),
        ("auto", "10", "me", False),
        ("auto", "0", None, True),
        ("on", "10", None, False),
        ("off", "10", None, False),
    ],
)
def test_percentage_without_an_id_is_doubted_where_ids_are_drawn(
    mode: str,
    percent: str,
    identity: str | None,
    warned: bool,
) -> None:
    settings = load({}, persistent_cache=mode, rollout_percent=percent, rollout_id=identity)
    assert bool(settings.warnings) is warned


def test_the_file_that_was_read_and_those_it_hides_are_known(
    surroundings: Path, tmp_path: Path
) -> None:
    user = tmp_path / "config" / "fi-flags" / "fi_flags.toml"
    user.parent.mkdir(parents=True)
    user.write_text('persistent_cache = "on"')
    alone = FlashInferSettings.load()
    assert (alone.file, alone.hidden) == (user, ())
    mine = surroundings / "config" / "fi_flags.toml"
    mine.parent.mkdir()
    mine.write_text("")
    masked = FlashInferSettings.load()
    assert masked.persistent_cache is Mode.OFF
    assert (masked.file, masked.hidden) == (mine, (user,))


# The model


def test_settings_are_frozen_hashable_and_pickle_with_their_sources() -> None:
    settings = load({FLAG: "on"})
    with pytest.raises(ValueError, match="frozen"):
        settings.persistent_cache = Mode.OFF  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(settings))  # noqa: S301 - our own bytes
    assert copy == settings
    assert hash(copy) == hash(settings)
    assert copy.provenance == settings.provenance


@pytest.mark.parametrize("mode", Mode)
def test_plan_values_are_json_and_sorted(mode: Mode) -> None:
    values = plan_values(load(persistent_cache=mode, autotune_skip_ops="b,a"))
    assert values == {
        "autotune_cache_access": "rw",
        "autotune_skip_ops": ["a", "b"],
        "autotune_distributed_sync": False,
        "autotune_split": "all",
        "autotune_on_failure": "raise",
    }


def test_description_covers_every_setting_and_what_it_overrode() -> None:
    described = describe(load({FLAG: "on"}, persistent_cache=Mode.AUTO))
    assert tuple(described) == FIELDS
    assert described["persistent_cache"] == {
        "value": "auto",
        "source": "init",
        "env": FLAG,
        "toml": "persistent_cache",
        "overridden": [{"value": "on", "source": "env"}],
    }
    assert described["rollout_hosts"]["value"] == ["*"]
    strange = describe(load({}, persistent_cache="on", autotune_skip_ops=("a",)))
    assert strange["autotune_skip_ops"]["value"] == ["a"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (dt.date(1979, 5, 27), "datetime.date(1979, 5, 27)"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        pytest.param(16**5000, "int of thousands of digits", id="huge"),
        ([1, True], [1, True]),
        (2.5, 2.5),
    ],
)
def test_overridden_value_is_described_as_json_has_it(given: object, shown: object) -> None:
    with override(persistent_cache="on"):
        described = describe(load(persistent_cache=given))
    assert described["persistent_cache"]["overridden"] == [{"value": shown, "source": "init"}]
    assert json.loads(json.dumps(described, allow_nan=False))


# For servers


@pytest.mark.parametrize("flag", ["on", "off"])
def test_server_takes_good_settings_as_they_are(flag: str) -> None:
    settings = settings_or_off(environ={FLAG: flag}, dotenv=None)
    assert settings.persistent_cache is Mode(flag)
    assert settings.invalid is None


@pytest.mark.parametrize(
    "environ",
    [
        {FLAG: "maybe"},
        {FLAG: "on", "VLLM_FLASHINFER_AUTOTUNE_JOIN_S": "soon"},
        {FLAG: "on", "VLLM_CACHE_ROOT": "relative"},
        {FLAG: "on", FLAGS_FILE: "/nonexistent/file.toml"},
    ],
)
def test_server_falls_back_to_off_on_a_bad_value(
    environ: dict[str, str], surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (surroundings / "config").mkdir()
    (surroundings / "config" / "fi_flags.toml").write_text("also = 'bad'")
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.delenv("XDG_CACHE_HOME")
    settings = settings_or_off(environ=environ, dotenv=None)
    assert settings.persistent_cache is Mode.OFF
    assert isinstance(settings.invalid, SettingsError)
    assert settings.autotune_join_s == 600
    assert pickle.loads(pickle.dumps(settings)).invalid.fields == settings.invalid.fields  # noqa: S301


# The files we ship


def test_shipped_toml_changes_nothing_and_its_comments_are_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    shipped = REPOSITORY / "config" / "fi_flags.toml"
    assert set(load(config=shipped).provenance.values()) == set(load().provenance.values())
    lines = shipped.read_text().splitlines()
    uncommented = tmp_path / "all.toml"
    kept = (line.removeprefix("#") for line in lines if line[:2] not in ("# ", "#:"))
    uncommented.write_text("\n".join(kept))
    written = load(config=uncommented)
    defaults = load({"XDG_CACHE_HOME": "/home/me/.cache"})
    assert written.model_dump() == defaults.model_dump()
    toml = f"toml:{uncommented}"
    unset = {name for name, origin in written.provenance.items() if origin.source != toml}
    assert unset == {"rollout_salt", "rollout_id", "gates_file", "autotune_trace"}


def test_shipped_dotenv_names_every_variable_at_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    shipped = REPOSITORY / ".env.example"
    assert load(dotenv=shipped).warnings == ()
    lines = [line[1:] for line in shipped.read_text().splitlines() if line.startswith("#V")]
    assert {line.split("=")[0] for line in lines} == {FLAGS_FILE, *map(variable, FIELDS)}
    uncommented = tmp_path / "all.env"
    uncommented.write_text("\n".join(lines))
    defaults = load({"XDG_CACHE_HOME": "/home/me/.cache"})
    assert load(dotenv=uncommented).model_dump() == defaults.model_dump()


# Anything at all

anything = st.characters()  # with lone surrogates, as an environment may hold
values = st.text(anything, max_size=12) | st.sampled_from(
    ["on", "all", "leader", "ro", "1", "-1", "nan", "~", "~x/y", "/t", "/t/$", "a,b", "1e999"]
)
literals = st.sampled_from(
    [
        *("1", "-1", "nan", "1e999", "true", "1979-05-27", "0x" + "f" * 5000),
        *('"on"', '"all"', '"/t"', '""', '"\\u0000"'),
        *("[]", '["a"]', "[1, 'a']", "[[1]]", "{}", "{a = 1}"),
    ]
)


def never_worse_than_settings_error(call: Callable[[], FlashInferSettings]) -> None:
    try:
        settings = call()
    except SettingsError as error:
        assert str(error).isprintable()  # noqa: PT017 - either way is fine
    else:
        assert json.dumps(describe(settings), allow_nan=False)


@hypothesis.given(
    st.dictionaries(st.sampled_from([variable(field) for field in FIELDS]), values, max_size=4),
    st.dictionaries(st.text(anything), values, max_size=2),
)
def test_random_environment_is_never_worse_than_a_clear_error(
    ours: dict[str, str], others: dict[str, str]
) -> None:
    never_worse_than_settings_error(lambda: load(others | ours))
    assert settings_or_off(environ=others | ours, dotenv=None).provenance


@pytest.mark.parametrize("kind", ["config", "dotenv"])
@hypothesis.given(content=st.binary(max_size=60))
def test_random_bytes_are_never_worse_than_a_clear_error(
    kind: str, content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / f"random.{kind}"
    file.write_bytes(content)
    given: dict[str, Any] = {kind: file}
    never_worse_than_settings_error(lambda: load(**given))


@hypothesis.given(
    st.dictionaries(
        st.sampled_from([toml_key(field) for field in FIELDS])
        | st.text(max_size=8).map(json.dumps)
        | st.text("abc._", min_size=1, max_size=8).map("rollout.{}".format),
        literals,
        max_size=4,
    )
)
def test_random_toml_is_never_worse_than_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, str]
) -> None:
    file = tmp_path_factory.getbasetemp() / "random.toml"
    file.write_text("\n".join(f"{key} = {value}" for key, value in document.items()))
    never_worse_than_settings_error(lambda: load(config=file))


def test_a_machine_without_a_home_reads_defaults_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless(*_: object, **__: object) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("platformdirs.user_cache_path", homeless)
    monkeypatch.setattr("platformdirs.user_config_path", homeless)
    settings = load({})
    assert settings.persistent_cache is Mode.OFF
    assert settings.autotune_cache_dir == Path("/nonexistent/fi_flags")


def test_a_flags_file_that_is_no_path_is_refused_by_name() -> None:
    error = refusal(lambda: load({FLAGS_FILE: "~\0x/f.toml"}))
    assert FLAGS_FILE in error.message


def test_anything_else_that_goes_wrong_with_settings_means_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = [LookupError("a bug of ours")]

    def fail_once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return read_layers(*arguments)

    monkeypatch.setattr("fi_flags.settings.read_layers", fail_once)
    settings = settings_or_off(environ={FLAG: "on"}, dotenv=None)
    assert settings.persistent_cache is Mode.OFF
    assert settings.invalid is not None
    assert "LookupError: a bug of ours" in settings.invalid.message


@pytest.mark.parametrize("name", [".env", "config/fi_flags.toml"])
def test_a_folder_in_a_files_place_is_a_warning(name: str, surroundings: Path) -> None:
    (surroundings / name).mkdir(parents=True)
    settings = FlashInferSettings.load()
    assert settings.persistent_cache is Mode.OFF
    assert [name in warning and "no file" in warning for warning in settings.warnings] == [True]


@pytest.mark.parametrize(
    ("line", "field", "stronger"),
    [
        ('persistent_cache = "onn"', "persistent_cache", "on"),
        ('[rollout]\npercent = "many"', "rollout_percent", 10),
        ("[autotune]\njoin_s = -1", "autotune_join_s", 5),
    ],
)
def test_a_bad_value_in_a_file_is_refused_also_where_something_hides_it(
    line: str, field: str, stronger: object, tmp_path: Path
) -> None:
    file = tmp_path / "flags.toml"
    file.write_text(line)
    error = refusal(lambda: load({}, config=file, **{field: stronger}))
    assert str(file) in error.message
