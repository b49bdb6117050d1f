"""``fi-flags cache``: what tables are there, are they sound, and which may go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from fi_flags.bundle import pack, place_of
from fi_flags.cli_shared import AsJson, Config, configured, print_json, reported
from fi_flags.errors import SettingsError, TableError
from fi_flags.imports import import_files
from fi_flags.shelf import Doomed, Shelved, look_at, tables, to_prune
from fi_flags.store import write_whole

__all__ = ["cache"]

cache = typer.Typer(
    help="Look at stored tables, carry them elsewhere, and remove what is not needed.",
    no_args_is_help=True,
)


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
        if not paths and not place.is_dir():
            raise TableError(
                f"there is no directory {place}",
                hint="VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR names it; a first start makes it",
                path=str(place),
                status="absent",
            )
        _print(found, place, as_json=as_json)
        if not all(one.sound for one in found):
            raise typer.Exit(TableError.exit_code)


@cache.command()
def prune(
    *,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", min=0, metavar="DAYS", help="Only files older than this."),
    ] = None,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Only files that were set aside.")
    ] = False,
    flashinfer: Annotated[
        str | None,
        typer.Option(
            "--flashinfer", metavar="VERSIONS", help="Only tables of these versions: '<0.7', say."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them without asking.")] = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Remove tables and files that were set aside, as chosen; prints them first, and asks."""
    with reported(as_json=as_json), configured(config) as settings:
        if older_than is None and flashinfer is None and not quarantined:
            raise SettingsError(
                "prune needs to know what may go",
                hint="give --older-than, --quarantined or --flashinfer; all given must fit",
                name="prune",
                value="",
                source="command line",
                accepted="--older-than DAYS, --quarantined, --flashinfer VERSIONS",
            )
        chosen = to_prune(
            tables(settings.autotune_cache_dir),
            older_than=older_than,
            quarantined=quarantined,
            flashinfer=_versions(flashinfer),
        )
        if not as_json:
            from fi_flags.render import console, render_doomed  # noqa: PLC0415

            render_doomed([one.to_json() for one in chosen], console())
        agreed = yes or (bool(chosen) and _asked(as_json=as_json))
        removed, kept = _remove(chosen) if agreed else ([], {})
        if as_json:
            print_json(
                {
                    "chosen": [one.to_json() for one in chosen],
                    "removed": removed,
                    "kept": kept,
                }
            )
        elif agreed:
            typer.echo(f"removed {len(removed)} of {len(chosen)} files")
        for path, why in kept.items():
            typer.echo(f"not removed: {path}: {why}", err=True)
        if kept:
            raise typer.Exit(TableError.exit_code)


@cache.command("export")
def export_tables(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The file to write.")],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Tables; all sound ones if not given."),
    ] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Write tables into one file, with a manifest and checksums, for an image or another volume."""
    with reported(as_json=as_json), configured(config) as settings:
        place = settings.autotune_cache_dir
        found = [_there(path) for path in paths] if paths else tables(place)
        sound = [one for one in found if one.found.table is not None]
        if not sound or (paths and len(sound) < len(found)):
            bad = [f"{one.path}: {one.found.why or one.found.status.value}" for one in found]
            raise TableError(
                f"no sound table under {place}" if not paths else "; ".join(bad),
                hint="nothing was written; fi-flags cache list shows how each table stands",
                path=str(place),
                status="unsound",
            )
        if bundle.exists() and not force:
            raise SettingsError(
                f"{bundle} is there already",
                hint="name another file, or give --force",
                name="BUNDLE",
                value=str(bundle),
                source="command line",
                accepted="a file that is not there yet",
            )
        packed: dict[str, bytes] = {}
        for one in sound:
            assert one.found.table is not None  # noqa: S101 - those are sound
            where = place_of(one.found.table, one.path.parent.name, one.path.stem)
            if where in packed:
                raise TableError(
                    f"{one.path} has the same place in a bundle as another table: {where}",
                    hint="nothing was written; export them into bundles of their own",
                    path=str(one.path),
                    status="ambiguous",
                )
            packed[where] = one.found.table.render()
        try:
            write_whole(bundle.absolute(), pack(packed))
        except OSError as error:
            text, hint = f"{bundle} cannot be written: {error}", "nothing was written"
            raise TableError(text, hint=hint, path=str(bundle), status="unwritable") from None
        left_out = [one for one in found if one.found.table is None and one.path.exists()]
        document = {
            "bundle": str(bundle),
            "bytes": bundle.stat().st_size,
            "tables": [{"path": name, "bytes": len(data)} for name, data in packed.items()],
            "left_out": [
                {"path": str(one.path), "why": one.found.why or one.found.status.value}
                for one in left_out
            ],
        }
        if as_json:
            print_json(document)
            return
        typer.echo(f"{bundle}: {len(packed)} tables, {document['bytes']} bytes")
        for one in left_out:
            typer.echo(f"left out: {one.path}: {one.found.why or one.found.status.value}")


@cache.command("import")
def import_tables(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Bundles, per-rank files of vLLM or SGLang, or directories of such files.",
        ),
    ],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Set another table in a table's place aside.")
    ] = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Take tables over from a bundle, or from the per-rank files of vLLM 0.32, 0.33 or SGLang.

    A bundle's tables go where they belong. Per-rank files wait for a start in their environment
    that has no table of its own, and adopts what its calls hit. Exit code 3 if any was refused.
    """
    with reported(as_json=as_json), configured(config) as settings:
        done = import_files(settings.autotune_cache_dir, paths, force=force)
        document: dict[str, Any] = {
            "cache_dir": str(settings.autotune_cache_dir),
            "tables": [dataclasses.asdict(one) for one in done],
        }
        if as_json:
            print_json(document)
        else:
            from fi_flags.render import console, render_imports  # noqa: PLC0415

            render_imports(document["tables"], console())
        if any(one.action == "refused" for one in done):
            raise typer.Exit(TableError.exit_code)


def _asked(*, as_json: bool) -> bool:
    """Whether a person says yes; where none can be asked, that is said."""
    if as_json:
        typer.echo("nothing was removed: give --yes", err=True)
        return False
    try:
        return typer.confirm("Remove them?")
    except typer.Abort:
        raise SettingsError(
            "nobody is there to be asked, so nothing was removed",
            hint="give --yes to remove them without asking",
            name="prune",
            value="",
            source="command line",
            accepted="--yes",
        ) from None


def _versions(text: str | None) -> SpecifierSet | None:
    if text is None:
        return None
    try:
        # A bare version means that one.
        return SpecifierSet(text if text.strip()[:1] in tuple("<>=!~") else f"=={text}")
    except InvalidSpecifier:
        accepted = "a version, or a comparison such as '<0.7' or '>=0.6.13,<0.7'"
        raise SettingsError(
            f"--flashinfer is {text!r}",
            hint=f"accepted: {accepted}",
            name="--flashinfer",
            value=text,
            source="command line",
            accepted=accepted,
        ) from None


def _remove(chosen: Sequence[Doomed]) -> tuple[list[str], dict[str, str]]:
    removed: list[str] = []
    kept: dict[str, str] = {}
    for one in chosen:
        try:
            one.path.unlink(missing_ok=True)
            removed.append(str(one.path))
        except OSError as error:  # noqa: PERF203 - the others may still go
            kept[str(one.path)] = str(error)
    return removed, kept


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
