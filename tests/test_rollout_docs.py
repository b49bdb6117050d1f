"""docs/rollout.md, walked from top to bottom: each step's settings write the lines it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fi_flags.cli import app
from fi_flags.layers import FLAGS_FILE, parse_toml
from fi_flags.tuner import tuner_per_thread

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "rollout.md").read_text()
FILE = "/etc/fi-flags/fi_flags.toml"
_BLOCK = re.MULTILINE | re.DOTALL


@dataclass
class Start:
    """A start that the page shows: what is set, and lines of its log."""

    section: str
    toml: str
    environ: dict[str, str] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)


def starts() -> Iterator[Start]:
    """Each block of log lines, with the file and the variables that the blocks above it set."""
    toml = ""
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        environ: dict[str, str] = {}
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", section, _BLOCK):
            if language == "toml":
                toml = text
            elif language == "sh":
                environ |= dict(re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE))
            elif language == "json":
                lines = [json.loads(line) for line in text.splitlines()]
                yield Start(section.splitlines()[0], toml, dict(environ), lines)


def shown(part: Any, whole: Any) -> Any:
    """Of a dictionary, the names that the page shows."""
    return {name: whole[name] for name in part} if isinstance(part, dict) else whole


def test_every_step_writes_the_lines_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "canary-1")
    file = tmp_path / "fi_flags.toml"
    (command,) = set(re.findall(r"^fi-flags (warmup .*)$", PAGE, re.MULTILINE))
    seen = []
    for start in starts():
        file.write_text(start.toml)
        told = re.search(r"deployment out: (\S+) draws", str(start.lines))
        environ = {
            "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(tmp_path / "tables"),
            "VLLM_FLASHINFER_ROLLOUT_ID": told[1] if told else "team-29",
            FLAGS_FILE: str(file),
            **start.environ,
        }
        with tuner_per_thread():
            done = CliRunner().invoke(app, [*command.split(), "--json"], env=environ)
        assert done.exit_code == 0, done.output
        log = done.stderr.replace(str(file), FILE).splitlines()
        real = {line["event"]: line for line in map(json.loads, log) if "event" in line}
        for line in start.lines:
            written = real[line["event"]]
            assert {"level": "info"} | line == {
                name: shown(line.get(name), written[name]) for name in {"level", *line}
            }
        seen.append((start.section, real["flashinfer_autotune_outcome"]["outcome"]))
    assert seen == [
        ("Step 1: off", "uncached"),
        ("Step 2: shadow", "uncached"),
        ("Step 2: shadow", "uncached"),
        ("Step 3: canary", "warm"),
        ("Step 3: canary", "uncached"),
        ("Step 4: on", "warm"),
        ("Back", "uncached"),
        ("What force is for", "warm"),
    ]


def test_preview_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^fi-flags (rollout .*)$", PAGE, re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE, _BLOCK)
    monkeypatch.chdir(tmp_path)
    Path("deployments.txt").write_text("\n".join(re.findall(r"^team-\d+", shown, re.MULTILINE)))
    words = command.replace(FILE, str(ROOT / "config" / "canary.toml")).split()
    printed = CliRunner().invoke(app, words).stdout
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


@pytest.mark.parametrize("name", ["canary", "production"])
def test_steps_are_the_files_they_link_to(name: str) -> None:
    (shown,) = re.findall(rf"config/{name}\.toml\).*?^```toml\n(.*?)^```", PAGE, _BLOCK)
    shipped = (ROOT / "config" / f"{name}.toml").read_bytes()
    assert parse_toml(shown.encode()) == parse_toml(shipped)
