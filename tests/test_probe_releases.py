"""The probe on real releases, side by side: the last with the defect, the first with its fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.contract.releases import LIMIT_S, installed, path_of


def gates(version: str) -> dict[str, Any]:
    """What `fi-flags gates --probe` says where a release comes before the one installed."""
    done = subprocess.run(
        [sys.executable, "-m", "fi_flags", "gates", "--probe", "--json"],
        env=os.environ | path_of(version),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stderr == ""  # probe and table agree, so there is nothing to warn about
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("version", "state"), [("0.6.12", "closed"), ("0.6.13", "open"), (installed(), "open")]
)
def test_probe_finds_the_defect_in_the_releases_that_have_it(version: str, state: str) -> None:
    document = gates(version)
    assert document["probe"] == {"found": {"key_extras": state == "closed"}, "failure": ""}
    (gate,) = [one for one in document["gates"] if one["id"] == "file-key-extras"]
    assert gate["state"] == state
    if version != installed():
        assert f"FlashInfer {version} " in gate["evidence"]
