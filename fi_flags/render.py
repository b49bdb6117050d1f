"""Decisions, settings and reports for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fi_flags.decision import Decision
from fi_flags.layers import PREFIX

__all__ = [
    "console",
    "render_doomed",
    "render_explanation",
    "render_gates",
    "render_report",
    "render_rollout",
    "render_table",
    "render_tables",
]

_MEANING = {
    "uncached": "every rank tuned for itself",
    "cold": "tuned from the beginning",
    "warm": "served from the stored table; nothing was tuned",
    "topped_up": "served from the stored table; what it lacked was tuned",
    "retuned": "the stored table failed its first run and was set aside; tuned afresh",
    "untuned": "served with FlashInfer's defaults; nothing was tuned or written",
}


def console() -> Console:
    """Standard output; a pipe has no width, and a cut table is of no use to grep."""
    found = Console()
    return found if found.is_terminal else Console(width=160)


def render_explanation(
    decision: Decision,
    settings: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, Any],
    out: Console,
) -> None:
    """Print a decision, and every setting with its source."""
    _print_block(
        out,
        ("decision", "on" if decision.enabled else "off"),
        ("reason", decision.reason.value),
        ("strategy", decision.strategy.value),
        ("mode", f"{decision.mode} (from {decision.source})"),
        ("because", decision.message),
        ("file", files["file"] or "none found"),
        *(("hidden", f"{path}, since one file only is read") for path in files["hidden_files"]),
        *(("gate", f"{gate.id} is {gate.state}, {gate.url}") for gate in decision.gates),
        *(("to do", link) for link in decision.todo),
    )
    table = Table(title="Settings", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("value", "source", "overrode", f"{PREFIX}…", "TOML"):
        table.add_column(heading, overflow="fold")
    for entry in settings.values():
        table.add_row(
            Text(_shown(entry["value"])),
            Text(entry["source"]),
            Text(", ".join(f"{_shown(o['value'])} ({o['source']})" for o in entry["overridden"])),
            Text(entry["env"].removeprefix(PREFIX)),
            Text(entry["toml"]),
            style="" if entry["source"] == "default" else "bold",
        )
    out.print()
    out.print(table)


def render_gates(gates: Sequence[Mapping[str, Any]], probe: str, out: Console) -> None:
    """Print each gate with its state and why, and what became of the probe."""
    for gate in gates:
        _print_block(
            out,
            (gate["state"], f"{gate['id']}: {gate['title']}"),
            ("because", gate["evidence"]),
            ("fixed in", gate["fixed_in"] or "no version known"),
            ("link", gate["url"]),
        )
        out.print()
    _print_block(out, ("probe", probe))


def render_rollout(document: Mapping[str, Any], out: Console) -> None:
    """Print each id with its place and whether it is in, and the share that is."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("id", "draws", "included"):
        table.add_column(heading, justify="right" if heading == "draws" else "left")
    for one in document["ids"]:
        said = "yes" if one["included"] else "no"
        table.add_row(Text(one["id"]), f"{one['place']:.2f}", said)
    out.print(table)
    out.print()
    share = "" if document["share"] is None else f", {document['share']:.1f} %"
    counts = f"{document['included']} of {document['total']}{share}"
    asked = f"{document['percent']:g} %, salt {_shown(document['salt'])}"
    _print_block(out, ("included", counts), ("asked for", asked))


def render_report(report: Mapping[str, Any], out: Console) -> None:
    """Print decision, plan, outcome, one row per rank, the table and the seconds saved."""
    decision, plan, table = report["decision"], report["plan"], report["table"]
    kept = [("table", f"{table['entries']} entries, {_kept(table)}")] if table else []
    _print_block(
        out,
        ("decision", f"{decision['strategy']}, {decision['reason']}: {decision['message']}"),
        *(("to do", link) for link in decision["todo"]),
        ("plan", f"{plan['action']}: {plan['why']}"),
        ("outcome", f"{report['outcome']}: {_MEANING[report['outcome']]}" + _unkept(report)),
        *kept,
        *(("shadow", _compared(found)) for found in [report.get("shadow")] if found),
        ("seconds", _seconds(report)),
    )
    ranks = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("rank", "loaded", "tuned", "missing", "failed", "seconds", "votes", "digest"):
        ranks.add_column(heading, justify="left" if heading == "digest" else "right")
    for rank in report["ranks"]:
        counts = [str(rank[name]) for name in ("rank", "loaded", "tuned", "missing", "failed")]
        digest = rank["digest"][:16] or "-"
        ranks.add_row(*counts, f"{rank['seconds']:.2f}", str(rank["votes"]), digest)
    out.print()
    out.print(ranks)


