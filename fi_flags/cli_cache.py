"""``fi-flags cache``: what tables are there, and are they sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fi_flags.cli_shared import AsJson, Config, configured, print_json, reported
from fi_flags.errors import TableError
from fi_flags.shelf import Shelved, look_at, tables

__all__ = ["cache"]

cache = typer.Typer(help="Look at the stored tables.", no_args_is_help=True)


@cache.command("list")
def list_tables(*, as_json: AsJson = False, config: Config = None) -> None:
    """List the tables under the cache directory, sound or not, and those that were set aside."""
    with reported(as_json=as_json), configured(config) as settings:
        found = tables(settings.autotune_cache_dir)
        _print(found, settings.autotune_cache_dir, as_json=as_json)


@cache.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A table, as list prints it.")],
    *,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Show one table: its environment, how it was made, and its entries by op."""
    with reported(as_json=as_json), configured(config):
        document = _there(path).details()
        if as_json:
            print_json({"table": document})
        else:
            from fi_flags.render import console, render_table  # noqa: PLC0415

            render_table(document, console())


@cache.command()
def verify(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Tables; all under the directory if not given."),
    ] = None,
    *,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Check that tables are sound: exit code 3 if one is not."""
    with reported(as_json=as_json), configured(config) as settings:
        place = settings.autotune_cache_dir
        found = [_there(path) for path in paths] if paths else tables(place)
        # What was set aside already is no table any more.
        found = [one for one in found if one.path.exists() or one.path.is_symlink()]
        _print(found, place, as_json=as_json)
        if not all(one.sound for one in found):
            raise typer.Exit(TableError.exit_code)


def _there(path: Path) -> Shelved:
    found = look_at(path.absolute())
    if found.found.status.value == "absent" and not found.quarantined:
        raise TableError(
            f"{path}: there is no such file",
            hint="fi-flags cache list prints the tables that are there",
            path=str(path),
            status=found.found.status.value,
        )
    return found


def _print(found: Sequence[Shelved], place: Path, *, as_json: bool) -> None:
    document: dict[str, Any] = {
        "cache_dir": str(place),
        "tables": [one.to_json() for one in found],
    }
    if as_json:
        print_json(document)
    else:
        from fi_flags.render import console, render_tables  # noqa: PLC0415

        render_tables(document, console())
