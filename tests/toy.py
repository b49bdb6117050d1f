"""A toy workload on FlashInfer's real AutoTuner, and in-memory ranks with a tuner each.

What is real: AutoTuner, its keys, files and look-ups, the store, the votes. What is not: a rank is
a thread, and a tactic's time is what the test says, so that a test can make ranks disagree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
import torch
from flashinfer.autotuner import AutoTuner, DynamicTensorSpec, TunableRunner, TuningConfig
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fi_flags.ranks import Ranks
from fi_flags.testing import attempt, in_memory
from fi_flags.tuner import wall_clock

T = TypeVar("T")
Chosen = tuple[str, Any]

LIMIT_S = 30.0
this_thread = threading.local()


class Alpha(TunableRunner):  # type: ignore[misc]
    def __init__(self, extra: str = "") -> None:
        self.extra = extra

    def get_valid_tactics(self, inputs: list[Any], profile: object) -> list[int]:  # noqa: ARG002
        return [0, 1, 2]

    def get_cache_key_extras(self, inputs: list[Any]) -> tuple[str, ...]:  # noqa: ARG002
        return (self.extra,)

    def forward(self, inputs: list[Any], tactic: Any = -1, **_: Any) -> torch.Tensor:
        result: torch.Tensor = inputs[0]
        if self.extra == "broken" and tactic != -1:
            raise RuntimeError("no tactic works here")
        if self.extra == "oom" and tactic == 0:
            raise RuntimeError("this tactic does not work")
        if self.extra == "oom" and tactic > 0:
            raise torch.cuda.OutOfMemoryError("no memory left")
        return result


class Beta(Alpha):
    pass


def _buckets(tokens: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(tokens.bit_length()))


def _bucket(tokens: int) -> int:
    return 1 << (tokens.bit_length() - 1)


_CONFIG = TuningConfig(
    dynamic_tensor_specs=(DynamicTensorSpec((0,), (0,), _buckets, _bucket),),
)


def choose_one(op: str, runner: Alpha, tokens: int, *others: Alpha) -> Chosen:
    """The runner and tactic that the tuner answers for a call that offers these runners."""
    inputs = [torch.zeros(tokens, 8), torch.zeros(8, 8)]
    chosen, tactic = AutoTuner.get().choose_one(op, [runner, *others], _CONFIG, inputs)
    chosen(inputs, tactic=tactic)
    return type(chosen).__name__, tactic


@dataclass
class Toy:
    """Ops by name, each with its runners' extras; ``between`` is called before each op."""

    ops: Sequence[str] = ("gemm", "moe")
    tokens: int = 4
    between: Callable[[str], object] = lambda _op: None
    after: Callable[[], object] = lambda: None
    label: str = "toy"
    name: str = "toy"
    needs_cuda: bool = False
    chosen: dict[str, Chosen] = field(default_factory=dict)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"label": self.label, "tokens": self.tokens}

    def run(self) -> None:
        for op in self.ops:
            self.between(op)
            self.chosen[op] = self.choose(op)
        self.after()

    def choose(self, op: str, tokens: int | None = None) -> Chosen:
        """The runner and tactic that the tuner answers for one call of an op."""
        name, _, extra = op.partition("/")
        return choose_one(name, Alpha(extra), tokens or self.tokens, Beta(extra))

    def serving(self) -> dict[tuple[str, int], Chosen]:
        """What is served now, outside tuning, for every op and bucket."""
        return {(op, m): self.choose(op, m) for op in self.ops for m in _buckets(self.tokens)}


@contextmanager
def own_tuners(
    monkeypatch: pytest.MonkeyPatch,
    cost: Callable[[int, str, Any], float] = lambda _rank, name, tactic: len(name) + tactic,
) -> Iterator[None]:
    """A real AutoTuner per thread, whose tactics take as long as ``cost`` says.

    Args:
        monkeypatch: Undoes it.
        cost: Milliseconds by rank, runner class and tactic.
    """

    def profile(_self: Any, runner: Any, inputs: Any, tactic: Any, *_: Any, **__: Any) -> float:
        runner(inputs, tactic=tactic)
        return cost(getattr(this_thread, "rank", 0), type(runner).__name__, tactic)

    with wall_clock():
        monkeypatch.setattr(AutoTuner, "get", classmethod(lambda _cls: tuner_of_this_thread()))
        monkeypatch.setattr(AutoTuner, "_profile_single_kernel", profile)
        yield


def tuner_of_this_thread() -> Any:
    if not hasattr(this_thread, "tuner"):
        this_thread.tuner = AutoTuner()
    return this_thread.tuner


def fresh_tuner() -> Any:
    """As after a restart of the process."""
    this_thread.tuner = AutoTuner()
    return this_thread.tuner


@dataclass
class Crowd:
    """A world of threads over one in-memory store; ``groups`` names each rank's tuning group."""

    world: int
    limit: float = LIMIT_S
    name: str = "world"
    store: HashStore = field(default_factory=HashStore)
    groups: Callable[[int], str] = lambda _rank: ""

    def ranks(self, rank: int) -> Ranks:
        return self.members()[rank]

    def members(self) -> list[Ranks]:
        ranks = in_memory(self.world, self.name, self.store)
        return [replace(one, group=self.groups(one.rank) or self.name) for one in ranks]

    def each(self, work: Callable[[Ranks], T]) -> list[T | BaseException]:
        """What each rank returned or raised; a rank that does not end fails the test."""

        def go(ranks: Ranks) -> T:
            this_thread.rank = ranks.rank
            return work(ranks)

        group = self.members()
        results, errors = attempt(group, go, self.limit)
        done: dict[int, T | BaseException] = {**results, **errors}
        late = [ranks.rank for ranks in group if ranks.rank not in done]
        assert not late, f"ranks {late} still run after {self.limit} s"
        return [done[ranks.rank] for ranks in group]

    def all(self, work: Callable[[Ranks], T]) -> list[T]:
        """As ``each``, where no rank may raise."""
        done: list[T] = []
        for rank, result in enumerate(self.each(work)):
            if isinstance(result, BaseException):
                raise AssertionError(f"rank {rank} raised {result!r}") from result
            done.append(result)
        return done
