"""The pytest plug-in: fixtures that set the flag for a test, without touching its environment.

pytest imports it at every start, so whatever costs time is imported when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from fi_flags.values import Mode

__all__ = ["SetFlag", "both_flashinfer_flags", "flashinfer_flag"]


class SetFlag(Protocol):
    """What the fixture `flashinfer_flag` gives a test."""

    def __call__(self, mode: object, **knobs: object) -> None:
        """Set the flag, and other settings by name, until the test ends."""


@pytest.fixture
def flashinfer_flag(tmp_path: Path) -> Iterator[SetFlag]:
    """Sets the flag for the rest of a test: `flashinfer_flag("on", autotune_split="leader")`.

    Tables lie below the test's `tmp_path` unless `autotune_cache_dir` is given; a later call
    adds to an earlier one.
    """
    from fi_flags.layers import OVERRIDE, Inputs  # noqa: PLC0415 - see above
    from fi_flags.settings import FlashInferSettings  # noqa: PLC0415

    # One mapping from set-up to teardown: an async test, or one that calls from a thread, has a
    # copy of this context, and what it set itself there would be neither seen nor undone here.
    mine = {**OVERRIDE.get(), "autotune_cache_dir": tmp_path / "fi_flags"}

    def set_flag(mode: object, **knobs: object) -> None:
        asked = {**mine, "persistent_cache": mode, **knobs}
        FlashInferSettings(Inputs(environ={}, dotenv=None, places=(), override=asked))
        mine.update(asked)

    token = OVERRIDE.set(mine)
    try:
        yield set_flag
    finally:
        OVERRIDE.reset(token)


@pytest.fixture(params=["off", "on"])
def both_flashinfer_flags(request: pytest.FixtureRequest, flashinfer_flag: SetFlag) -> Mode:
    """Runs a test twice, with the flag off and on; its value is the mode in force."""
    from fi_flags.values import Mode  # noqa: PLC0415 - see above

    mode = Mode(request.param)
    flashinfer_flag(mode)
    return mode
