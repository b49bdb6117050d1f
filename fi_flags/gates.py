"""Upstream defects as data: which FlashInfer has them, and what they forbid."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from fi_flags.facts import Facts
from fi_flags.layers import parse_toml
from fi_flags.values import Word

_COMPARE: Final[dict[str, Callable[[Version, Version], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


class Effect(Word):
    """What a closed gate forbids."""

    CLOSE_CACHE = "close_cache"


@dataclass(frozen=True)
class Gate:
    """One defect.

    Attributes:
        id: Its name in settings and logs.
        title: What goes wrong, in a line.
        url: The upstream report.
        affected: The FlashInfer versions that have it, such as `>=0.6.17,<0.6.19`.
        effect: What it forbids while it is closed.
    """

    id: str
    title: str
    url: str
    affected: str
    effect: Effect

    def closed(self, facts: Facts) -> bool:
        """Whether the installed FlashInfer has the defect; a version nobody can read does.

        Versions compare in their plain order, not as an installer would choose them: for
        `<0.6.13`, 0.6.13rc1 is affected (its build may precede the fix) and 0.6.12.post1 too,
        while the local part of 0.6.13+cu130 does not matter.
        """
        try:
            installed = Version(Version(facts.flashinfer or "").public)
        except InvalidVersion:
            return True
        return all(
            _COMPARE[bound.operator](installed, Version(bound.version))
            for bound in SpecifierSet(self.affected)
        )


def load_gates() -> tuple[Gate, ...]:
    """The gates that come with this package."""
    document = parse_toml(resources.files("fi_flags").joinpath("gates.toml").read_bytes())
    return tuple(_gate(entry) for entry in document["gate"])


def _gate(entry: dict[str, Any]) -> Gate:
    return Gate(**{**entry, "effect": Effect(entry["effect"])})
