"""A bundle: stored tables in one file, with a manifest and checksums, fit for a container image.

It is a zip archive whose members lie as under a cache directory; the same tables give the same
bytes. Nothing here trusts what it reads: sizes and names are checked before anything is taken.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from fi_flags.store import environment_name
from fi_flags.table import MAX_BYTES, Status, Table, Verdict, judge, parse

__all__ = ["MAX_BUNDLE_BYTES", "is_bundle", "pack", "place_of", "unpack", "unplaced"]

MAX_BUNDLE_BYTES: Final = 1024 * 1024 * 1024
_MANIFEST: Final = "manifest.json"
_SCHEMA: Final = 1
_MOST_TABLES: Final = 10_000
# What zipfile raises for what is broken, encrypted, or packed in a way that it does not know.
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(NotImplementedError, RuntimeError, EOFError, OSError, OverflowError),
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}")
_PARTS = 4  # v1/<environment>/<workload>/<group>.json


def place_of(table: Table, workload: str, group: str) -> str:
    """Where a table lies below a cache directory."""
    return f"v1/{environment_name(table.stamps)}/{workload}/{group}.json"


def unplaced(table: Table) -> str:
    """Why a table has no place, since it does not say where it was made; empty if it does."""
    for name in ("flashinfer_version", "gpu"):
        stamp = table.stamps.get(name)
        if not isinstance(stamp, str) or stamp in ("", "*"):
            return f"it does not say in which environment it was made: no {name}"
    return ""


def pack(tables: Mapping[str, bytes]) -> bytes:
    """A bundle of tables.

    Args:
        tables: The bytes of each sound table by its place (``place_of``).
    """
    manifest: dict[str, Any] = {"schema": _SCHEMA, "tables": []}
    for place, data in sorted(tables.items()):
        table = parse(data)
        manifest["tables"].append(
            {
                "path": place,
                "sha256": hashlib.sha256(data).hexdigest(),
                "bytes": len(data),
                "entries": len(table.entries),
                "written": table.about.get("written"),
                "stamps": table.stamps,
            }
        )
    members = {_MANIFEST: (json.dumps(manifest, indent=2) + "\n").encode("ascii")}
    members.update(sorted(tables.items()))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            member = zipfile.ZipInfo(name)  # of a fixed time, so that bundles can be compared
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o644 << 16
            archive.writestr(member, data)
    return out.getvalue()


def is_bundle(data: bytes) -> bool:
    """Whether a file is meant as a bundle, sound or not."""
    return data[:2] == b"PK"


def unpack(data: bytes) -> dict[str, tuple[bytes, Verdict]]:
    """The tables of a bundle by their places, each with what is to be held of it.

    Raises:
        ValueError: The file is not a bundle, or its manifest cannot be read.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
            if sum(sizes.values()) > MAX_BUNDLE_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_BUNDLE_BYTES} bytes")
            listed = _listed(_read(archive, sizes, _MANIFEST))
            return {
                place: _judged(archive, sizes, place, checksum)
                for place, checksum in listed.items()
            }
    except _BROKEN as error:
        raise ValueError(f"not a bundle: {error}") from None


def _listed(manifest: bytes) -> dict[str, str]:
    """The checksums in a manifest, by place."""
    try:
        document = json.loads(manifest)
        schema = document["schema"]
        listed = {one["path"]: one["sha256"] for one in document["tables"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"its {_MANIFEST} is not one of ours: {what}") from None
    if type(schema) is not int or schema != _SCHEMA:
        raise ValueError(f"its {_MANIFEST} has schema {schema!r}, not {_SCHEMA}")
    if len(listed) > _MOST_TABLES:
        raise ValueError(f"its {_MANIFEST} lists {len(listed)} tables, more than {_MOST_TABLES}")
    if not all(isinstance(text, str) for pair in listed.items() for text in pair):
        raise ValueError(f"its {_MANIFEST} has a path or a checksum that is not text")
    return listed


def _judged(
    archive: zipfile.ZipFile, sizes: Mapping[str, int], place: str, checksum: str
) -> tuple[bytes, Verdict]:
    try:
        data = _read(archive, sizes, place)
    except (ValueError, *_BROKEN) as error:
        return b"", _bad(str(error))
    found = judge(data, {})
    if hashlib.sha256(data).hexdigest() != checksum:
        return b"", _bad("it does not match its checksum")
    if found.table is not None:
        unsaid = unplaced(found.table)
        if unsaid:
            return b"", _bad(unsaid)
        parts = PurePosixPath(place).parts
        right = len(parts) == _PARTS and all(_NAME.fullmatch(part) for part in parts)
        if not right or place_of(found.table, parts[2], parts[3].removesuffix(".json")) != place:
            return b"", _bad("it lies elsewhere than its environment says")
    return (data if found.table else b""), found


def _bad(why: str) -> Verdict:
    return Verdict(Status.SUSPECT, why=why)


def _read(archive: zipfile.ZipFile, sizes: Mapping[str, int], name: str) -> bytes:
    """A member, of no more bytes than a table may have, whatever the archive claims.

    Raises:
        ValueError: There is none, or it is too large.
    """
    if name not in sizes:
        raise ValueError(f"there is no {name} in it")
    with archive.open(name) as member:
        data = member.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{name} has more than {MAX_BYTES} bytes")
    return data
