"""What a look-up costs in FlashInfer after a warm start, against after tuning in the process.

One process for each release of FlashInfer: one tuner is warmed up with the flag off, which is
FlashInfer's plain `autotune`, and one with the flag on, from a table. Both then answer the same
calls, taking turns.

    python benchmarks/lookup.py [--pairs N] [--json] [VERSION ...]

`FI_FLAGS_RELEASES` names the folder of unpacked releases, as for `make compat`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
MAX_RATIO: Final = 1.1
OPS: Final = 16
TOKENS: Final = 8
CALLS: Final = 20


class Calls:
    """A workload of ops whose look-ups can be made again, as in serving."""

    name = "lookup"
    needs_cuda = False
    identity: Mapping[str, Any] = {"ops": OPS}

    def __init__(self) -> None:
        import torch
        from flashinfer.autotuner import DynamicTensorSpec, TunableRunner, TuningConfig

        class Copy(TunableRunner):  # type: ignore[misc]  # flashinfer is untyped
            def get_valid_tactics(self, _inputs: object, _profile: object) -> list[int]:
                return [0, 1]

            def forward(self, inputs: list[Any], tactic: int = -1, **_: object) -> Any:  # noqa: ANN401, ARG002
                return inputs[0]

        buckets = tuple(1 << bit for bit in range(TOKENS.bit_length()))
        spec = DynamicTensorSpec((0,), (0,), buckets, lambda n: 1 << (n.bit_length() - 1))
        self._config = TuningConfig(dynamic_tensor_specs=(spec,))
        self._runners = [Copy()]
        self._inputs = [torch.zeros(TOKENS, 8), torch.zeros(8, 8)]

    def run(self) -> None:
        """Every op once."""
        from flashinfer.autotuner import AutoTuner

        for op in range(OPS):
            _, tactic = AutoTuner.get().choose_one(
                f"op_{op}", self._runners, self._config, self._inputs
            )
            assert tactic != -1

    def microseconds(self, tuner: object) -> float:
        """The time of one look-up, while this tuner answers."""
        from flashinfer.autotuner import AutoTuner

        AutoTuner._instance = tuner
        assert AutoTuner.get() is tuner
        began = time.perf_counter()
        for _ in range(CALLS):
            self.run()
        return (time.perf_counter() - began) / CALLS / OPS * 1e6


def child(pairs: int) -> None:
    """Measure in this process, whose FlashInfer is the one asked for; print what was found."""
    sys.modules["cutlass"] = None  # type: ignore[assignment]  # it needs a GPU in several releases
    from flashinfer.autotuner import AutoTuner

    from fi_flags.settings import FlashInferSettings
    from fi_flags.tuner import wall_clock
    from fi_flags.warmup import warm_up

    logging.disable(logging.WARNING)
    calls = Calls()
    tuners: dict[str, object] = {}
    with wall_clock(repeat=1), tempfile.TemporaryDirectory() as place:
        for start, flag in (("tuned", "off"), ("cold", "on"), ("loaded", "on")):
            AutoTuner._instance = None
            # Where the gate on file keys is closed, force is what a user would have to say.
            forced = "force" if flag == "on" else flag
            settings = FlashInferSettings(persistent_cache=forced, autotune_cache_dir=place)
            outcome = warm_up(calls, settings=settings).outcome.value
            assert outcome == {"tuned": "uncached", "cold": "cold", "loaded": "warm"}[start]
            tuners[start] = AutoTuner.get()
    runs = []
    for pair in range(pairs + 1):
        order = ("tuned", "loaded") if pair % 2 else ("loaded", "tuned")
        runs.append({start: calls.microseconds(tuners[start]) for start in order})
    runs = runs[1:]  # the first warms caches up
    found = {
        "tuned_us": statistics.median(run["tuned"] for run in runs),
        "loaded_us": statistics.median(run["loaded"] for run in runs),
        "ratio": statistics.median(run["loaded"] / run["tuned"] for run in runs),
    }
    print(json.dumps(found))


def measure(version: str, pairs: int) -> dict[str, float]:
    """What `child` finds in a process with this release."""
    from tests.contract.releases import path_of

    done = subprocess.run(
        [sys.executable, __file__, "--child", "--pairs", str(pairs)],
        env=os.environ | path_of(version) | {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure, print, and tell by the exit code whether the goal is met on each release."""
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help="releases (default: those of `make compat`)")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of runs (default 200)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.pairs)
        return 0
    from tests.contract.releases import OLDER, installed

    versions = asked.versions or [*OLDER, installed()]
    found = {version: measure(version, asked.pairs) for version in versions}
    met = all(of["ratio"] <= MAX_RATIO for of in found.values())
    if asked.json:
        print(json.dumps({"releases": found, "met": met}))
        return 0 if met else 1
    print("| FlashInfer | after tuning, µs | after loading, µs | ratio |\n|---|---|---|---|")
    for version, of in found.items():
        print(f"| {version} | {of['tuned_us']:.1f} | {of['loaded_us']:.1f} | {of['ratio']:.2f} |")
    print(f"\ngoal: a ratio of at most {MAX_RATIO}: {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
