from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fi_flags.cli import app, main
from fi_flags.gates import load_gates
from fi_flags.settings import FlashInferSettings

FLAG = "VLLM_FLASHINFER_PERSISTENT_CACHE"


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environ)


def explained(*arguments: str, **environ: str) -> dict[str, Any]:
    result = run("explain", "--json", *arguments, **environ)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_empty_environment_is_off_by_default_with_its_links() -> None:
    document = explained()
    assert set(document) == {"decision", "settings", "file", "hidden_files"}
    decision = document["decision"]
    assert decision["enabled"] is False
    assert decision["mode"] == "off"
    assert decision["reason"] == "DEFAULT_OFF"
    assert decision["strategy"] == "per_rank"
    assert decision["source"] == "default"
    assert "https://github.com/flashinfer-ai/flashinfer/issues/3363" in decision["todo"]
    assert "https://github.com/vllm-project/vllm/pull/43119" in decision["todo"]
    assert [gate["id"] for gate in decision["gates"]] == [gate.id for gate in load_gates()]
    assert set(document["settings"]) == set(FlashInferSettings.model_fields)
    assert document["settings"]["autotune_join_s"] == {
        "value": 600.0,
        "source": "default",
        "env": "VLLM_FLASHINFER_AUTOTUNE_JOIN_S",
        "toml": "autotune.join_s",
        "overridden": [],
    }


@pytest.mark.parametrize(
    ("flag", "enabled", "reason"), [("on", True, "OPERATOR_ON"), ("off", False, "OPERATOR_OFF")]
)
def test_flag_decides(flag: str, enabled: bool, reason: str) -> None:
    decision = explained(**{FLAG: flag})["decision"]
    assert (decision["enabled"], decision["reason"], decision["source"]) == (enabled, reason, "env")


@pytest.mark.parametrize("flag", ["on", "off"])
def test_person_sees_decision_and_every_setting(flag: str) -> None:
    result = run("explain", **{FLAG: flag, "VLLM_FLASHINFER_ROLLOUT_SALT": "[bold]"})
    assert result.exit_code == 0
    assert f"OPERATOR_{flag.upper()}" in result.stdout
    for shown in ("AUTOTUNE_CACHE_DIR", "autotune.cache_dir", "env", "600", "[bold]", "none"):
        assert shown in result.stdout
    assert result.stderr == ""


def test_person_sees_what_a_value_overrode(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("autotune.join_s = 31.5")
    join = {"VLLM_FLASHINFER_AUTOTUNE_JOIN_S": "32.5"}
    shown = run("explain", "--config", str(file), **join).stdout
    assert "overrode" in shown
    assert "32.5" in shown
    assert "31.5" in shown


def test_config_takes_the_place_of_the_named_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('persistent_cache = "auto"')
    environ = {"VLLM_FLASHINFER_FLAGS_FILE": "/nonexistent"}
    decision = explained("--config", str(file), **environ)["decision"]
    assert (decision["mode"], decision["source"]) == ("auto", f"toml:{file}")


def test_bad_setting_exits_2_and_says_what_is_accepted() -> None:
    result = run("explain", **{FLAG: "maybe"})
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{FLAG} = 'maybe' (env)" in result.stderr
    assert "shadow or force" in result.stderr


def test_bad_setting_is_one_json_document_too() -> None:
    result = run("explain", "--json", **{FLAG: "maybe"})
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "SettingsError"
    assert error["exit_code"] == 2
    assert error["fields"]["name"] == FLAG


def test_missing_config_exits_2_without_a_traceback() -> None:
    result = run("explain", "--config", "/nonexistent/flags.toml")
    assert result.exit_code == 2
    assert "/nonexistent/flags.toml" in result.stderr


def test_misspelt_variable_is_warned_about_on_standard_error_only() -> None:
    result = run("explain", "--json", VLLM_FLASHINFER_PERSISTANT_CACHE="on")
    assert json.loads(result.stdout)["decision"]["reason"] == "DEFAULT_OFF"
    event = json.loads(result.stderr)
    assert event["level"] == "warning"
    assert f"did you mean {FLAG}?" in event["message"]


@pytest.mark.parametrize("arguments", [["bogus"], ["explain", "--bogus"], []])
def test_bad_usage_exits_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_main_names_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["whatever", "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "fi-flags [OPTIONS] COMMAND" in capsys.readouterr().out


def test_module_and_script_are_the_same_command(surroundings: Path) -> None:
    script = Path(sys.executable).with_name("fi-flags")
    for command in ([sys.executable, "-m", "fi_flags"], [str(script)]):
        shown = subprocess.run(
            [*command, "explain", "--json"],
            check=True,
            capture_output=True,
            cwd=surroundings,
            env=os.environ | {FLAG: "on"},
        )
        assert json.loads(shown.stdout)["decision"]["reason"] == "OPERATOR_ON"
        assert shown.stderr == b""
    usage = subprocess.run(
        [sys.executable, "-m", "fi_flags", "bogus"], check=False, capture_output=True, text=True
    )
    assert usage.returncode == 2
    assert "python -m fi_flags" in usage.stderr
