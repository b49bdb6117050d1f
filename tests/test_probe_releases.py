"""The probe on real releases, side by side: the last with the defect, the first with its fix.

`FI_FLAGS_RELEASES` may name a folder that holds them unpacked, one in a folder named for its
version; without it they are downloaded once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 500


def unpacked(version: str, cache: Path) -> Path:
    given = os.environ.get("FI_FLAGS_RELEASES")
    if given:
        return Path(given) / version
    place = cache / f"flashinfer-{version}"
    if not place.exists():
        half = place.with_name(f"{place.name}.half")
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--upgrade"),
                *("--target", str(half), f"flashinfer-python=={version}"),
            ],
            check=True,
            timeout=LIMIT_S,
        )
        half.rename(place)
    return place


def gates(release: Path | None) -> dict[str, Any]:
    """What `fi-flags gates --probe` says where a release comes before the one installed."""
    path = {} if release is None else {"PYTHONPATH": str(release)}
    done = subprocess.run(
        [sys.executable, "-m", "fi_flags", "gates", "--probe", "--json"],
        env=os.environ | path,
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
    ("version", "state"), [("0.6.12", "closed"), ("0.6.13", "open"), (None, "open")]
)
def test_probe_finds_the_defect_in_the_releases_that_have_it(
    version: str | None, state: str, pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.cache is not None
    release = version and unpacked(version, pytestconfig.cache.mkdir("fi_flags"))
    document = gates(Path(release) if release else None)
    assert document["probe"] == {"found": {"key_extras": state == "closed"}, "failure": ""}
    (gate,) = [one for one in document["gates"] if one["id"] == "file-key-extras"]
    assert gate["state"] == state
    if version:
        assert f"FlashInfer {version} " in gate["evidence"]
