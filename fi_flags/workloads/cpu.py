"""A small tensor-parallel decoder on the CPU, tuned through FlashInfer's real AutoTuner.

It does without a GPU what a served model does with one: every matrix product asks the tuner for
a runner and a tactic, and ranks meet in an all-reduce after attention and after the MLP. The
tactics of an op compute the same result in different ways, so that any choice is right within
`Kernel.tolerance`. FlashInfer can time them on a CPU only while the caller stands in for CUDA's
event timer (`fi_flags.tuner.wall_clock`).

| op, after `OP_PREFIX` | runners | what is special |
|---|---|---|
| `qkv`, `extra_<name>` | `DenseGemm` | |
| `attention` | `Attention` | three inputs share the dynamic dimension |
| `out`, `down` | `DenseGemm`, `BlockedGemm` | two runners compete for one call |
| `gate_up` | `ScaledGemm` | called twice, with keys that differ in their extras only |
| `head` | `HalfGemm` | bfloat16 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from flashinfer.autotuner import AutoTuner
from torch import Tensor

from fi_flags.errors import SettingsError
from fi_flags.workloads.kernels import (
    GROUP,
    Attention,
    BlockedGemm,
    DenseGemm,
    HalfGemm,
    Kernel,
    ScaledGemm,
    buckets_up_to,
    packed,
    quantise,
    swizzle,
)

__all__ = ["OP_PREFIX", "CpuDecoder"]

OP_PREFIX = "fi_flags_cpu::"

Op: TypeAlias = Callable[[str, Sequence[Kernel], list[Tensor]], Tensor]


class _Layer(NamedTuple):
    """This rank's shard of one layer: what each op takes beside its activations."""

    qkv: list[Tensor]
    out: list[Tensor]
    gate: list[Tensor]
    up: list[Tensor]
    down: list[Tensor]


