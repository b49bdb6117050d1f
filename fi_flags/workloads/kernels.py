"""The decoder's kernels: FlashInfer runners whose tactics compute one result in different ways.

Any tactic is right within ``Kernel.tolerance``. FlashInfer can time them on a CPU only while
``fi_flags.tuner.wall_clock`` stands in for CUDA's event timer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from flashinfer.autotuner import DynamicTensorSpec, TunableRunner, TuningConfig
from torch import Tensor

__all__ = [
    "GROUP",
    "Attention",
    "BlockedGemm",
    "DenseGemm",
    "HalfGemm",
    "Kernel",
    "ScaledGemm",
    "bucket_of",
    "buckets_up_to",
    "packed",
    "quantise",
    "swizzle",
]

_FEW_TOKENS = 16  # up to here the operands of a product may trade places
_QUERIES = 16  # that blocked attention handles at once
GROUP = 16  # input features that share one scale
_BLOCK = 64  # weight rows that blocked dequantisation handles at once

Tactic = int | tuple[int, int]
Ways = Mapping[Tactic, Callable[..., Tensor]]


def buckets_up_to(tokens: int) -> tuple[int, ...]:
    """The powers of two from 1 to `tokens`: the token counts that are tuned."""
    return tuple(1 << bit for bit in range(tokens.bit_length()))


def bucket_of(tokens: int) -> int:
    """The bucket that serves `tokens`: the largest power of two that is not above it."""
    return 1 << (max(tokens, 1).bit_length() - 1)


def _tuned_over(inputs: tuple[int, ...], dims: tuple[int, ...]) -> TuningConfig:
    """A configuration where the dimensions `dims` of `inputs` all hold the token count."""
    return TuningConfig(
        dynamic_tensor_specs=(
            DynamicTensorSpec(
                input_idx=inputs,
                dim_idx=dims,
                gen_tuning_buckets=buckets_up_to,
                map_to_tuning_buckets=bucket_of,
            ),
        )
    )


# Made once: older FlashInfer compares configurations by the identity of what they hold.
_GEMM_TUNING = _tuned_over((0,), (0,))
_ATTENTION_TUNING = _tuned_over((0, 1, 2), (1, 1, 1))


class Kernel(TunableRunner):  # type: ignore[misc]  # flashinfer is untyped
    """Ways to compute one op, by tactic; the first is also the fallback, tactic -1.

    Every way computes every shape; `pays` says which are worth timing. A kernel holds no
    tensors: FlashInfer hashes a runner's attributes, and layers share what one of them tuned.
    """

    ways: ClassVar[Ways]
    tuning: ClassVar[TuningConfig] = _GEMM_TUNING
    tolerance: ClassVar[float] = 1e-5
    """Largest difference from `reference`, as a fraction of the reference's largest value."""

    def pays(self, tactic: Any, inputs: Sequence[Tensor]) -> bool:  # noqa: ANN401, ARG002
        """Whether `tactic` may win for inputs of this size."""
        return True

    def get_valid_tactics(self, inputs: list[Tensor], profile: object) -> list[Tactic]:  # noqa: ARG002
        """The tactics to time for `inputs`."""
        return [tactic for tactic in self.ways if self.pays(tactic, inputs)]

    def forward(self, inputs: list[Tensor], tactic: Tactic = -1, **_: object) -> Tensor:
        """The op's result for `inputs`.

        Raises:
            RuntimeError: There is no such tactic.
        """
        way = self.ways.get(next(iter(self.ways)) if tactic == -1 else tactic)
        if way is None:
            raise RuntimeError(f"{type(self).__name__} has no tactic {tactic!r}")
        return way(*inputs)

    def reference(self, inputs: Sequence[Tensor]) -> Tensor:
        """The same in float64: x (M, K) times weight (N, K), transposed."""
        return inputs[0].double() @ inputs[1].double().T


class DenseGemm(Kernel):
    """`x @ weight.T` at once: x (M, K), weight (N, K), its packed copy (K, N) -> (M, N)."""

    ways: ClassVar[Ways] = {
        0: lambda x, weight, _: F.linear(x, weight),
        1: lambda x, _, packed: x @ packed,
        2: lambda x, weight, _: (weight @ x.T).T.contiguous(),
    }

    def pays(self, tactic: int, inputs: Sequence[Tensor]) -> bool:
        """Swapped operands only for few tokens."""
        return tactic in (0, 1) or len(inputs[0]) <= _FEW_TOKENS


