"""What a start costs: `fi-flags explain --json` as a whole process, and `decide` once imported.

The process is compared with one that only imports the libraries that the command line is made of,
in pairs that take turns in going first, so that a busy machine slows both alike. Both run from
compiled modules, as installed packages do.

    python benchmarks/startup.py [--pairs N] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from fi_flags.decision import decide
from fi_flags.facts import gather_facts
from fi_flags.gates import load_gates
from fi_flags.settings import FlashInferSettings

EXPLAIN: Final = [str(Path(sys.executable).with_name("fi-flags")), "explain", "--json"]
IMPORTS: Final = [sys.executable, "-c", "import pydantic_settings, structlog, typer, rich"]
MAX_RATIO: Final = 1.3
MAX_DECIDE_US: Final = 1000.0


def seconds(command: list[str], compiled: str) -> float:
    """How long a process takes from start to end.

    Args:
        command: What to run.
        compiled: Where Python keeps compiled modules meanwhile.
    """
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    return time.perf_counter() - began


def compare(pairs: int) -> dict[str, float]:
    """Median times of both commands in milliseconds, and the median of each pair's ratio."""
    runs = []
    with tempfile.TemporaryDirectory() as compiled:
        for command in (EXPLAIN, IMPORTS):
            seconds(command, compiled)
        for pair in range(pairs):
            order = [EXPLAIN, IMPORTS] if pair % 2 else [IMPORTS, EXPLAIN]
            took = [seconds(command, compiled) for command in order]
            runs.append(took if pair % 2 else took[::-1])
    return {
        "explain_ms": statistics.median(explain for explain, _ in runs) * 1e3,
        "imports_ms": statistics.median(imports for _, imports in runs) * 1e3,
        "ratio": statistics.median(explain / imports for explain, imports in runs),
    }


def decide_us(calls: int = 1000) -> float:
    """The median time of one `decide` in microseconds, with settings and facts at hand."""
    settings = FlashInferSettings(persistent_cache="auto")
    facts, gates = gather_facts(), load_gates(settings.gates_file)
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        decide(settings, facts, gates)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> int:
    """Measure, print, and tell by the exit code whether both goals are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs of processes (default 15)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    asked = parser.parse_args()
    found = {"pairs": asked.pairs, **compare(asked.pairs), "decide_us": decide_us()}
    met = found["ratio"] <= MAX_RATIO and found["decide_us"] < MAX_DECIDE_US
    if asked.json:
        print(json.dumps({name: round(value, 3) for name, value in found.items()} | {"met": met}))
    else:
        print(f"fi-flags explain --json  {found['explain_ms']:7.1f} ms, median of {asked.pairs}")
        print(f"imports alone            {found['imports_ms']:7.1f} ms")
        print(f"ratio, median of pairs   {found['ratio']:7.2f}     goal: at most {MAX_RATIO}")
        print(
            f"decide                   {found['decide_us']:7.1f} µs  goal: under {MAX_DECIDE_US:g}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
