"""The command line: parse, call, render, exit.

Results go to standard output, with `--json` as exactly one document; logs and errors for a
person go to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from fi_flags import __version__
from fi_flags.decision import decide
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


class Device(str, Enum):
    """Where the decoder of ``warmup`` runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


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
            from fi_flags.render import console, render_explanation  # noqa: PLC0415 - no JSON

            render_explanation(decision, described, console())


@app.command()
def warmup(
    *,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Local ranks to start; ignored under torchrun.")
    ] = 2,
    device: Annotated[
        Device, typer.Option("--device", help="Where the decoder runs.", case_sensitive=False)
    ] = Device.AUTO,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="The most tokens in one forward.")
    ] = 256,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Warm a group of ranks up with a small decoder, as the flag says."""
    from fi_flags.launch import Job, launch  # noqa: PLC0415 - brings torch's launcher along

    with reported(as_json=as_json):
        FlashInferSettings.load(config=config)  # a bad value is told before any rank starts
        bar = sys.stderr.isatty() and not as_json
        job = Job(device=device.value, tokens=tokens, config=config, bar=bar)
        report = launch(job, ranks)
        if report is None:
            return  # another rank prints
        if as_json:
            print_json(report)
        else:
            from fi_flags.render import console, render_report  # noqa: PLC0415

            render_report(report, console())


def _error_json(error: FlagsError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
        "fields": error.fields,
    }