def render_tables(document: Mapping[str, Any], out: Console) -> None:
    """Print the tables under a cache directory: each path on a line of its own, to be copied."""
    if not document["tables"]:
        out.print(Text(f"no tables under {document['cache_dir']}"), soft_wrap=True)
    for table in document["tables"]:
        parts = [table["status"] + (f" ({table['why']})" if table["why"] else "")]
        parts.append(f"{table['entries']} entries")
        if table["cold_seconds"]:
            parts.append(f"tuned in {table['cold_seconds']:.1f} s")
        if table["written"]:
            parts.append(f"written {table['written']}")
        if table["on_trial"]:
            parts.append("on trial")
        if table["quarantined"]:
            parts.append(f"{len(table['quarantined'])} set aside")
        out.print(Text(table["path"]), soft_wrap=True)
        out.print(Text("  " + ", ".join(parts)), soft_wrap=True)


def render_doomed(files: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Print the files that pruning would remove, each path on a line of its own."""
    if not files:
        out.print(Text("nothing to remove"))
    for one in files:
        out.print(Text(one["path"]), soft_wrap=True)
        out.print(Text(f"  {one['what']}, {one['days']:.1f} days old, {one['bytes']} bytes"))


def render_imports(tables: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Print what became of each file, or each table of a bundle."""
    for one in tables:
        out.print(Text(one["source"]), soft_wrap=True)
        if one["action"] == "refused":
            said = f"refused: {one['why']}"
        elif one["action"] == "there":
            said = f"there already: {one['path']}"
        else:
            said = f"taken, {one['entries']} entries: {one['path']}"
        if one["moved_to"]:
            said += f"; what was there is now {one['moved_to']}"
        out.print(Text(f"  {said}"), soft_wrap=True)


def render_table(table: Mapping[str, Any], out: Console) -> None:
    """Print one table: where it is from, how it stands, and its entries by op."""
    _print_block(
        out,
        ("table", table["path"]),
        ("status", table["status"] + (f": {table['why']}" if table["why"] else "")),
        ("digest", table["digest"] or "none"),
        *[("trial", "a start runs on it for the first time, or died on it")] * table["on_trial"],
        *(("shadow", _shadowed(summary)) for summary in [table["shadow"]] if summary),
        *(("set aside", name) for name in table["quarantined"]),
        *((name, str(value)) for name, value in table["stamps"].items()),
        *(
            (name, str(value))
            for name, value in table["about"].items()
            if name not in ("schema", "digest")
        ),
        *(("op", f"{op}: {count}") for op, count in table["ops"].items()),
    )


def _print_block(out: Console, *rows: tuple[str, str]) -> None:
    block = Table.grid(padding=(0, 2))
    block.add_column(style="bold")
    block.add_column(overflow="fold")
    for name, value in rows:
        block.add_row(Text(name), Text(value))
    out.print(block)


def _unkept(report: Mapping[str, Any]) -> str:
    return (
        "; nothing was kept" if (report["outcome"], report["table"]) == ("uncached", None) else ""
    )


def _kept(table: Mapping[str, Any]) -> str:
    if table["kept"] is False:
        return f"not kept (the log says why): {table['path']}"
    return f"kept for the next start: {table['path']}"


def _compared(found: Mapping[str, Any]) -> str:
    text = f"{found['equal']} of {found['compared']} keys are tuned as the table has them"
    parts = [_differing(found)] if found["different"] or found["missing"] else []
    parts.append(f"loading would have saved {found['saved_seconds']:.2f} seconds")
    return "; ".join([text, *parts])


def _shadowed(summary: Mapping[str, Any]) -> str:
    starts = f"agreed in {summary['agreed']} of {summary['starts']} starts"
    keys = f"{summary['equal']} of {summary['compared']} keys were equal"
    return f"{starts}; {keys}, {_differing(summary)}"


def _differing(found: Mapping[str, Any]) -> str:
    different = f"{found['different']} different, {found['slower']} of them slower"
    return f"{different}, {found['missing']} missing"


def _seconds(report: Mapping[str, Any]) -> str:
    saved = report["saved_seconds"]
    text = f"{report['seconds']:.2f}"
    return text if saved is None else f"{text}; the run took {saved:.2f} less than the cold start"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or '""'
