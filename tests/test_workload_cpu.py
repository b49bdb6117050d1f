"""The CPU decoder: its tactics, its keys in FlashInfer's tuner, and its shards."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune

from fi_flags.errors import SettingsError
from fi_flags.tuner import wall_clock
from fi_flags.workloads import Workload, cpu, kernels
from fi_flags.workloads.cpu import CpuDecoder
from fi_flags.workloads.kernels import Kernel

Profiled = list[tuple[Kernel, Any, list[torch.Tensor]]]

BUCKETS = (1, 2, 4)  # of CpuDecoder.tiny()
OUTPUT_TOLERANCE = 2e-2  # of the logits, which are rounded to bfloat16 on the way
KERNELS = {
    "dense": kernels.DenseGemm(),
    "blocked": kernels.BlockedGemm(),
    "half": kernels.HalfGemm(),
    "attention": kernels.Attention(),
    "scaled row": kernels.ScaledGemm("row"),
    "scaled 8x4": kernels.ScaledGemm("8x4"),
}


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[AutoTuner]:
    """A fresh tuner in place of the process's own, timed by a wall clock."""
    fresh = AutoTuner()
    monkeypatch.setattr(AutoTuner, "_instance", fresh)
    with wall_clock(repeat=2):
        yield fresh


@pytest.fixture
def profiled(tuner: AutoTuner, monkeypatch: pytest.MonkeyPatch) -> Profiled:
    """What the tuner times, as (runner, tactic, inputs)."""
    seen: Profiled = []
    time_it = type(tuner)._profile_single_kernel

    def record(
        self: AutoTuner, runner: Kernel, inputs: list[torch.Tensor], tactic: Any, *a: Any, **kw: Any
    ) -> Any:
        seen.append((runner, tactic, inputs))
        return time_it(self, runner, inputs, tactic, *a, **kw)

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", record)
    return seen


def tune(*decoders: CpuDecoder) -> None:
    with autotune(True):
        for decoder in decoders:
            decoder.run()


def save(tuner: AutoTuner, path: Path) -> dict[str, list[Any]]:
    """The tuner's table without its metadata."""
    tuner.save_configs(str(path))
    return {
        key: entry for key, entry in json.loads(path.read_text()).items() if key.startswith("(")
    }


def inputs_of(kernel: Kernel, tokens: int, *, hidden: int = 128, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    x = torch.randn(tokens, hidden)
    weight = torch.randn(72, hidden) / hidden**0.5
    match kernel:
        case kernels.Attention():
            return [torch.randn(4, tokens, 8) for _ in range(3)]
        case kernels.HalfGemm():
            return [x.bfloat16(), *kernels.packed(weight.bfloat16())]
        case kernels.ScaledGemm(layout=layout):
            values, scales = kernels.quantise(weight)
            return [x, values, scales if layout == "row" else kernels.swizzle(scales)]
    return [x, *kernels.packed(weight)]


def assert_close(got: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert got.shape == exact.shape
    assert got.is_contiguous()
    difference = (got.double() - exact.double()).abs().max().item()
    assert difference <= tolerance * exact.abs().max().item()


def tactics_of(kernel: Kernel) -> list[Any]:
    """Every tactic that some token count is offered, and the fallback."""
    offered = {
        tactic: None
        for tokens in kernels.buckets_up_to(64)
        for tactic in kernel.get_valid_tactics(inputs_of(kernel, tokens), None)
    }
    return [-1, *offered]


# Kernels


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16, 17, 33, 48, 64])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_every_tactic_equals_the_float64_reference_for_every_token_count(
    kernel: Kernel, tokens: int
) -> None:
    inputs = inputs_of(kernel, tokens)
    for tactic in tactics_of(kernel):
        assert_close(kernel(inputs, tactic=tactic), kernel.reference(inputs), kernel.tolerance)


