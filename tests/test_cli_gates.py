"""`fi-flags gates`, `fi-flags rollout`, `--version` and completion, as an operator runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fi_flags
from fi_flags import cli, probe
from fi_flags.cli import app
from fi_flags.facts import Facts
from fi_flags.gates import load_gates
from fi_flags.probe import Probed

GATES_FILE = "VLLM_FLASHINFER_GATES_FILE"
OLD = Facts(
    flashinfer="0.6.12", torch="2.11.0+cu130", python="3.12.1", host="here", cuda="13.0",
    gpu="NVIDIA H200", capability=(9, 0), driver="580.1", vllm="0.23.0",
)  # fmt: skip


def run(*arguments: str, stdin: Any = None, **environ: str) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin, env=environ)


def shown(*arguments: str, stdin: Any = None, **environ: str) -> dict[str, Any]:
    result = run(*arguments, "--json", stdin=stdin, **environ)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stderr.splitlines()]


@pytest.fixture
def old_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "gather_facts", lambda: OLD)


def probing(monkeypatch: pytest.MonkeyPatch, probed: Probed) -> None:
    monkeypatch.setattr(probe, "run_probes", lambda: probed)


# gates


@pytest.mark.usefixtures("old_release")
def test_gates_are_told_with_state_link_fix_and_evidence() -> None:
    document = shown("gates")
    assert set(document) == {"gates", "probe"}
    assert document["probe"] is None
    assert [one["id"] for one in document["gates"]] == [one.id for one in load_gates()]
    assert document["gates"][0] == {
        "id": "file-key-extras",
        "title": load_gates()[0].title,
        "state": "closed",
        "url": "https://github.com/flashinfer-ai/flashinfer/issues/3363",
        "fixed_in": "0.6.13",
        "evidence": "FlashInfer 0.6.12 is <0.6.13",
    }
    assert {one["state"] for one in document["gates"]} == {"open", "closed"}


@pytest.mark.usefixtures("old_release")
def test_gates_for_a_person() -> None:
    result = run("gates")
    assert result.exit_code == 0
    for told in ("closed", "open", "file-key-extras", "0.6.13", "no version known", "see --probe"):
        assert told in result.stdout


@pytest.mark.usefixtures("old_release")
@pytest.mark.parametrize("found", [True, False])
def test_probe_wins_and_the_log_says_so_where_it_disagrees(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    probing(monkeypatch, Probed({"key_extras": found}))
    result = run("gates", "--probe", "--json")
    document = json.loads(result.stdout)
    assert document["gates"][0]["state"] == ("closed" if found else "open")
    assert document["probe"] == {"found": {"key_extras": found}, "failure": ""}
    told = [(one["event"], one["level"], one["gate"]) for one in events(result)]
    expected = ("flashinfer_cache_probe_disagrees", "warning", "file-key-extras")
    assert told == ([] if found else [expected])
    assert "it ran" in run("gates", "--probe").stdout


@pytest.mark.usefixtures("old_release")
def test_probe_that_does_not_run_is_said_and_the_table_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probing(monkeypatch, Probed(failure="it broke"))
    result = run("gates", "--probe", "--json")
    assert json.loads(result.stdout)["gates"][0]["state"] == "closed"
    (event,) = events(result)
    assert (event["event"], event["cause"]) == ("flashinfer_cache_probe_failed", "it broke")
    assert "it did not run: it broke" in run("gates", "--probe").stdout


@pytest.mark.usefixtures("old_release")
@pytest.mark.parametrize(
    ("found", "reason"), [(True, "GATE_CLOSED"), (False, "OPERATOR_ON"), (None, "GATE_CLOSED")]
)
def test_explain_decides_by_the_probe(
    found: bool | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probing(monkeypatch, Probed(failure="no") if found is None else Probed({"key_extras": found}))
    environ = {"VLLM_FLASHINFER_PERSISTENT_CACHE": "on"}
    assert shown("explain", **environ)["decision"]["reason"] == "GATE_CLOSED"
    assert shown("explain", "--probe", **environ)["decision"]["reason"] == reason


@pytest.mark.usefixtures("old_release")
def test_own_file_lifts_a_gate_for_explain_and_gates(tmp_path: Path) -> None:
    file = tmp_path / "gates.toml"
    file.write_text('lift = ["file-key-extras"]')
    environ = {"VLLM_FLASHINFER_PERSISTENT_CACHE": "on", GATES_FILE: str(file)}
    assert shown("gates", **environ)["gates"][0]["state"] == "lifted"
    decision = shown("explain", **environ)["decision"]
    assert decision["reason"] == "OPERATOR_ON"
    assert decision["gates"][0]["state"] == "lifted"
    config = tmp_path / "flags.toml"
    config.write_text(f'gates_file = "{file}"')
    assert shown("gates", "--config", str(config))["gates"][0]["state"] == "lifted"


@pytest.mark.parametrize("command", ["gates", "explain", "warmup"])
def test_bad_own_file_exits_2_and_names_it(command: str, tmp_path: Path) -> None:
    file = tmp_path / "gates.toml"
    file.write_text('lift = ["file-key-extra"]')
    result = run(command, **{GATES_FILE: str(file)})
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"'file-key-extra' (toml:{file}) is not a gate" in result.stderr
    assert "did you mean file-key-extras?" in result.stderr


# rollout


def test_rollout_tells_who_is_in(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.write_bytes(b"\xef\xbb\xbf# fleet\n\nme\n  you \nme\n")
    environ = {"VLLM_FLASHINFER_ROLLOUT_PERCENT": "50", "VLLM_FLASHINFER_ROLLOUT_ID": "x"}
    document = shown("rollout", "--ids", str(ids), **environ)
    assert [one["id"] for one in document["ids"]] == ["me", "you"]
    assert document["ids"][0]["place"] == pytest.approx(28.16, abs=0.01)
    assert document["ids"][0]["included"] is True
    assert (document["percent"], document["salt"], document["total"]) == (50, "", 2)
    assert document["included"] == sum(one["included"] for one in document["ids"])
    person = run("rollout", "--ids", str(ids), **environ)
    assert f"{document['included']} of 2" in person.stdout
    assert "28.16" in person.stdout


def test_rollout_takes_percent_and_salt_from_the_settings() -> None:
    ids = "\n".join(f"host-{number}" for number in range(2000)).encode()
    environ = {"VLLM_FLASHINFER_ROLLOUT_ID": "x", "VLLM_FLASHINFER_ROLLOUT_PERCENT": "10"}

    def included(**more: str) -> set[str]:
        document = shown("rollout", "--ids", "-", stdin=ids, **environ | more)
        return {one["id"] for one in document["ids"] if one["included"]}

    few = included()
    assert len(few) == pytest.approx(200, abs=50)
    assert few < included(VLLM_FLASHINFER_ROLLOUT_PERCENT="20")
    assert few != included(VLLM_FLASHINFER_ROLLOUT_SALT="other")


def test_rollout_of_nobody() -> None:
    document = shown("rollout", "--ids", "-", stdin=b"# nobody\n")
    assert (document["total"], document["included"], document["share"]) == (0, 0, None)
    assert "0 of 0" in run("rollout", "--ids", "-", stdin=b"").stdout


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_ids_that_cannot_be_read_exit_2(content: bytes | None, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    if content is not None:
        ids.write_bytes(content)
    result = run("rollout", "--ids", str(ids))
    assert result.exit_code == 2
    assert str(ids) in result.stderr


# version and completion


@pytest.mark.usefixtures("old_release")
def test_version_tells_what_a_bug_report_needs() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"fi-flags {fi_flags.__version__}",
        "Python 3.12.1",
        "FlashInfer 0.6.12",
        "torch 2.11.0+cu130",
        "CUDA 13.0",
        "vLLM 0.23.0",
        "SGLang none",
        "GPU NVIDIA H200 (sm90), driver 580.1",
    ]


def test_version_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Facts(flashinfer=None, torch=None, python="3.12.1", host="here")
    monkeypatch.setattr(cli, "gather_facts", lambda: bare)
    assert run("--version").stdout.splitlines()[-1] == "GPU none"


def completed(words: str) -> list[str]:
    script = Path(sys.executable).with_name("fi-flags")
    done = subprocess.run(
        [str(script)],
        env=os.environ
        | {
            "_FI_FLAGS_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_shell_completes_commands_and_options() -> None:
    assert completed("fi-flags ga") == ["gates"]
    assert completed("fi-flags gates --pr") == ["--probe"]


def test_shell_completion_can_be_shown_and_installed() -> None:
    help_ = re.sub(r"\x1b\[[\d;]*m", "", run("--help").stdout)
    assert "--install-completion" in help_
    script = Path(sys.executable).with_name("fi-flags")
    done = subprocess.run(
        [str(script)],
        env=os.environ | {"_FI_FLAGS_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_FI_FLAGS_COMPLETE=complete_bash" in done.stdout
    assert "fi-flags" in done.stdout
