"""Upstream defects as data: which FlashInfer has them, where, and what they forbid.

Those we know come with this package; operators add others, or lift one, in a file of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from fi_flags.facts import Facts
from fi_flags.layers import Given, parse_toml, read_toml, refused, unknown, variable
from fi_flags.values import Word, one_of, parse_names, parse_text

__all__ = ["NOT_PROBED", "PROBES", "Effect", "Gate", "Standing", "State", "load_gates"]

State: TypeAlias = Literal["open", "closed", "lifted"]

# What `fi_flags.probe` can find out, by name.
PROBES: Final = ("key_extras",)
NOT_PROBED: Final[Mapping[str, bool]] = MappingProxyType({})

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
    SKIP_OPS = "skip_ops"
    NO_SYNC = "no_sync"


@dataclass(frozen=True)
class Standing:
    """How a gate stands here.

    Attributes:
        state: `closed` where the defect is here; `lifted` where an operator says not to mind.
        evidence: Why, in a line.
        contradicted: Whether the probe found otherwise than the table of versions says.
    """

    state: State
    evidence: str
    contradicted: bool = False


@dataclass(frozen=True)
class Gate:
    """One defect.

    Attributes:
        id: Its name in files and logs.
        title: What goes wrong, in a line.
        url: The upstream report.
        affected: The FlashInfer versions that have it, such as `>=0.6.17,<0.6.19`.
        effect: What it forbids while it is closed.
        archs: The GPU architectures that it concerns, as patterns such as `sm12*`; none is all.
        ops: The ops to skip, for the effect `skip_ops`.
        probe: The probe that finds it by trying, one of `PROBES`, or an empty text.
        lifted_by: The file that lifts it, or an empty text.
    """

    id: str
    title: str
    url: str
    affected: str
    effect: Effect
    archs: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    probe: str = ""
    lifted_by: str = ""

    @property
    def fixed_in(self) -> str | None:
        """The first version without the defect, where `affected` ends before one."""
        ends = [Version(b.version) for b in SpecifierSet(self.affected) if b.operator == "<"]
        return str(min(ends)) if ends else None

    def closed(self, facts: Facts) -> bool:
        """Whether the defect is here, by the table of versions, and nobody has lifted the gate."""
        return self.standing(facts).state == "closed"

    def standing(self, facts: Facts, probed: Mapping[str, bool] = NOT_PROBED) -> Standing:
        """How the gate stands on a machine.

        Args:
            facts: The machine.
            probed: For each probe that ran, whether it found the defect. It wins over the table.
        """
        there, why = self._by_version(facts)
        contradicted = False
        if not self._concerns(facts):
            concerned = " and ".join(self.archs)
            there, why = False, f"{facts.arch or 'no GPU'} here; it is about {concerned}"
        elif self.probe in probed:
            found = probed[self.probe]
            contradicted = found is not there
            said = "found the defect" if found else "did not find the defect"
            there, why = found, f"the probe {said}; {'but ' if contradicted else ''}{why}"
        if self.lifted_by:
            return Standing("lifted", f"lifted by {self.lifted_by}; {why}")
        return Standing("closed" if there else "open", why, contradicted)

    def _concerns(self, facts: Facts) -> bool:
        arch = (facts.arch or "").lower()
        return not self.archs or any(fnmatchcase(arch, one.lower()) for one in self.archs)

    def _by_version(self, facts: Facts) -> tuple[bool, str]:
        """Whether the table of versions says that the defect is here, and why.

        Versions compare in their plain order, not as an installer would choose them: for
        `<0.6.13`, 0.6.13rc1 is affected (its build may precede the fix) and 0.6.12.post1 too,
        while the local part of 0.6.13+cu130 does not matter; for `>=0.6.17`, 0.6.17rc1 is affected
        as well. A version that nobody can read closes everything: each could do harm.
        """
        try:
            installed = Version(Version(facts.flashinfer or "").public)
        except InvalidVersion:
            return True, (
                "FlashInfer is not installed"
                if facts.flashinfer is None
                else f"FlashInfer's version cannot be read: {facts.flashinfer!r}"
            )
        final = Version(installed.base_version) if installed.is_prerelease else installed
        inside = all(
            _COMPARE[bound.operator](
                final if bound.operator in (">", ">=") else installed, Version(bound.version)
            )
            for bound in SpecifierSet(self.affected)
        )
        is_or_not = "is" if inside else "is not"
        return inside, f"FlashInfer {facts.flashinfer} {is_or_not} {self.affected}"


def load_gates(path: Path | None = None) -> tuple[Gate, ...]:
    """The gates that come with this package, and what an operator's file makes of them.

    Args:
        path: A TOML file of `[[gate]]` tables to add, where one of a known id replaces it, and
            of `lift`, the ids of gates not to mind.

    Raises:
        SettingsError: The file is missing, or says something that is not accepted.
    """
    shipped = parse_toml(resources.files("fi_flags").joinpath("gates.toml").read_bytes())
    gates = {one.id: one for one in _read(shipped, "gates.toml")}
    if path is None:
        return tuple(gates.values())
    source = f"toml:{path}"
    name = variable("gates_file")
    document = read_toml(path, name, f"name another file with {name}, or none")
    for key, value in document.items():
        if key not in ("gate", "lift"):
            raise unknown(Given(value, source, key), "key", ("gate", "lift"))
    gates |= {one.id: one for one in _read(document, source)}
    for one in _lifted(document, source):
        if one not in gates:
            raise unknown(Given(one, source, one), "gate", tuple(gates))
        gates[one] = replace(gates[one], lifted_by=str(path))
    return tuple(gates.values())


def _read(document: Mapping[str, Any], source: str) -> list[Gate]:
    entries = document.get("gate", [])
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise refused(Given(entries, source, "gate"), "tables, [[gate]]")
    gates: list[Gate] = []
    for number, entry in enumerate(entries, 1):
        gate = _gate(entry, f"gate {number}", source)
        if gate.id in [one.id for one in gates]:
            raise refused(Given(gate.id, source, f"gate {number}, id"), "an id of its own")
        gates.append(gate)
    return gates


def _lifted(document: Mapping[str, Any], source: str) -> tuple[str, ...]:
    value = document.get("lift", [])
    try:
        return parse_names(value)
    except ValueError:
        raise refused(Given(value, source, "lift"), "an array of ids of gates") from None


def _gate(entry: Mapping[str, Any], where: str, source: str) -> Gate:
    fields: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in _PARSERS:
            raise unknown(Given(value, source, key), "key", tuple(_PARSERS))
        try:
            fields[key] = _PARSERS[key](value)
        except ValueError as error:
            raise refused(Given(value, source, f"{where}, {key}"), str(error)) from None
    if missing := [key for key in _NEEDED if key not in fields]:
        told = ", ".join(entry)
        raise refused(Given(told, source, where), f"also {', '.join(missing)}")
    gate = Gate(**fields)
    if bool(gate.ops) is not (gate.effect is Effect.SKIP_OPS):
        accepted = "names of ops where effect is skip_ops, and only there"
        raise refused(Given(list(gate.ops), source, f"{where}, ops"), accepted)
    return gate


def _filled(value: object) -> str:
    if isinstance(value, str) and value.strip():
        return parse_text(value)
    raise ValueError("a text without control characters")


def _bounds(value: object) -> str:
    accepted = f"bounds such as >=0.6.17,<0.6.19, with {' '.join(_COMPARE)}"
    try:
        bounds = list(SpecifierSet(_filled(value)))
        for bound in bounds:
            Version(bound.version)
    except (ValueError, InvalidSpecifier):  # InvalidVersion is a ValueError
        raise ValueError(accepted) from None
    if not bounds or any(bound.operator not in _COMPARE for bound in bounds):
        raise ValueError(accepted)
    return _filled(value)


def _probe(value: object) -> str:
    if value not in PROBES:
        raise ValueError(", ".join(PROBES))
    return str(value)


_PARSERS: Final[Mapping[str, Callable[[object], object]]] = {
    "id": _filled,
    "title": _filled,
    "url": _filled,
    "affected": _bounds,
    "effect": one_of(Effect),
    "archs": parse_names,
    "ops": parse_names,
    "probe": _probe,
}
_NEEDED: Final = ("id", "title", "url", "affected", "effect")
