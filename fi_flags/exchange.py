"""Bringing the ranks' tables together, before a load and after a run."""

from __future__ import annotations

from typing import Any

from fi_flags.ranks import Meeting
from fi_flags.table import Entries, content_digest, merge, surplus

__all__ = ["exchange"]


def exchange(
    meeting: Meeting, leader: int, own: Entries, *, expected: str = "", error: str = ""
) -> Entries:
    """Bring the ranks' tables together: the leader's, plus what others have beyond it.

    The leader's entries go to all once; each other rank sends back only the calls that those do
    not answer, mostly none. A rank that has an error says it here, since all must take part.

    Between its three steps nothing is done that can fail on a table that was parsed.

    Raises:
        ValueError: Some rank has an error, or the leader's table is not the one it voted.
    """
    rank = meeting.ranks.rank
    lead = meeting.share(leader, {"entries": own, "error": error} if rank == leader else None)
    if expected and content_digest(lead["entries"]) != expected:
        error = error or "the leader's table arrived with another digest than it voted"
    more = {} if error or rank == leader else surplus(lead["entries"], own)
    parts = meeting.gather(leader, {"entries": more, "error": error})
    rest = meeting.share(leader, None if parts is None else _together(parts))
    if rest["error"]:
        raise ValueError(rest["error"])
    return {**lead["entries"], **rest["entries"]}


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the leader's table lacks, from all ranks; or what is wrong, with the rank's number."""
    errors = [f"rank {rank}: {part['error']}" for rank, part in enumerate(parts) if part["error"]]
    entries = {} if errors else merge(part["entries"] for part in parts)
    return {"entries": entries, "error": "; ".join(errors)}
