from __future__ import annotations

import subprocess
import sys

import pytest

import fi_flags

HEAVY = ("torch", "flashinfer", "vllm", "sglang", "numpy")
EXPLAIN = """
import runpy
sys.argv = ["fi-flags", "explain"]
try:
    runpy.run_module("fi_flags", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
"""


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules), file=sys.__stderr__)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import fi_flags",
        "from fi_flags import FlashInferSettings, decide, Decision",
        "import fi_flags.cli, fi_flags.logs",
        EXPLAIN,
    ],
    ids=["package", "public names", "command line", "explain"],
)
@pytest.mark.parametrize("flag", ["on", "off"])
def test_no_heavy_import(statement: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FLASHINFER_PERSISTENT_CACHE", flag)
    loaded = modules_after(statement)
    assert "fi_flags" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_package_alone_imports_nothing_of_ours_or_others() -> None:
    loaded = modules_after("import fi_flags")
    assert {name for name in loaded if name.startswith("fi_flags")} == {"fi_flags"}
    assert "pydantic" not in loaded


def test_public_names_are_listed_and_found() -> None:
    from fi_flags.decision import decide  # noqa: PLC0415 - the point of the test

    assert fi_flags.decide is decide
    assert {"FlashInferSettings", "Report", "decide", "warm_up", "__version__"} <= set(
        dir(fi_flags)
    )


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_such"):
        fi_flags.nothing_such  # noqa: B018 - the access is the test
