"""Workloads: dummy forwards whose FlashInfer calls are tuned.

This module holds the protocol only and imports neither torch nor flashinfer; the decoders
beside it import both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["Workload"]


@runtime_checkable
class Workload(Protocol):
    """A dummy forward whose FlashInfer calls are tuned."""

    @property
    def name(self) -> str:
        """A short name, for logs."""
        ...

    @property
    def needs_cuda(self) -> bool:
        """Whether it runs on a GPU only."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What makes two workloads the same, as JSON; never the rank's own index."""
        ...

    def run(self) -> None:
        """One dummy forward, which meets its peers in real collectives as a served model does."""
        ...
