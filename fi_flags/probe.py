"""What the installed FlashInfer does, found out by trying: in a child process, without a GPU.

`run_probes` starts `python -m fi_flags.probe`, which runs each probe and prints what it found as
JSON. Whatever happens there, nothing is raised here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["Probed", "main", "run_probes"]

LIMIT_S: Final = 120.0


@dataclass(frozen=True)
class Probed:
    """What the probes found.

    Attributes:
        found: For each probe that ran, whether it found the defect.
        failure: Why they did not run, or an empty text.
    """

    found: Mapping[str, bool] = field(default_factory=dict)
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        """The findings as the command line prints them."""
        return {"found": dict(self.found), "failure": self.failure}


def run_probes(limit_s: float = LIMIT_S) -> Probed:
    """Run every probe on the installed FlashInfer, in a child process that sees no GPU.

    Args:
        limit_s: Seconds after which the child is ended.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fi_flags.probe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probed(failure=f"it took longer than {limit_s:g} seconds")
    except OSError as error:
        return Probed(failure=f"it could not be started: {error}")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return Probed(failure=f"it ended with {done.returncode}: {said[-1] if said else 'no word'}")
    try:
        return Probed({str(name): bool(value) for name, value in json.loads(done.stdout).items()})
    except (ValueError, AttributeError):
        return Probed(failure="it printed something else than its findings")


def main() -> None:
    """Run every probe here, and print what each found as one JSON object."""
    # FlashInfer and what it imports may print; standard output is for the findings alone.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        # Without a GPU, old releases fail in what they import from it; none of it is needed.
        sys.modules["cutlass"] = None  # type: ignore[assignment]
        out.write(json.dumps({name: probe() for name, probe in _PROBES.items()}))


def _key_extras() -> bool:
    """Whether two calls that differ in their extras only fail to come back from a saved table.

    https://github.com/flashinfer-ai/flashinfer/issues/3363
    """
    import torch  # noqa: PLC0415 - only the child pays for them
    from flashinfer.autotuner import (  # noqa: PLC0415
        AutoTuner,
        TunableRunner,
        TuningConfig,
        autotune,
    )

    from fi_flags.tuner import wall_clock  # noqa: PLC0415

    class Layout(TunableRunner):  # type: ignore[misc]
        """Its extra tells which of two tactics is the valid one."""

        def __init__(self, tactic: int) -> None:
            self.tactic = tactic

        def get_valid_tactics(self, *_: object) -> list[int]:
            return [self.tactic]

        def get_cache_key_extras(self, _inputs: object) -> tuple[int]:
            return (self.tactic,)

        def forward(self, inputs: list[Any], **_: object) -> Any:  # noqa: ANN401
            return inputs[0]

    def chosen(tuner: Any) -> list[Any]:  # noqa: ANN401 - FlashInfer is untyped
        inputs = [torch.zeros(4, 4)]
        return [
            tuner.choose_one("fi_flags::probe", [Layout(tactic)], TuningConfig(), inputs)[1]
            for tactic in (0, 1)
        ]

    with wall_clock(repeat=1), tempfile.TemporaryDirectory(prefix="fi_flags-") as directory:
        table = str(Path(directory, "table.json"))
        with autotune(True):  # noqa: FBT003 - as upstream spells it
            tuned = chosen(AutoTuner.get())
        AutoTuner.get().save_configs(table)
        fresh = AutoTuner()
        if tuned != [0, 1] or fresh.load_configs(table) is False:
            raise RuntimeError(f"nothing was tuned or loaded: {tuned}")
        return chosen(fresh) != tuned


_PROBES: Final[Mapping[str, Callable[[], bool]]] = {"key_extras": _key_extras}

if __name__ == "__main__":
    main()
