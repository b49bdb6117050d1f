"""A warm-up's report for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["render_report"]

_MEANING = {
    "uncached": "every rank tuned for itself; nothing was kept",
    "cold": "nothing was stored yet: tuned, and kept for the next start",
    "warm": "served from the stored table; nothing was tuned",
    "topped_up": "served from the stored table; what it lacked was tuned and added",
    "untuned": "served with FlashInfer's defaults; nothing was tuned or written",
}


def render_report(report: Mapping[str, Any], console: Console) -> None:
    """Print decision, plan, outcome, one row per rank, the table and the seconds saved."""
    decision, plan = report["decision"], report["plan"]
    block = Table.grid(padding=(0, 2))
    rows = [
        ("decision", f"{decision['strategy']}, {decision['reason']}: {decision['message']}"),
        *(("to do", link) for link in decision["todo"]),
        ("plan", f"{plan['action']}: {plan['why']}"),
        ("outcome", f"{report['outcome']}: {_MEANING[report['outcome']]}"),
    ]
    table = report["table"]
    if table:
        rows.append(("table", f"{table['entries']} entries in {table['path']}"))
    rows.append(("seconds", _seconds(report)))
    for name, value in rows:
        block.add_row(Text(name, style="bold"), Text(value))
    console.print(block)

    ranks = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("rank", "loaded", "tuned", "missing", "failed", "seconds", "votes", "digest"):
        ranks.add_column(heading, justify="left" if heading == "digest" else "right")
    for rank in report["ranks"]:
        counts = [str(rank[name]) for name in ("rank", "loaded", "tuned", "missing", "failed")]
        digest = rank["digest"][:16] or "-"
        ranks.add_row(*counts, f"{rank['seconds']:.2f}", str(rank["votes"]), digest)
    console.print()
    console.print(ranks)


def _seconds(report: Mapping[str, Any]) -> str:
    text = f"{report['seconds']:.2f}"
    saved = report["saved_seconds"]
    return text if saved is None else f"{text}, {saved:.2f} less than the recorded cold start"
