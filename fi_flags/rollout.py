"""Who `auto` includes: a pure function of the settings and of where we are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fi_flags.facts import Facts
from fi_flags.settings import FlashInferSettings


@dataclass(frozen=True)
class Rollout:
    """Whether a deployment is included, and by which rule it is or is not."""

    included: bool
    why: str


def draw(salt: str, identity: str) -> float:
    """The place of an id between 0 and 100: the same everywhere, even over many ids.

    Raising the percentage therefore only ever adds ids, and another salt shuffles them.
    """
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    digest = hashlib.sha256(f"{len(salt)}:{salt}{identity}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48 * 100


def roll_out(settings: FlashInferSettings, facts: Facts) -> Rollout:
    """Whether the roll-out includes this deployment: denied hosts first, then the rest."""
    host, arch = facts.host, facts.arch or "none"
    if pattern := _match(host, settings.rollout_deny_hosts):
        return Rollout(included=False, why=f"host {host} is denied by {pattern}")
    if not _match(host, settings.rollout_hosts):
        return Rollout(included=False, why=f"host {host} is not among the hosts rolled out to")
    if not _match(arch, settings.rollout_archs):
        return Rollout(included=False, why=f"GPU architecture {arch} is not rolled out to")
    place = draw(settings.rollout_salt, settings.rollout_id)
    share = f"{settings.rollout_id} draws {place:.2f} of {settings.rollout_percent:g} percent"
    return Rollout(included=place < settings.rollout_percent, why=share)


@dataclass(frozen=True)
class Place:
    """Where an id lies between 0 and 100, and whether the percentage includes it."""

    id: str
    place: float
    included: bool


def preview(settings: FlashInferSettings, ids: Iterable[str]) -> tuple[Place, ...]:
    """Which ids the percentage includes, each once; hosts and architectures are not asked."""
    places = ((one, draw(settings.rollout_salt, one)) for one in dict.fromkeys(ids))
    return tuple(Place(one, place, place < settings.rollout_percent) for one, place in places)


def _match(name: str, patterns: tuple[str, ...]) -> str | None:
    folded = name.lower()
    return next((one for one in patterns if fnmatchcase(folded, one.lower())), None)