@pytest.mark.parametrize("layout", ["row", "8x4"])
def test_scaled_reference_multiplies_the_weight_that_was_quantised(layout: Any) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 128), torch.randn(72, 128)
    values, scales = kernels.quantise(weight)
    inputs = [x, values, scales if layout == "row" else kernels.swizzle(scales)]
    assert_close(kernels.ScaledGemm(layout).reference(inputs), x @ weight.T, 1e-2)


def test_attention_sees_no_later_token() -> None:
    kernel = kernels.Attention()
    inputs = inputs_of(kernel, 33)
    later = [each.clone() for each in inputs]
    for each in later:
        each[:, 20:] += 1
    for tactic in tactics_of(kernel):
        before, after = kernel(inputs, tactic=tactic), kernel(later, tactic=tactic)
        assert_close(after[:, :20].contiguous(), before[:, :20], kernel.tolerance)
        assert not torch.allclose(after[:, 20:], before[:, 20:])


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_each_kernel_offers_three_tactics_or_more_but_none_that_cannot_pay(kernel: Kernel) -> None:
    few, many = (set(kernel.get_valid_tactics(inputs_of(kernel, n), None)) for n in (1, 64))
    assert len(few) >= 3
    assert len(few | many) >= 3
    assert -1 not in few | many
    if isinstance(kernel, kernels.BlockedGemm):
        assert many - few == {(0, 2), (0, 4)}
    elif isinstance(kernel, kernels.Attention):
        assert many - few == {3}
    elif isinstance(kernel, kernels.DenseGemm):
        assert few - many == {2}
    else:
        assert few == many


@pytest.mark.parametrize(("layout", "tactic"), [("row", 3), ("row", 5), ("8x4", 0), ("8x4", 2)])
def test_a_tactic_for_the_other_layout_is_refused(layout: Any, tactic: int) -> None:
    kernel = kernels.ScaledGemm(layout)
    with pytest.raises(RuntimeError, match="invalid layout"):
        kernel(inputs_of(kernel, 2), tactic=tactic)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_an_unknown_tactic_is_refused(kernel: Kernel) -> None:
    with pytest.raises(RuntimeError, match=r"tactic|layout"):
        kernel(inputs_of(kernel, 2), tactic=99)


@pytest.mark.parametrize(
    ("tokens", "bucket", "tuned"),
    [(1, 1, (1,)), (3, 2, (1, 2)), (4, 4, (1, 2, 4)), (48, 32, (1, 2, 4, 8, 16, 32))],
)
def test_buckets_are_the_powers_of_two_below(
    tokens: int, bucket: int, tuned: tuple[int, ...]
) -> None:
    assert kernels.bucket_of(tokens) == bucket
    assert kernels.buckets_up_to(tokens) == tuned


# The tuner


def test_tuning_leaves_one_key_for_each_call_and_bucket(tuner: AutoTuner, tmp_path: Path) -> None:
    tune(CpuDecoder.tiny())
    table = save(tuner, tmp_path / "table.json")
    keys = [ast.literal_eval(key) for key in table]
    calls = {(op.removeprefix(cpu.OP_PREFIX), extras) for op, _, _, extras in keys}
    assert calls == {
        ("qkv", ()),
        ("attention", ()),
        ("out", ()),
        ("gate_up", ("row",)),
        ("gate_up", ("8x4",)),
        ("down", ()),
        ("head", ()),
    }
    assert len(keys) == len(calls) * len(BUCKETS)
    row, tiled = (
        {profile for op, _, profile, extras in keys if extras == (layout,)}
        for layout in ("row", "8x4")
    )
    assert row == tiled


