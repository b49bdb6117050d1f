"""Settings files cut at every byte and mutated: an error that names the file, or settings; and a
server always starts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fi_flags.errors import SettingsError
from fi_flags.settings import FlashInferSettings, settings_or_off
from fi_flags.values import Mode

CONFIG = Path(__file__).parents[2] / "config"
TOML = [CONFIG / "canary.toml", CONFIG / "production.toml"]
DOTENV = b"""# a comment
VLLM_FLASHINFER_PERSISTENT_CACHE=auto
VLLM_FLASHINFER_ROLLOUT_PERCENT="12.5"
export VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR=/var/cache/fi_flags
VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS='a,b'
"""
MUTATIONS = 5_000
SEED = 5


def load_toml(path: Path) -> None:
    """Load, and hold a refusal to what it must say; anything else that is raised is a defect."""
    try:
        FlashInferSettings.load(environ={}, dotenv=None, config=path)
    except SettingsError as error:
        assert str(path) in f"{error} {error.fields}"  # noqa: PT017
        assert error.exit_code == 2  # noqa: PT017


def load_dotenv(path: Path) -> None:
    try:
        FlashInferSettings.load(environ={}, dotenv=path)
    except SettingsError as error:
        assert "VLLM_" in str(error) or str(path) in f"{error} {error.fields}"  # noqa: PT017


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[place : place + rng.randint(1, 20)]
            case 2:
                start = rng.randrange(len(data))
                changed[place:place] = data[start : start + rng.randint(1, 20)]
            case _:
                words = [
                    b"nan",
                    b"1e999",
                    b"[" * 50,
                    b"\xff\xfe",
                    b"true",
                    b'"',
                    b"=",
                    b"2026-01-01",
                ]
                changed[place:place] = rng.choice(words)
    return bytes(changed)


@pytest.mark.parametrize("path", TOML, ids=lambda path: path.stem)
def test_a_toml_file_cut_at_any_byte_is_read_or_refused_by_name(path: Path, tmp_path: Path) -> None:
    data, place = path.read_bytes(), tmp_path / "cut.toml"
    for end in range(len(data) + 1):
        place.write_bytes(data[:end])
        load_toml(place)


@pytest.mark.parametrize("path", TOML, ids=lambda path: path.stem)
def test_a_mutated_toml_file_is_read_or_refused_by_name(path: Path, tmp_path: Path) -> None:
    rng, data, place = random.Random(SEED), path.read_bytes(), tmp_path / "mutated.toml"  # noqa: S311
    for _ in range(MUTATIONS):
        place.write_bytes(mutated(data, rng))
        load_toml(place)


def test_a_dotenv_file_cut_or_mutated_is_read_or_refused_by_name(tmp_path: Path) -> None:
    rng, place = random.Random(SEED), tmp_path / ".env"  # noqa: S311
    for end in range(len(DOTENV) + 1):
        place.write_bytes(DOTENV[:end])
        load_dotenv(place)
    for _ in range(MUTATIONS):
        place.write_bytes(mutated(DOTENV, rng))
        load_dotenv(place)


def test_a_server_starts_whatever_its_settings_file_is(tmp_path: Path) -> None:
    rng, data = random.Random(SEED), TOML[0].read_bytes()  # noqa: S311
    place = tmp_path / "flags.toml"
    for _ in range(500):
        place.write_bytes(mutated(data, rng))
        settings = settings_or_off(environ={}, dotenv=None, config=place)
        assert settings.invalid is None or settings.persistent_cache is Mode.OFF
