"""What every test starts from: no flag, no cache root, no configuration of its developer's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_FOREIGN = ("VLLM_", "XDG_", "TORCHELASTIC_")
_PLACES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment that says nothing to us."""
    for name in list(os.environ):
        if name.startswith(_FOREIGN) or name in _PLACES:
            monkeypatch.delenv(name)
    place = tmp_path / "cwd"
    place.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(place)
    return place
