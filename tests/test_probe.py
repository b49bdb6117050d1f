"""The probe: what becomes of its child process, and the real one on the installed FlashInfer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fi_flags import probe
from fi_flags.gates import PROBES
from fi_flags.probe import Probed, run_probes


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to run in place of Python with the real probe."""
    script = tmp_path / "child"
    monkeypatch.setattr(sys, "executable", str(script))
    return script


def says(child: Path, *commands: str) -> None:
    child.write_text("\n".join(["#!/bin/sh", *commands]))
    child.chmod(0o755)


def test_probe_runs_on_the_flashinfer_installed_here() -> None:
    assert run_probes() == Probed({"key_extras": False})


def test_every_probe_that_a_gate_may_name_is_there() -> None:
    assert tuple(probe._PROBES) == PROBES


def test_what_the_child_imports_may_print_and_sees_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib.util, os, sys\n"
        "os.system('echo loud')\n"
        "print('louder')\n"
        "assert importlib.util.find_spec('cutlass') is None\n"
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
        f"sys.path.remove({str(tmp_path)!r})\n"
        "del sys.modules['flashinfer']\n"
        "import flashinfer\n"  # the real one, which takes this one's place
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert run_probes() == Probed({"key_extras": False})


@pytest.mark.parametrize(
    ("commands", "failure"),
    [
        (["echo first >&2; echo last >&2; exit 3"], "it ended with 3: last"),
        (["exit 3"], "it ended with 3: no word"),
        (["kill -9 $$"], "it ended with -9: no word"),
        (["echo nonsense"], "it printed something else than its findings"),
        (["echo []"], "it printed something else than its findings"),
        ([], "it printed something else than its findings"),
    ],
)
def test_failure_of_the_child_is_told(commands: list[str], failure: str, child: Path) -> None:
    says(child, *commands)
    assert run_probes() == Probed(failure=failure)


def test_child_that_cannot_be_started_is_told(child: Path) -> None:
    assert not child.exists()
    assert run_probes().failure.startswith("it could not be started: ")


def test_child_that_does_not_end_is_ended(child: Path) -> None:
    says(child, "exec sleep 60")
    began = time.monotonic()
    assert run_probes(0.2).failure == "it took longer than 0.2 seconds"
    assert time.monotonic() - began < 30


def test_findings_are_what_the_child_printed(child: Path) -> None:
    says(child, """echo '{"key_extras": true}'""")
    probed = run_probes()
    assert probed == Probed({"key_extras": True})
    assert probed.to_json() == {"found": {"key_extras": True}, "failure": ""}


def test_module_without_flashinfer_fails_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flashinfer.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "fi_flags.probe"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "not here" in done.stderr
