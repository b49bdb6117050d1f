"""Start after start on 2 to 4 gloo ranks, each with a random fault, until the time is up.

What must hold of each start: it ends; without a fault in a process it starts, on all ranks, with
one digest; a fault is answered by an error that names the rank; and nothing good is lost. The
sequence follows from the seed alone:

    python -m tests.distributed.soak --seconds 1200 --seed 7
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fi_flags.store import Store
from fi_flags.table import parse, rival_key
from tests.distributed.crew import Crew, Ended, Fault

LIMIT_S = 40.0
QUICK = {"autotune_join_s": 6, "autotune_timeout_s": 3, "autotune_stall_s": 6}
PLACES = [
    *("vote:1", "phase:load", "vote:2", "phase:run", "qkv", "down", "after"),
    *("phase:merge", "vote:3", "phase:publish"),
]
CALM = 0.45  # the share of starts without a fault in a process


@dataclass
class Soak:
    """One run: a world, a directory, and what has happened so far."""

    seed: int
    place: Path
    world: int = 2
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)  # noqa: S311 - it shall be repeatable
        self.world = self.rng.choice([2, 2, 3, 4])
        # 3 ranks cannot share the tiny decoder's heads.
        self.world = 4 if self.world == 3 else self.world

    def step(self) -> str:
        """One start with its preparations; returns what it was.

        Raises:
            AssertionError: Something did not hold.
        """
        rng = self.rng
        damage = rng.choice(list(DAMAGES)) if rng.random() < 0.4 else "none"
        odd = rng.choice(list(ODDITIES)) if rng.random() < 0.3 else "alike"
        flag = rng.choice(["on", "on", "on", "off", "shadow", "force"])
        fault = None
        if rng.random() > CALM:
            how = rng.choice(["raise", "die", "kill", "stall"])
            fault = Fault(rng.randrange(self.world), rng.choice(PLACES), how)
        extra = rng.random() < 0.3
        odd_rank = rng.randrange(self.world)
        text = f"{flag}, {damage}, {odd}, {fault}, extra ops {extra}"

        for path in self.tables():
            DAMAGES[damage](path, rng)
        good = {path: path.read_bytes() for path in self.tables() if Store(path).read({}).table}
        ended = Crew(
            self.world,
            self.place,
            QUICK,
            each=lambda rank: ODDITIES[odd] if rank == odd_rank else {},
            limit=LIMIT_S,
            grace=4.0,  # a rank whose connection broke speaks first; who died is known soon after
        ).start(
            flag,
            fault=fault,
            # What stalls outside the model is ours; it stays there, and its peers must not.
            abandoned=(fault.rank,)
            if fault and fault.how == "stall" and ":" in fault.where
            else (),
            ops=lambda rank: (f"only{rank}",) if extra else (),
        )
        outcome = self.judge(ended, fault, text)
        self.nothing_lost(good, text)
        self.counts[outcome] += 1
        return f"{text}: {outcome}"

    def judge(self, ended: list[Ended], fault: Fault | None, text: str) -> str:
        reports = [end.result.get("report") for end in ended]
        if fault is None:
            assert all(reports), f"{text}: a start without a fault failed: {ended}"
        if all(reports):
            found: list[dict[str, Any]] = [report for report in reports if report]
            outcomes = {report["outcome"] for report in found}
            assert len(outcomes) == 1, f"{text}: {outcomes}"
            digests = {rank["digest"] for report in found for rank in report["ranks"]}
            tuned_alone = outcomes == {"uncached"}
            assert tuned_alone or len(digests) == 1, f"{text}: {digests}"
            return str(outcomes.pop())
        assert fault is not None
        for rank, end in enumerate(ended):
            if rank != fault.rank and not end.result.get("report"):
                # 1: the model's own next collective failed, after the warm-up was over.
                assert end.exit_code in (1, 4, 5), f"{text}: rank {rank}: {end}"
                said = f"{end.result}{end.log}"
                assert f"rank {fault.rank}" in said or end.exit_code == 1, f"{text}: {rank}: {end}"
        return f"fault: {fault.how}"

    def nothing_lost(self, good: dict[Path, bytes], text: str) -> None:
        """Each sound table is still there, with more or the same calls, or set aside as it was."""
        for path, data in good.items():
            now = Store(path).read({}).table
            if now is not None:
                calls = {rival_key(key) for key in now.entries}
                lost = {rival_key(key) for key in parse(data).entries} - calls
                assert not lost, f"{text}: {path} has lost {lost}"
            else:
                aside = [one.read_bytes() for one in Store(path).quarantined() if one.is_file()]
                assert data in aside, f"{text}: {path} is gone"

    def tables(self) -> list[Path]:
        found = (self.place / "tables").rglob("*.json")
        return [path for path in found if path.is_file() and not path.is_symlink()]


def _cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) or 1)])


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 5)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(bytes(data))


def _impossible(path: Path, _rng: random.Random) -> None:
    """Tactics that no runner has, under a digest that is right."""
    table = Store(path).read({}).table
    if table is not None:
        for key, entry in table.entries.items():
            table.entries[key] = [entry[0], 10_000, *entry[2:]]
        path.write_bytes(table.render())


def _foreign(path: Path, _rng: random.Random) -> None:
    table = Store(path).read({}).table
    if table is not None:
        table.stamps["gpu"] = "another"
        path.write_bytes(table.render())


def _directory(path: Path, _rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, _rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _marker(path: Path, rng: random.Random) -> None:
    path.with_suffix(".trial").write_bytes(rng.choice([b"", b"{", b"[]", b"\x00" * 9]))


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "none": lambda _path, _rng: None,
    "cut": _cut,
    "flipped": _flip,
    "impossible": _impossible,
    "foreign": _foreign,
    "gone": lambda path, _rng: path.unlink(),
    "directory": _directory,
    "link": _link,
    "marker": _marker,
    "empty": lambda path, _rng: path.write_bytes(b"{}"),
}
# What one rank has and its peers have not.
ODDITIES: dict[str, dict[str, Any]] = {
    "alike": {},
    "flag": {"persistent_cache": "off"},
    "skips": {"autotune_skip_ops": ["fi_flags_cpu::down"]},
    "disk": {"autotune_cache_dir": "/proc/fi_flags"},
    "read-only": {"autotune_cache_access": "ro"},
}


def run(seed: int, seconds: float, place: Path) -> Soak:
    """Start after start until the time is up; says each on standard output."""
    soak = Soak(seed, place)
    until = time.monotonic() + seconds
    print(f"seed {seed}, {soak.world} ranks", flush=True)  # noqa: T201
    number = 0
    while time.monotonic() < until:
        number += 1
        print(f"{number:4} {soak.step()}", flush=True)  # noqa: T201
    print(json.dumps(dict(soak.counts)), flush=True)  # noqa: T201
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    seed = options.seed
    while time.monotonic() < until:  # another world and a fresh directory every few minutes
        with tempfile.TemporaryDirectory(prefix="fi_flags-soak-") as directory:
            run(seed, min(240.0, until - time.monotonic()), Path(directory))
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
