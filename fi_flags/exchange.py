"""Bringing the ranks' tables together, before a load and after a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fi_flags.ranks import Talk
from fi_flags.table import MAX_BYTES, Entries, chosen, content_digest, surplus, unanswered

__all__ = ["exchange"]


def exchange(
    talk: Talk,
    leader: int,
    own: Entries,
    *,
    sites: Iterable[tuple[str, ...]] | None = None,
    expected: str = "",
    error: str = "",
) -> Entries:
    """Bring the ranks' tables together: the leader's, plus what others have beyond it.

    The leader's entries go to all once; each other rank sends back only what answers calls that
    those do not answer, mostly nothing. All must take part in all three steps, so what goes wrong
    on a rank, before or between them, is said in the next.

    Args:
        talk: The group's conversation; every rank calls this at the same place of it.
        leader: The rank whose entries win.
        own: This rank's entries.
        sites: The calls of this rank's run, each as the file keys of all runners that could serve
            it. They tell calls apart that share op, profile and extras but offer other runners.
        expected: The digest that the leader voted for its table.
        error: What went wrong on this rank already.

    Raises:
        ValueError: Some rank has an error, or the leader's table is not the one it voted.
    """
    rank = talk.rank
    first = _part(lambda: own, error)
    lead = talk.share(leader, first if rank == leader else None)

    def beyond() -> Entries:
        if expected and content_digest(lead["entries"]) != expected:
            raise ValueError("the leader's table arrived with another digest than it voted")
        if rank == leader:
            return {}
        # What the leader gave up, another rank may have a tactic for.
        base, mine = chosen(lead["entries"]), chosen(own)
        more = surplus(base, mine) if sites is None else unanswered(base, mine, sites)
        return {**surplus([*base, *more], own), **more}

    parts = talk.gather(leader, _part(beyond, error or first["error"]))
    rest = talk.share(
        leader, None if parts is None else _part(lambda: _together(talk.members, parts))
    )
    if rest["error"]:
        raise ValueError(rest["error"])
    found = {**chosen(lead["entries"]), **chosen(rest["entries"])}
    return {**surplus(found, {**rest["entries"], **lead["entries"]}), **found}


def _part(entries: Callable[[], Entries], error: str = "") -> dict[str, Any]:
    """What a rank sends: entries, or what went wrong with them."""
    if not error:
        try:
            found = entries()
            size = len(json.dumps(found))
            if size <= MAX_BYTES:
                return {"entries": found, "error": ""}
            error = f"{size} bytes of entries are too many to share"
        except Exception as failure:  # noqa: BLE001 - all must take part in the next step
            error = f"{type(failure).__name__}: {failure}"
    return {"entries": {}, "error": error}


def _together(members: Sequence[int], parts: list[dict[str, Any]]) -> Entries:
    """What the leader's table lacks, from all ranks: for each key the lowest rank's tactic."""
    errors = [
        f"rank {rank}: {part['error']}"
        for rank, part in zip(members, parts, strict=True)
        if part["error"]
    ]
    if errors:
        raise ValueError("; ".join(errors))
    entries: Entries = {}
    for found in [*(chosen(part["entries"]) for part in parts), *(p["entries"] for p in parts)]:
        entries = {**found, **entries}
    return entries
