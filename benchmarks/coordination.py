"""What it costs ranks to agree: our warm-up against FlashInfer's own group timing, side by side.

Real gloo ranks on this machine tune the same ops through FlashInfer's AutoTuner, in turns: under
`warm_up`, cold, and under `set_autotune_process_group`, which averages each tactic's time over the
group. A tactic here sleeps instead of running a kernel, so that more ranks than cores tune at the
pace of one; that is what a machine without GPUs lacks. Then a vote of in-memory ranks, from 2 to
1,024, with the plan of the whole group.

    python benchmarks/coordination.py [--ranks 2 4 8] [--calls N] [--votes N ...] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from fi_flags.ballots import Ballot
from fi_flags.plan import count_ballots, read_plans
from fi_flags.ranks import Ranks
from fi_flags.testing import run_ranks
from fi_flags.tuner import wall_clock
from fi_flags.watch import Deadlines

MAX_SHARE: Final = 0.02
MAX_VOTE_S: Final = 1.0
LIMIT_S: Final = 540.0
TACTICS: Final = 8
TOKENS: Final = 8  # four buckets
TACTIC_S: Final = 0.002
REPEAT: Final = 10


@dataclass
class Sleeper:
    """A workload of ``ops`` calls, each of four buckets and eight tactics that sleep."""

    ops: int
    name: str = "sleeper"
    needs_cuda: bool = False

    @property
    def identity(self) -> Mapping[str, Any]:
        """How many ops there are."""
        return {"ops": self.ops}

    def run(self) -> None:
        """Ask FlashInfer's tuner for a tactic for each op."""
        import torch
        from flashinfer.autotuner import (
            AutoTuner,
            DynamicTensorSpec,
            TunableRunner,
            TuningConfig,
        )

        class Sleep(TunableRunner):  # type: ignore[misc]  # flashinfer is untyped
            def get_valid_tactics(self, _inputs: object, _profile: object) -> list[int]:
                return list(range(TACTICS))

            def forward(self, inputs: list[Any], tactic: int = -1, **_: object) -> Any:  # noqa: ANN401
                time.sleep(TACTIC_S * (1 + max(tactic, 0) / TACTICS))
                return inputs[0]

        buckets = tuple(1 << bit for bit in range(TOKENS.bit_length()))
        spec = DynamicTensorSpec((0,), (0,), buckets, lambda n: 1 << (n.bit_length() - 1))
        config = TuningConfig(dynamic_tensor_specs=(spec,))
        for op in range(self.ops):
            AutoTuner.get().choose_one(
                f"sleep_{op}", [Sleep()], config, [torch.zeros(TOKENS, 8), torch.zeros(8, 8)]
            )


