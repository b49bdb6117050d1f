"""Where settings come from: arguments, environment, `.env`, TOML file, defaults.

Reads each source once and says, for every value, who gave it and under which name.
What a value means, and whether it is accepted, is for `settings.py`.
"""

from __future__ import annotations

import difflib
import io
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import platformdirs
from dotenv import dotenv_values

from fi_flags.errors import SettingsError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX: Final = "VLLM_FLASHINFER_"
FLAGS_FILE: Final = f"{PREFIX}FLAGS_FILE"
DEFAULT: Final = "default"
_NO_HOME: Final = Path("/nonexistent")  # nothing is read there, and nothing can be written
DOTENV: Final = Path(".env")
# What `testing.override` says in this thread, or in the task that runs in it.
OVERRIDE: Final[ContextVar[Mapping[str, object]]] = ContextVar(
    "fi_flags_override", default=MappingProxyType({})
)

_SECTIONS: Final = ("autotune", "rollout")
_VLLM_OWNS: Final = frozenset(
    {
        f"{PREFIX}ALLREDUCE_BACKEND",
        f"{PREFIX}ALLREDUCE_FUSION_THRESHOLDS_MB",
        f"{PREFIX}AUTOTUNE_CACHE_ONLY",
        f"{PREFIX}DISABLE_Q_QUANTIZATION",
        f"{PREFIX}FORCE_TENSOR_CORES",
        f"{PREFIX}MOE_A2A_LOW_PRECISION_COMBINE",
        f"{PREFIX}MOE_BACKEND",
        f"{PREFIX}WORKSPACE_BUFFER_SIZE",
    }
)


class Layers(NamedTuple):
    """What all sources say.

    Attributes:
        given: Each source, strongest first, from field to what it gave.
        warnings: Variables that nothing reads, and what they resemble.
        file: The TOML file that was read, if any.
        hidden: TOML files in the usual places that it hides, since one file only is read.
    """

    given: list[dict[str, Given]]
    warnings: tuple[str, ...]
    file: Path | None
    hidden: tuple[Path, ...]


@dataclass(frozen=True)
class Inputs:
    """What settings are read from; by default the process's own surroundings.

    Attributes:
        environ: The environment; None is the process's.
        dotenv: The `.env` file, which need not exist; None reads none.
        config: A TOML file that must exist; None takes the first that exists of places.
        places: Where a TOML file may be; None is the usual places.
        override: Settings by name that win over all others; None is what a test has overridden.
    """

    environ: Mapping[str, str] | None = None
    dotenv: Path | None = DOTENV
    config: Path | None = None
    places: tuple[Path, ...] | None = None
    override: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Given:
    """One value as its source gave it.

    Attributes:
        value: The value before it is parsed.
        source: `override`, `init`, `env`, `dotenv`, `toml:<path>` or `default`.
        name: How that source spells the setting.
    """

    value: object
    source: str
    name: str


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + field.upper()


def toml_path(field: str) -> tuple[str, ...]:
    """The keys that lead to a setting in a TOML file."""
    if field == "flags_log":
        return ("log",)
    section, _, key = field.partition("_")
    return (section, key) if section in _SECTIONS else (field,)


