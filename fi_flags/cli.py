"""The command line: parse, call, render, exit.

Results go to standard output, with `--json` as exactly one document; logs and errors for a
person go to standard error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from fi_flags import __version__
from fi_flags.decision import Decision, decide
from fi_flags.errors import FlagsError
from fi_flags.facts import gather_facts
from fi_flags.gates import load_gates
from fi_flags.layers import PREFIX
from fi_flags.logs import SETTING_WARNING, get_logger, setup_cli_logging
from fi_flags.settings import FlashInferSettings, describe

app = typer.Typer(
    help="A feature flag for FlashInfer's persistent autotune cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of text.")
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help=f"Settings file, in place of {PREFIX}FLAGS_FILE."
    ),
]


def main(prog_name: str = "fi-flags") -> None:
    """Run the command line and exit."""
    app(prog_name=prog_name)


@contextmanager
def reported(*, as_json: bool) -> Iterator[None]:
    """Turn an error of ours into its message and its exit code."""
    try:
        yield
    except FlagsError as error:
        if as_json:
            print_json({"error": _error_json(error)})
        typer.echo(f"Error: {error.message}", err=True)
        if error.hint:
            typer.echo(f"  {error.hint}", err=True)
        raise typer.Exit(error.exit_code) from None


@contextmanager
def configured(config: Path | None, **init: Any) -> Iterator[FlashInferSettings]:  # noqa: ANN401
    """The settings, with our log set up by them for as long as the block runs."""
    settings = FlashInferSettings.load(config=config, **init)
    with setup_cli_logging(settings.flags_log):
        for warning in settings.warnings:
            get_logger().warning(SETTING_WARNING, message=warning)
        yield settings


def print_json(document: Mapping[str, Any]) -> None:
    """Print the one JSON document of a command."""
    typer.echo(json.dumps(document, indent=2))


def _version(on: bool) -> None:  # noqa: FBT001 - typer calls it so
    if on:
        typer.echo(f"fi-flags {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=False)
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version and exit.",
            callback=_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


@app.command()
def explain(*, as_json: AsJson = False, config: Config = None) -> None:
    """Show the decision for this machine, and every setting with its source."""
    with reported(as_json=as_json), configured(config) as settings:
        decision = decide(settings, gather_facts(), load_gates())
        described = describe(settings)
        if as_json:
            print_json({"decision": decision.to_json(), "settings": described})
        else:
            _render(decision, described)


def _render(decision: Decision, settings: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415 - not needed for --json
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe has no width, and a cut table is of no use to grep
    block = Table.grid(padding=(0, 2))
    for name, value in (
        ("decision", "on" if decision.enabled else "off"),
        ("reason", decision.reason.value),
        ("strategy", decision.strategy.value),
        ("mode", f"{decision.mode} (from {decision.source})"),
        ("because", decision.message),
        *(("gate", f"{gate.id} is {gate.state}, {gate.url}") for gate in decision.gates),
        *(("to do", link) for link in decision.todo),
    ):
        block.add_row(Text(name, style="bold"), Text(value))
    console.print(block)

    table = Table(title="Settings", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("value", "source", f"{PREFIX}…", "TOML"):
        table.add_column(heading, overflow="fold")
    for entry in settings.values():
        table.add_row(
            Text(_shown(entry["value"])),
            Text(entry["source"]),
            Text(entry["env"].removeprefix(PREFIX)),
            Text(entry["toml"]),
            style="" if entry["source"] == "default" else "bold",
        )
    console.print()
    console.print(table)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or '""'


def _error_json(error: FlagsError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
        "fields": error.fields,
    }
