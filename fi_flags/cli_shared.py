"""What the commands share: options, settings with their log, errors, the JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from fi_flags.errors import FlagsError
from fi_flags.layers import PREFIX
from fi_flags.logs import SETTING_WARNING, get_logger, setup_cli_logging
from fi_flags.settings import FlashInferSettings

__all__ = ["AsJson", "Config", "configured", "error_json", "print_json", "reported"]

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of text.")
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help=f"Settings file, in place of {PREFIX}FLAGS_FILE."
    ),
]


@contextmanager
def reported(*, as_json: bool) -> Iterator[None]:
    """Turn an error of ours into its message and its exit code."""
    try:
        yield
    except FlagsError as error:
        if as_json:
            print_json({"error": error_json(error)})
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


def error_json(error: FlagsError) -> dict[str, Any]:
    """An error as the JSON document has it."""
    return {
        "type": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
        "fields": error.fields,
    }