def toml_key(field: str) -> str:
    """The dotted name of a setting in a TOML file."""
    return ".".join(toml_path(field))


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of names that a typist most likely meant, if any comes close."""
    by_fold = {known.casefold(): known for known in names}
    close = difflib.get_close_matches(name.casefold(), by_fold, n=1, cutoff=0.8)
    return by_fold[close[0]] if close else None


def brief(value: object) -> str:
    """A value as it is shown in a message: quoted, escaped, and cut at 120 characters."""
    try:
        shown = repr(str(value) if isinstance(value, Path) else value)
    except ValueError:  # Python does not print integers of thousands of digits
        shown = f"{type(value).__name__} of thousands of digits"
    limit = 120
    return shown if len(shown) <= limit else f"{shown[:limit]}…"


def parse_toml(data: bytes) -> dict[str, Any]:
    """Parse TOML bytes.

    Raises:
        ValueError: the bytes are not UTF-8, not TOML, or nested beyond reason.
    """
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(path: Path, name: str, hint: str) -> dict[str, Any]:
    """The document of a file that must exist.

    Args:
        path: The file.
        name: The setting that names it.
        hint: What to do if it cannot be read.

    Raises:
        SettingsError: The file is missing, or is not TOML.
    """
    try:
        return parse_toml(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{path} cannot be read as TOML: {error}",
            hint=hint,
            name=name,
            value=str(path),
            source=f"toml:{path}",
            accepted="a readable TOML file",
        ) from None


def read_layers(inputs: Inputs, fields: Sequence[str], init: Mapping[str, object]) -> Layers:
    """Read every source once.

    Raises:
        SettingsError: a source cannot be read, or names a setting that does not exist.
    """
    environ = os.environ if inputs.environ is None else inputs.environ
    dotenv = _read_dotenv(inputs.dotenv)
    override = OVERRIDE.get() if inputs.override is None else inputs.override
    places = _usual_places(environ) if inputs.places is None else inputs.places
    found = [place.absolute() for place in places if _is_file(place)]
    file = _find_toml(inputs, environ, dotenv, found)
    given = [
        _named_layer(fields, override, "override"),
        _named_layer(fields, init, "init"),
        _variables_layer(fields, environ, "env"),
        _variables_layer(fields, dotenv, "dotenv"),
        _toml_layer(fields, file),
        _default_layer(environ),
    ]
    hidden = tuple(place for place in found if place != file)
    looked_at = [*places, *([inputs.dotenv] if inputs.dotenv else [])]
    odd = [
        f"{place.absolute()} is there, but it is no file, so nothing was read from it"
        for place in looked_at
        if os.path.lexists(place) and not _is_file(place)
    ]
    return Layers(given, (*odd, *_misspelt(fields, [*environ, *dotenv])), file, hidden)


def is_set(value: object) -> bool:
    """Whether a value counts as given: an empty or blank text does not."""
    return value is not None and not (isinstance(value, str) and not value.strip())


def _named_layer(
    fields: Sequence[str], given: Mapping[str, object], source: str
) -> dict[str, Given]:
    for name, value in given.items():
        if name not in fields:
            raise unknown(Given(value, source, name), "setting", fields)
    return {name: Given(value, source, name) for name, value in given.items() if is_set(value)}


def _variables_layer(
    fields: Sequence[str], environ: Mapping[str, str | None], source: str
) -> dict[str, Given]:
    named = ((field, variable(field)) for field in fields)
    return {
        field: Given(environ[name], source, name)
        for field, name in named
        if is_set(environ.get(name))
    }


def _toml_layer(fields: Sequence[str], path: Path | None) -> dict[str, Given]:
    if path is None:
        return {}
    source = f"toml:{path}"
    document = read_toml(path, FLAGS_FILE, f"name another file with {FLAGS_FILE} or --config")
    by_path = {toml_path(field): field for field in fields}
    layer = {}
    for keys, value in _leaves(document, source):
        if keys not in by_path:
            known = [toml_key(field) for field in fields]
            raise unknown(Given(value, source, ".".join(keys)), "setting", known)
        if is_set(value):
            layer[by_path[keys]] = Given(value, source, ".".join(keys))
    return layer


def _leaves(document: Mapping[str, Any], source: str) -> Iterator[tuple[tuple[str, ...], object]]:
    for key, value in document.items():
        if key not in _SECTIONS:
            yield (key,), value
        elif isinstance(value, dict):
            yield from (((key, inner), deep) for inner, deep in value.items())
        else:
            raise refused(Given(value, source, key), f"a table, [{key}]")


def _default_layer(environ: Mapping[str, str]) -> dict[str, Given]:
    """The two defaults that depend on where the process runs."""
    root = environ.get("VLLM_CACHE_ROOT", "")
    cache = (
        Given(Path(root.strip()) / "fi_flags", DEFAULT, "VLLM_CACHE_ROOT")
        if root.strip()
        else Given(
            _xdg(environ, "XDG_CACHE_HOME", platformdirs.user_cache_path) / "fi_flags",
            DEFAULT,
            "XDG_CACHE_HOME",
        )
    )
    master = environ.get("MASTER_ADDR", "").strip()
    identity = (
        Given(master, DEFAULT, "MASTER_ADDR")
        if master and not _is_loopback(master)
        else Given(socket.gethostname(), DEFAULT, "host name")
    )
    return {"autotune_cache_dir": cache, "rollout_id": identity}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.casefold().split(".")[0] in {"localhost", "ip6-localhost"}


def _xdg(environ: Mapping[str, str], name: str, otherwise: Callable[[], Path]) -> Path:
    """A base directory; the specification says to ignore a relative one."""
    path = Path(environ.get(name, ""))
    if path.is_absolute():
        return path
    try:
        return otherwise()
    except RuntimeError:  # no HOME, and a user that the system does not know
        return _NO_HOME


def _read_dotenv(path: Path | None) -> Mapping[str, str | None]:
    """The variables of a `.env`, as they are written: nothing in them is expanded.

    Bytes that are not UTF-8 survive as surrogates, so that a foreign line does no harm and
    one of ours is refused like any other bad value.
    """
    if path is None or not _is_file(path):
        return {}
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error}",
            hint="make it readable, or start in another directory",
            name=str(path),
            value="",
            source="dotenv",
            accepted="a readable file",
        ) from None
    values = dotenv_values(stream=io.StringIO(text), interpolate=False)
    for number, line in enumerate(text.splitlines(), 1):
        # python-dotenv leaves out what it cannot parse; a line of ours must not be lost like that.
        named = re.match(rf"\s*(?:export\s+)?({PREFIX}\w*)", line)
        if named and named[1] not in values:
            raise SettingsError(
                f"{path}, line {number}: {line.strip()!r} cannot be parsed",
                hint=f"write {named[1]}=value",
                name=named[1],
                value=line.strip(),
                source="dotenv",
                accepted="NAME=value, the value in quotes if it has blanks",
            )
    return values


def _find_toml(
    inputs: Inputs,
    environ: Mapping[str, str],
    dotenv: Mapping[str, str | None],
    found: Sequence[Path],
) -> Path | None:
    """The TOML file to read: the one that is named, else the first of those found."""
    spoken = environ.get(FLAGS_FILE, "").strip() or (dotenv.get(FLAGS_FILE) or "").strip()
    if named := inputs.config or spoken:
        try:
            return Path(os.path.expanduser(named)).absolute()  # noqa: PTH111 - Path's may raise
        except (OSError, ValueError) as error:  # no working directory any more, or no such name
            raise SettingsError(
                f"{FLAGS_FILE} = {brief(str(named))} is not a path: {error}",
                hint="name an absolute path",
                name=FLAGS_FILE,
                value=str(named),
                source="config",
                accepted="an absolute path",
            ) from None
    return found[0] if found else None


def _usual_places(environ: Mapping[str, str]) -> tuple[Path, ...]:
    user = _xdg(environ, "XDG_CONFIG_HOME", platformdirs.user_config_path)
    return (
        Path("config/fi_flags.toml"),
        user / "fi-flags" / "fi_flags.toml",
        Path("/etc/fi-flags/fi_flags.toml"),
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder on the way that we may not enter
        return False


def _misspelt(fields: Sequence[str], present: Iterable[str]) -> Iterator[str]:
    """A warning for each variable that nothing reads and that looks like one of ours."""
    ours = [FLAGS_FILE, *map(variable, fields)]
    for name in dict.fromkeys(present):
        folded = name.upper()
        near = folded.startswith("VLLM_") or "FLASH" in folded
        if name in ours or folded in _VLLM_OWNS or not near:
            continue
        if meant := nearest(name, ours):
            yield f"{brief(name)} is read by nobody; did you mean {meant}?"


def refused(given: Given, accepted: str) -> SettingsError:
    """The error for a value that is not accepted."""
    return SettingsError(
        f"{given.name} = {brief(given.value)} ({given.source}) is not accepted",
        hint=f"accepted: {accepted}",
        name=given.name,
        value=brief(given.value),
        source=given.source,
        accepted=accepted,
    )


def unknown(given: Given, kind: str, known: Sequence[str]) -> SettingsError:
    """The error for a name that is not one of those known, with the nearest."""
    meant = nearest(given.name, known)
    return SettingsError(
        f"{brief(given.name)} = {brief(given.value)} ({given.source}) is not a {kind}",
        hint=f"did you mean {meant}?" if meant else f"{kind}s are: {', '.join(known)}",
        name=given.name,
        value=brief(given.value),
        source=given.source,
        accepted=meant or ", ".join(known),
    )
