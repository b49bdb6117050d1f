"""The checks on releases of FlashInfer, installed side by side; one process for each release.

    python -m tests.contract.releases [--write] [VERSION ...]

prints a matrix, and with `--write` keeps it in `docs/compatibility.md`. `FI_FLAGS_RELEASES` names
the folder of unpacked releases, each in a folder named for its version; what is not there is
downloaded once, without its dependencies. The installed release needs no folder.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from platformdirs import user_cache_path

from fi_flags.tuner import NAMES

ROOT: Final = Path(__file__).parents[2]
CHECKS: Final = Path(__file__).with_name("checks.py")
PAGE: Final = ROOT / "docs" / "compatibility.md"
MARKS: Final = ("<!-- made by `make compat` -->\n", "<!-- end -->\n")
OLDER: Final = (
    *("0.6.8.post1", "0.6.12", "0.6.13"),
    *("0.6.16.post3", "0.6.18.post1", "0.7.2.post1"),
)
LIMIT_S: Final = 500

Found = Mapping[str, str]
"""For each check, in order: ``passed``, or why it was skipped, or how it failed."""

PASSED: Final = "passed"

# Without a GPU, several releases fail in what they import from cutlass; none of it is needed here.
_PYTEST: Final = (
    "import sys, pytest; sys.modules['cutlass'] = None; sys.exit(pytest.main(sys.argv[1:]))"
)


def installed() -> str:
    """The release that is installed here."""
    return installed_version("flashinfer-python")


def unpacked(version: str) -> Path:
    """The folder of a release; it is downloaded if it is not there yet."""
    default = user_cache_path("fi_flags") / "releases"
    place = Path(os.environ.get("FI_FLAGS_RELEASES") or default) / version
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{version}-") as half:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            options = ["--disable-pip-version-check", "--target", half]
            subprocess.run(
                [*pip, *options, f"flashinfer-python=={version}"], check=True, timeout=LIMIT_S
            )
            Path(half).rename(place)
            Path(half).mkdir()
    return place


def path_of(version: str) -> dict[str, str]:
    """The variable that puts a release before the one installed."""
    given = os.environ.get("PYTHONPATH", "")
    here = [str(ROOT)] if version == installed() else [str(unpacked(version)), str(ROOT)]
    return {"PYTHONPATH": os.pathsep.join([*here, *filter(None, [given])])}


def check(version: str) -> Found:
    """Run every check on one release.

    Raises:
        RuntimeError: They did not run to their end.
    """
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        # Old releases warn, on import, of what has changed in their libraries since.
        options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings="]
        done = subprocess.run(
            [sys.executable, "-c", _PYTEST, *options, f"--junitxml={report}", str(CHECKS)],
            env=os.environ | path_of(version) | {"CUDA_VISIBLE_DEVICES": ""},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"FlashInfer {version}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return dict(map(_outcome, ET.parse(report).getroot().iter("testcase")))  # noqa: S314 - pytest's own


def _outcome(case: ET.Element) -> tuple[str, str]:
    result = PASSED
    for child in case:
        if child.tag == "skipped":
            result = child.get("message", "skipped")
        elif child.tag in ("failure", "error"):
            result = f"failed: {child.text or child.get('message')}"
    return case.get("name", ""), result


def matrix(found: Mapping[str, Found]) -> str:
    """A Markdown table: a row for each check, a column for each release."""
    lines = [_row(["check", *found]), _row(["---"] * (len(found) + 1))]
    for name in next(iter(found.values())):
        marks = [_mark(of[name]) for of in found.values()]
        lines.append(_row([name.removeprefix("test_").replace("_", " "), *marks]))
    return "".join(lines)


def names() -> str:
    """A Markdown table of the private names: what each is for, and since when it is there."""
    lines = [_row(["name", "off without it", "since, of those checked"]), _row(["---"] * 3)]
    for name, (features, since) in NAMES.items():
        off = ", ".join(f"`{feature}`" for feature in features)
        lines.append(_row([f"`{name}`", off or "nothing", since]))
    return "".join(lines)


def column(page: str, version: str) -> Found:
    """What a page's matrix says of one release: for each check its mark."""
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in page.splitlines()]
    (head,) = [row for row in rows if row[0] == "check"]
    place = head.index(version)
    return {row[0]: row[place] for row in rows if len(row) == len(head) and row[0] != "---"}


def _mark(result: str) -> str:
    return "✓" if result == PASSED else "✗" if result.startswith("failed") else "–"  # noqa: RUF001 - a dash, as in tables


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    """Check the releases, print the matrix, and tell by the exit code whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=[*OLDER, installed()])
    parser.add_argument("--write", action="store_true", help=f"keep it in {PAGE.name}")
    options = parser.parse_args()
    found = {version: check(version) for version in options.versions}
    print(matrix(found))  # noqa: T201 - it is what this is for
    for version, results in found.items():
        for name, result in results.items():
            if result.startswith("failed"):
                print(f"{version} {name}: {result}", file=sys.stderr)  # noqa: T201
    if options.write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        made = f"{matrix(found)}\n{names()}"
        PAGE.write_text(f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{after}")
    return int(any(r.startswith("failed") for of in found.values() for r in of.values()))


if __name__ == "__main__":
    sys.exit(main())