def _sum_of_products(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    result = x.new_zeros(len(x), len(weight))
    pairs = zip(x.tensor_split(parts, 1), weight.tensor_split(parts, 1), strict=True)
    for x_part, weight_part in pairs:
        result.addmm_(x_part, weight_part.T)
    return result


class BlockedGemm(Kernel):
    """`x @ weight.T` in parts, with `DenseGemm`'s inputs; a tactic is (axis, parts).

    Axis 0 are the rows of x, 1 the rows of weight, 2 the features they share.
    """

    ways: ClassVar[Ways] = {
        (1, 2): lambda x, w, _: torch.cat([F.linear(x, part) for part in w.tensor_split(2)], 1),
        (1, 4): lambda x, w, _: torch.cat([F.linear(x, part) for part in w.tensor_split(4)], 1),
        (2, 2): lambda x, w, _: _sum_of_products(x, w, 2),
        (2, 4): lambda x, w, _: _sum_of_products(x, w, 4),
        (0, 2): lambda x, w, _: torch.cat([F.linear(part, w) for part in x.tensor_split(2)]),
        (0, 4): lambda x, w, _: torch.cat([F.linear(part, w) for part in x.tensor_split(4)]),
    }

    def pays(self, tactic: tuple[int, int], inputs: Sequence[Tensor]) -> bool:
        """As many parts of x as it has rows, at most."""
        axis, parts = tactic
        return axis != 0 or parts <= len(inputs[0])


class HalfGemm(Kernel):
    """`x @ weight.T` in bfloat16, summed in float32, with `DenseGemm`'s inputs."""

    tolerance: ClassVar[float] = 1e-2  # a result keeps 8 bits
    ways: ClassVar[Ways] = {
        0: lambda x, weight, _: F.linear(x, weight),
        1: lambda x, _, packed: x @ packed,
        2: lambda x, weight, _: F.linear(x.float(), weight.float()).bfloat16(),
        3: lambda x, _, packed: (x.float() @ packed.float()).bfloat16(),
    }


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> Tensor:
    """Attention of queries (..., tokens, width), the first of which stands at `first`."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(first)
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


class Attention(Kernel):
    """Causal attention: queries, keys, values -> attended, each (heads, tokens, width)."""

    tuning: ClassVar[TuningConfig] = _ATTENTION_TUNING
    ways: ClassVar[Ways] = {
        0: _attend,
        1: lambda q, k, v: torch.stack([_attend(*head) for head in zip(q, k, v, strict=True)]),
        2: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        3: lambda q, k, v: torch.cat(
            [
                _attend(q[:, at : at + _QUERIES], k[:, : at + _QUERIES], v[:, : at + _QUERIES], at)
                for at in range(0, q.shape[1], _QUERIES)
            ],
            1,
        ),
    }

    def pays(self, tactic: int, inputs: Sequence[Tensor]) -> bool:
        """Blocks of queries only where there is more than one."""
        return tactic in (0, 1, 2) or inputs[0].shape[1] > _QUERIES

    def reference(self, inputs: Sequence[Tensor]) -> Tensor:
        """The same in float64."""
        return self.ways[2](*(each.double() for each in inputs))


def _dequantise(values: Tensor, scales: Tensor) -> Tensor:
    return values * scales.repeat_interleave(GROUP, 1)


def _scaled_by_block(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    blocks = zip(torch.split(values, _BLOCK), torch.split(scales, _BLOCK), strict=True)
    return torch.cat([F.linear(x, _dequantise(*block)) for block in blocks], 1)


def _scaled_by_group(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    result = x.new_zeros(len(x), len(values))
    groups = torch.split(x, GROUP, 1), torch.split(values, GROUP, 1), scales.unbind(1)
    for x_part, part, scale in zip(*groups, strict=True):
        result.addcmul_(F.linear(x_part, part.to(x.dtype)), scale)
    return result


class ScaledGemm(Kernel):
    """`x @ (values * scales).T`: x (M, K), values (N, K), scales (N, K / 16) -> (M, N).

    Values are int8; a row of them shares one float32 scale for each 16 features. Scales lie row
    by row, or (layout `8x4`) in tiles of 8 rows by 4. Shapes do not tell the layouts apart, and
    a tactic reads one of them, so the layout is in the key's extras. Without it,
    https://github.com/flashinfer-ai/flashinfer/issues/3363 happens.
    """

    ways: ClassVar[Ways] = {
        0: lambda x, values, scales: F.linear(x, _dequantise(values, scales)),
        1: _scaled_by_block,
        2: _scaled_by_group,
    }

    def __init__(self, layout: Literal["row", "8x4"]) -> None:
        self.layout = layout

    def get_cache_key_extras(self, inputs: list[Tensor]) -> tuple[str]:  # noqa: ARG002
        """The layout."""
        return (self.layout,)

    def get_valid_tactics(self, inputs: list[Tensor], profile: object) -> list[Tactic]:  # noqa: ARG002
        """Tactics that read this layout: 0, 1, 2 for `row`, 3, 4, 5 for `8x4`."""
        return [0, 1, 2] if self.layout == "row" else [3, 4, 5]

    def forward(self, inputs: list[Tensor], tactic: Tactic = -1, **_: object) -> Tensor:
        """The product, (M, N).

        Raises:
            RuntimeError: The tactic reads the other layout.
        """
        own = self.get_valid_tactics(inputs, None)
        if tactic != -1 and tactic not in own:
            raise RuntimeError(f"invalid layout: tactic {tactic} does not read {self.layout!r}")
        x, values, scales = inputs
        way = self.ways[0 if tactic == -1 else own.index(tactic)]
        return way(x, values, self._by_row(scales))

    def reference(self, inputs: Sequence[Tensor]) -> Tensor:
        """The same in float64."""
        x, values, scales = inputs
        return x.double() @ _dequantise(values, self._by_row(scales).double()).T

    def _by_row(self, scales: Tensor) -> Tensor:
        if self.layout == "row":
            return scales
        return scales.view(-1, scales.shape[1] // 4, 8, 4).transpose(1, 2).reshape_as(scales)


def swizzle(scales: Tensor) -> Tensor:
    """Scales (N, G) from row order into tiles of 8 rows by 4; N divides by 8, G by 4."""
    return scales.view(-1, 8, scales.shape[1] // 4, 4).transpose(1, 2).reshape_as(scales)


def quantise(weight: Tensor) -> list[Tensor]:
    """A weight (N, K) as int8 values (N, K) and scales (N, K / 16) in row order."""
    scales = weight.reshape(len(weight), -1, GROUP).abs().amax(2) / 127
    return [(weight / scales.repeat_interleave(GROUP, 1)).round().to(torch.int8), scales]


def packed(weight: Tensor) -> list[Tensor]:
    """A weight (N, K) and a copy of it that is stored as (K, N)."""
    return [weight.contiguous(), weight.T.contiguous()]