def test_default_size_has_63_keys(tuner: AutoTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", lambda *_a, **_kw: 1.0)
    tune(CpuDecoder())
    assert len(tuner.profiling_cache) == 63  # 7 calls, 9 buckets


@pytest.mark.parametrize("winner", ["DenseGemm", "BlockedGemm"])
def test_either_runner_can_win_an_op_that_has_two(
    tuner: AutoTuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, winner: str
) -> None:
    monkeypatch.setattr(
        AutoTuner,
        "_profile_single_kernel",
        lambda _self, runner, *_a, **_kw: 1.0 if type(runner).__name__ == winner else 2.0,
    )
    decoder = CpuDecoder.tiny()
    fallback = decoder.forward()
    tune(decoder)
    table = save(tuner, tmp_path / "table.json")
    out = [(key, entry) for key, entry in table.items() if f"{cpu.OP_PREFIX}out" in key]
    assert len(out) == len(BUCKETS)
    assert all(winner in key and entry[0] == winner for key, entry in out)
    assert_close(decoder.forward(), fallback, OUTPUT_TOLERANCE)


def test_what_was_saved_covers_every_call_of_a_fresh_tuner(
    tuner: AutoTuner, profiled: Profiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(CpuDecoder.tiny())
    path = tmp_path / "table.json"
    table = save(tuner, path)
    assert profiled
    profiled.clear()

    fresh = AutoTuner()
    monkeypatch.setattr(AutoTuner, "_instance", fresh)
    assert fresh.load_configs(str(path))
    decoder = CpuDecoder.tiny()
    tune(decoder)
    decoder.run()
    assert not profiled
    assert fresh.stats.cache_misses == 0
    assert not fresh.profiling_cache
    assert save(fresh, tmp_path / "again.json") == table


def test_layers_share_what_one_of_them_tuned(profiled: Profiled) -> None:
    tune(CpuDecoder.tiny(layers=1))
    once = len(profiled)
    tune(CpuDecoder.tiny(layers=3))
    assert len(profiled) == once


def test_ranks_of_one_world_have_the_same_keys(
    tuner: AutoTuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", lambda *_a, **_kw: 1.0)
    for rank in range(2):
        tuner.clear_cache()
        tune(CpuDecoder.tiny(rank=rank, world=2))
        tables.append(save(tuner, tmp_path / f"{rank}.json"))
    assert tables[0] == tables[1]
    tuner.clear_cache()
    tune(CpuDecoder.tiny())
    assert save(tuner, tmp_path / "one.json").keys() != tables[0].keys()


def test_a_file_key_without_extras_serves_a_tactic_that_the_layout_refuses(
    tuner: AutoTuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(CpuDecoder.tiny())
    path = tmp_path / "table.json"
    table = save(tuner, path)
    last_wins = {
        key.replace("('8x4',)", "('row',)"): entry
        for key, entry in table.items()
        if "('row',)" not in key
    }
    path.write_text(json.dumps(last_wins))
    fresh = AutoTuner()
    monkeypatch.setattr(AutoTuner, "_instance", fresh)
    assert fresh.load_configs(str(path))
    with pytest.raises(RuntimeError, match="invalid layout"):
        CpuDecoder.tiny().run()


@pytest.mark.usefixtures("tuner")
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_the_output_is_the_same_before_and_after_tuning(tokens: int) -> None:
    decoder = CpuDecoder.tiny(layers=2)
    exact = decoder.forward(tokens, exact=True)
    assert exact.dtype == torch.float64
    assert_close(decoder.forward(tokens), exact, OUTPUT_TOLERANCE)
    tune(decoder)
    assert_close(decoder.forward(tokens), exact, OUTPUT_TOLERANCE)


@pytest.mark.usefixtures("tuner")
def test_default_size_runs_within_tolerance() -> None:
    decoder = CpuDecoder(tokens=33)
    assert_close(decoder.forward(), decoder.forward(exact=True), OUTPUT_TOLERANCE)


def test_an_extra_op_adds_keys_of_its_own_and_changes_no_output(
    tuner: AutoTuner, profiled: Profiled, tmp_path: Path
) -> None:
    decoder = CpuDecoder.tiny()
    tune(decoder)
    before = save(tuner, tmp_path / "before.json")
    profiled.clear()
    more = CpuDecoder.tiny(extra_ops=("new", "other"))
    tune(more)
    after = save(tuner, tmp_path / "after.json")
    added = after.keys() - before.keys()
    assert len(added) == 2 * len(BUCKETS)
    assert all("extra_new" in key or "extra_other" in key for key in added)
    assert profiled
    assert torch.equal(more.forward(), decoder.forward())


def test_between_is_called_with_each_op_and_its_error_comes_through(tuner: AutoTuner) -> None:
    seen: list[str] = []
    tune(CpuDecoder.tiny(extra_ops=("new",), between=seen.append))
    ops = ["qkv", "attention", "out", "gate_up", "gate_up", "down", "extra_new", "head"]
    assert seen == [cpu.OP_PREFIX + op for op in ops]
    assert {key.custom_op for key in tuner.profiling_cache} == set(seen)

    def fail(op: str) -> None:
        if op.endswith("down"):
            raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        CpuDecoder.tiny(between=fail).run()


# Shards


class Ranks:
    """Threads that add tensors up as ranks do."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=30)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * world
        self.met = 0

    def all_reduce(self, rank: int) -> Callable[[torch.Tensor], None]:
        def add_up(part: torch.Tensor) -> None:
            self.parts[rank] = part.clone()
            self.barrier.wait()
            part.copy_(torch.stack(self.parts).sum(0))
            self.met += rank == 0
            self.barrier.wait()

        return add_up


@pytest.mark.usefixtures("tuner")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_shards_add_up_to_the_whole(world: int, exact: bool) -> None:
    ranks = Ranks(world)
    outputs: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        decoder = CpuDecoder.tiny(
            layers=2, rank=rank, world=world, all_reduce=ranks.all_reduce(rank)
        )
        outputs[rank] = decoder.forward(exact=exact)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    whole = CpuDecoder.tiny(layers=2).forward(exact=exact)
    assert sorted(outputs) == list(range(world))
    assert ranks.met == 4  # after attention and after the MLP of two layers
    for output in outputs.values():
        assert_close(output, whole, OUTPUT_TOLERANCE)
        assert torch.equal(output, outputs[0])


def test_two_processes_meet_in_torchs_default_group(tmp_path: Path) -> None:
    script = """
        import sys, warnings
        warnings.simplefilter("ignore")
        import torch, torch.distributed as dist
        from fi_flags.workloads.cpu import CpuDecoder
        folder, rank = sys.argv[1], int(sys.argv[2])
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
        torch.save(CpuDecoder.tiny(rank=rank, world=2).forward(), f"{folder}/{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    root = Path(__file__).parents[1]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=root) for rank in range(2)]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    assert_close(first, CpuDecoder.tiny().forward(), OUTPUT_TOLERANCE)


@pytest.mark.parametrize("sizes", [{"world": 3}, {"world": 16}, {"hidden": 96}, {"ffn": 100}])
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match="does not divide"):
        CpuDecoder.tiny(**sizes)


# Identity


def test_it_is_a_workload_that_needs_no_gpu() -> None:
    decoder = CpuDecoder.tiny()
    assert isinstance(decoder, Workload)
    assert not decoder.needs_cuda
    assert decoder.name == "cpu-decoder"


def test_identity_is_json_and_the_same_on_every_rank_and_with_extra_ops() -> None:
    first = CpuDecoder.tiny(rank=0, world=2)
    second = CpuDecoder.tiny(rank=1, world=2, extra_ops=("new",), between=print)
    assert json.loads(json.dumps(first.identity)) == first.identity == second.identity
    assert "rank" not in first.identity


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("layers", 2),
        ("hidden", 128),
        ("heads", 4),
        ("ffn", 256),
        ("vocab", 128),
        ("tokens", 8),
        ("seed", 1),
        ("world", 2),
    ],
)
def test_identity_differs_when_an_option_does(option: str, value: int) -> None:
    assert CpuDecoder.tiny(**{option: value}).identity != CpuDecoder.tiny().identity


@pytest.fixture(autouse=True)
def _threads_are_left_alone() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before