@contextmanager
def counted() -> Iterator[list[float]]:
    """The seconds of each all-reduce that is made meanwhile."""
    import torch.distributed as dist

    real, took = dist.all_reduce, []

    def count(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            took.append(time.perf_counter() - began)

    dist.all_reduce = count
    try:
        yield took
    finally:
        dist.all_reduce = real


def ours(ops: int, place: Path) -> dict[str, float]:
    """A cold start under the flag: its votes, its seconds, and those not spent tuning."""
    from fi_flags import warm_up
    from fi_flags.settings import FlashInferSettings

    settings = FlashInferSettings(persistent_cache="on", autotune_cache_dir=str(place))
    with counted() as took:
        report = warm_up(Sleeper(ops), settings=settings)
    assert report.outcome.value == "cold", report
    tuning = max(rank.seconds for rank in report.ranks)
    return {
        "synchronisations": report.ranks[0].votes + len(took),
        "seconds": report.seconds,
        "coordination_s": report.seconds - tuning,
    }


def theirs(ops: int, _place: Path) -> dict[str, float]:
    """FlashInfer's group timing: its all-reduces, its seconds, and those spent in all-reduces."""
    import torch.distributed as dist
    from flashinfer.autotuner import autotune, set_autotune_process_group

    began = time.perf_counter()
    with counted() as took:
        set_autotune_process_group(dist.group.WORLD)
        try:
            with autotune(tune_mode=True):
                Sleeper(ops).run()
        finally:
            set_autotune_process_group(None)
        dist.barrier()
    return {
        "synchronisations": len(took) + 1,
        "seconds": time.perf_counter() - began,
        "coordination_s": sum(took),
    }


WAYS: Final[Mapping[str, Callable[[int, Path], dict[str, float]]]] = {
    "fi_flags": ours,
    "group timing": theirs,
}


def rank_main(way: str, ops: int, rank: int, world: int, port: int, place: str) -> None:
    """One rank: joins the group, measures one way, and leaves what it found in a file."""
    import torch.distributed as dist
    from flashinfer.autotuner import AutoTuner
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    logging.disable(logging.WARNING)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    limit = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    AutoTuner.get()
    dist.barrier()
    with wall_clock(repeat=REPEAT):
        found = WAYS[way](ops, Path(place, "tables"))
    if rank == 0:
        Path(place, "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def measure(way: str, ops: int, world: int) -> dict[str, float]:
    """One start of ``world`` ranks, as rank 0 saw it.

    Raises:
        RuntimeError: A rank did not end well.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TQDM_DISABLE"] = "1"  # read when the fork server imports it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "flashinfer.autotuner", "fi_flags"])
    with tempfile.TemporaryDirectory() as place:
        given = (way, ops)
        ranks = [
            context.Process(target=rank_main, args=(*given, rank, world, server.port, place))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT_S)
            process.kill()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"{way} at {world} ranks: {[p.exitcode for p in ranks]}")
        found: dict[str, float] = json.loads(Path(place, "found.json").read_text())
    return found | {"share": found["coordination_s"] / found["seconds"]}


def compare(world: int, ops: int) -> dict[str, Any]:
    """Both ways with ``ops`` ops, after both with a quarter of them to see what grows."""
    few = max(1, ops // 4)
    small = {way: measure(way, few, world) for way in WAYS}
    full = {way: measure(way, ops, world) for way in WAYS}
    return {
        "ranks": world,
        "tactics": ops * TOKENS.bit_length() * TACTICS,
        "few_tactics": few * TOKENS.bit_length() * TACTICS,
        **{
            way: full[way] | {"synchronisations_few": small[way]["synchronisations"]}
            for way in WAYS
        },
    }


def vote_seconds(world: int, votes: int = 5) -> float:
    """The time of a vote of in-memory ranks, over several that follow one another.

    Each vote makes the plan of the whole group out of ballots on which the ranks' tables agree.
    """

    def work(ranks: Ranks) -> tuple[float, float]:
        host = f"node{ranks.rank // 8}"
        stamps = {"flashinfer_version": "0.7.4", "gpu": "NVIDIA H200", "cuda_version": "13.0"}
        ballot = Ballot(
            rank=ranks.rank,
            host=host,
            group=ranks.group,
            mode="on",
            strategy="leader_worker",
            reason="FLAG_ON",
            environment=stamps,
            table="ok",
            digest="d" * 64,
            entries=500,
            place=f"/cache/{host}/world.json",
        )
        with ranks.meet(Deadlines(join=60, silence=60)) as meeting:
            meeting.vote(None)  # all are there
            began = time.perf_counter()
            for _ in range(votes):
                plans = read_plans(meeting.vote(ballot.to_json(), count_ballots))
                assert plans[ranks.group].action.value == "warm"
            return began, time.perf_counter()

    began, ended = zip(*run_ranks(world, work, timeout=LIMIT_S), strict=True)
    return float(max(ended) - min(began)) / votes


def plot(costs: Mapping[int, float]) -> str:
    """An SVG of the cost of a vote by the number of ranks, both axes logarithmic."""
    left, top, wide, high = 70, 30, 480, 240
    low, top_ms = 0.1, 10_000.0
    ranks = sorted(costs)

    def x(count: float) -> float:
        span = math.log2(ranks[-1] / ranks[0]) or 1
        return left + wide * math.log2(count / ranks[0]) / span

    def y(ms: float) -> float:
        return top + high * (1 - math.log10(ms / low) / math.log10(top_ms / low))

    lines = "".join(
        f'<line x1="{left}" x2="{left + wide}" y1="{y(ms):.0f}" y2="{y(ms):.0f}"/>'
        for ms in (0.1, 1, 10, 100, 1000, 10_000)
    )
    labels = "".join(
        f'<text x="{left - 8}" y="{y(ms) + 4:.0f}" text-anchor="end">{ms:g}</text>'
        for ms in (0.1, 1, 10, 100, 1000, 10_000)
    ) + "".join(
        f'<text x="{x(count):.0f}" y="{top + high + 20}" text-anchor="middle">{count}</text>'
        for count in ranks
    )
    points = [(x(count), y(costs[count] * 1e3)) for count in ranks]
    marks = "".join(f'<circle cx="{across:.0f}" cy="{up:.0f}" r="4"/>' for across, up in points)
    line = " ".join(f"{across:.0f},{up:.0f}" for across, up in points)
    goal = y(MAX_VOTE_S * 1e3)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 30} {top + high + 60}" \
font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#fff"/>
<g stroke="#ddd">{lines}</g>
<g fill="#333">{labels}
<text x="{left}" y="18">milliseconds per vote, plan included; dashed: the goal</text>
<text x="{left + wide / 2:.0f}" y="{top + high + 44}" text-anchor="middle">ranks</text></g>
<line x1="{left}" x2="{left + wide}" y1="{goal:.0f}" y2="{goal:.0f}" stroke="#c33" \
stroke-dasharray="6 4"/>
<polyline points="{line}" fill="none" stroke="#27a" stroke-width="2"/>
<g fill="#27a">{marks}</g>
</svg>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and tell by the exit code whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--calls", type=int, default=24, help="ops to tune (default 24)")
    parser.add_argument(
        "--votes", type=int, nargs="*", default=[2**n for n in range(1, 11)], help="ranks that vote"
    )
    parser.add_argument("--plot", type=Path, help="draw the cost of a vote here, as SVG")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    asked = parser.parse_args(arguments)
    worlds = [compare(world, asked.calls) for world in asked.ranks]
    costs = {world: vote_seconds(world) for world in asked.votes}
    if asked.plot:
        asked.plot.write_text(plot(costs))
    met = all(
        found["fi_flags"]["share"] < MAX_SHARE
        and found["fi_flags"]["synchronisations"] <= found["fi_flags"]["synchronisations_few"] + 1
        for found in worlds
    ) and all(cost < MAX_VOTE_S for cost in costs.values())
    if asked.json:
        print(json.dumps({"worlds": worlds, "vote_s": costs, "met": met}))
        return 0 if met else 1
    print("| ranks | way | synchronisations: few tactics, all | seconds | coordination | share |")
    print("|---|---|---|---|---|---|")
    for found in worlds:
        for way in WAYS:
            row = found[way]
            print(
                f"| {found['ranks']} | {way} |"
                f" {row['synchronisations_few']} of {found['few_tactics']},"
                f" {row['synchronisations']} of {found['tactics']} | {row['seconds']:.2f}"
                f" | {row['coordination_s']:.3f} | {row['share']:.2%} |"
            )
    print("\n| in-memory ranks | a vote with its plan, ms |\n|---|---|")
    for world, cost in costs.items():
        print(f"| {world} | {cost * 1e3:.1f} |")
    print(f"\ngoals: a share under {MAX_SHARE:.0%}; votes that do not grow with tactics; a vote")
    print(f"of 1,024 ranks under {MAX_VOTE_S:g} s: {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