@dataclass(kw_only=True, eq=False)
class CpuDecoder:
    """A decoder of a few small layers, split over `world` ranks by heads and MLP features.

    Its output is the same for every world size, up to rounding.

    Attributes:
        layers: How many layers.
        hidden: Features of an activation; divides by `heads` and by 64.
        heads: Attention heads; divides by `world`.
        ffn: Features inside the MLP; divides by 8 times `world`.
        vocab: Tokens known.
        tokens: Tokens in one forward: the most that a server would run at once.
        seed: What the weights are drawn from.
        rank: This rank, from 0.
        world: Ranks that share the layers.
        all_reduce: Sums a tensor (tokens, hidden) over the ranks, in place; for a group of your
            own, `functools.partial(torch.distributed.all_reduce, group=...)`. By default torch's
            default group, where it is initialised; without one, ranks do not meet.
        extra_ops: Names of products to add to the forward, each an op that is tuned like the
            others. Their results are dropped and they are not in `identity`, so that a later
            start, or some of the ranks, can have an op that others lack.
        between: Called with each op's name before it is chosen: where tests inject faults.

    Raises:
        SettingsError: The sizes do not divide as above.
    """

    layers: int = 2
    hidden: int = 512
    heads: int = 8
    ffn: int = 1024
    vocab: int = 1024
    tokens: int = 256
    seed: int = 0
    rank: int = 0
    world: int = 1
    all_reduce: Callable[[Tensor], object] | None = None
    extra_ops: tuple[str, ...] = ()
    between: Callable[[str], object] | None = None
    name: str = field(default="cpu-decoder", init=False)
    needs_cuda: bool = field(default=False, init=False)

    @classmethod
    def tiny(cls, **options: Any) -> CpuDecoder:  # noqa: ANN401
        """One narrow layer and up to 4 tokens: tuned in tens of milliseconds, for tests."""
        sizes = {"layers": 1, "hidden": 64, "heads": 8, "ffn": 128, "vocab": 64, "tokens": 4}
        return cls(**(sizes | options))

    def __post_init__(self) -> None:
        self._must_divide("heads", self.heads, self.world)
        self._must_divide("ffn", self.ffn, 8 * self.world)
        self._must_divide("hidden", self.hidden, math.lcm(self.heads, 4 * GROUP))
        generator = torch.Generator().manual_seed(self.seed)

        def draw(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

        def shard(rows: int, columns: int, axis: int) -> Tensor:
            return draw(rows, columns).tensor_split(self.world, axis)[self.rank]

        def layer() -> _Layer:
            qkv = torch.cat([shard(self.hidden, self.hidden, 0) for _ in range(3)])
            out = shard(self.hidden, self.hidden, 1)
            gate = quantise(shard(self.ffn, self.hidden, 0))
            values, scales = quantise(shard(self.ffn, self.hidden, 0))
            down = shard(self.hidden, self.ffn, 1)
            return _Layer(packed(qkv), packed(out), gate, [values, swizzle(scales)], packed(down))

        self._embedding = draw(self.vocab, self.hidden)
        self._layers = [layer() for _ in range(self.layers)]
        self._head = packed(draw(self.vocab, self.hidden).bfloat16())
        self._extra = packed(draw(self.hidden, self.hidden))

    @property
    def identity(self) -> Mapping[str, Any]:
        """Sizes, seed and token buckets; the same on every rank."""
        sizes = ("layers", "hidden", "heads", "ffn", "vocab", "tokens", "seed", "world")
        return {
            "model": self.name,
            **{size: getattr(self, size) for size in sizes},
            "buckets": list(buckets_up_to(self.tokens)),
        }

    def run(self) -> None:
        """One forward over `tokens` tokens; every rank calls it."""
        self.forward()

    @torch.inference_mode()
    def forward(self, tokens: int | None = None, *, exact: bool = False) -> Tensor:
        """The logits of a fixed sequence, (tokens, vocab); every rank calls it.

        Args:
            tokens: How long the sequence is; `self.tokens` by default.
            exact: Compute each op's float64 reference, without the tuner.
        """
        op = _exact if exact else self._tuned
        x = self._embedding[torch.arange(tokens or self.tokens) * 7 % self.vocab]
        x = x.double() if exact else x
        for layer in self._layers:
            x = x + self._reduced(self._attended(_norm(x), layer, op))
            x = x + self._reduced(self._mlp(_norm(x), layer, op))
        x = _norm(x)
        for name in self.extra_ops:
            op(f"extra_{name}", [DenseGemm()], [x, *self._extra])
        return op("head", [HalfGemm()], [x.bfloat16(), *self._head]).to(x.dtype)

    def _attended(self, x: Tensor, layer: _Layer, op: Op) -> Tensor:
        """What this rank's heads add to each token, (tokens, hidden)."""
        qkv = op("qkv", [DenseGemm()], [x, *layer.qkv])
        by_head = qkv.view(len(x), 3, self.heads // self.world, -1).permute(1, 2, 0, 3)
        attended = op("attention", [Attention()], list(by_head.contiguous()))
        joined = attended.transpose(0, 1).reshape(len(x), -1)
        return op("out", [DenseGemm(), BlockedGemm()], [joined, *layer.out])

    def _mlp(self, x: Tensor, layer: _Layer, op: Op) -> Tensor:
        """What this rank's part of the MLP adds to each token, (tokens, hidden)."""
        gate = op("gate_up", [ScaledGemm("row")], [x, *layer.gate])
        up = op("gate_up", [ScaledGemm("8x4")], [x, *layer.up])
        return op("down", [DenseGemm(), BlockedGemm()], [F.silu(gate) * up, *layer.down])

    def _tuned(self, op: str, kernels: Sequence[Kernel], inputs: list[Tensor]) -> Tensor:
        """One op with what the tuner chooses, after profiling it where tuning is on."""
        op = OP_PREFIX + op
        if self.between is not None:
            self.between(op)
        tuning = kernels[0].tuning
        kernel, tactic = AutoTuner.get().choose_one(op, list(kernels), tuning, inputs)
        result: Tensor = kernel(inputs, tactic=tactic)
        return result

    def _reduced(self, part: Tensor) -> Tensor:
        if self.all_reduce is not None:
            self.all_reduce(part)
        elif self.world > 1 and dist.is_initialized():
            dist.all_reduce(part)
        return part

    def _must_divide(self, name: str, value: int, divisor: int) -> None:
        if value % divisor:
            raise SettingsError(
                f"{name}={value} does not divide by {divisor}",
                hint=f"{self.world} ranks: choose 1, 2, 4 or 8, or other sizes",
                name=name,
                value=value,
            )


def _exact(_op: str, kernels: Sequence[Kernel], inputs: list[Tensor]) -> Tensor:
    return kernels[0].reference(inputs)


def _norm(x: Tensor) -> Tensor:
    """Root mean square norm of each token, (tokens, hidden)."""
    return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
