"""The plug-in as a user's project sees it: found by its entry point, in a pytest of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

FLAG_TEST = """
    from pathlib import Path
    import pytest
    from fi_flags import FlashInferSettings

    def test_flag_is_set_for_the_rest_of_the_test(flashinfer_flag, tmp_path):
        assert FlashInferSettings().persistent_cache == "off"
        flashinfer_flag("on", autotune_split="leader")
        settings = FlashInferSettings(persistent_cache="auto")
        assert (settings.persistent_cache, settings.autotune_split) == ("on", "leader")
        assert settings.autotune_cache_dir == tmp_path / "fi_flags"
        flashinfer_flag("off", autotune_cache_dir="/elsewhere")
        settings = FlashInferSettings()
        assert (settings.persistent_cache, settings.autotune_split) == ("off", "leader")
        assert settings.autotune_cache_dir == Path("/elsewhere")

    def test_next_test_starts_without():
        settings = FlashInferSettings()
        assert settings.provenance["persistent_cache"].source == "default"
        assert settings.provenance["autotune_cache_dir"].source == "default"

    def test_bad_value_is_told(flashinfer_flag):
        flashinfer_flag("maybe")

    def test_flag_is_given_back_after_a_failure():
        test_next_test_starts_without()
"""
BOTH_TEST = """
    from fi_flags import FlashInferSettings
    from fi_flags.settings import Mode

    def test_both(both_flashinfer_flags, tmp_path):
        settings = FlashInferSettings()
        assert settings.persistent_cache is both_flashinfer_flags
        assert isinstance(both_flashinfer_flags, Mode)
        assert settings.autotune_cache_dir.is_relative_to(tmp_path)
"""


def test_flag_is_set_for_one_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FLAG_TEST)
    result = pytester.runpytest_subprocess("-W", "error")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*SettingsError: persistent_cache = 'maybe' (override)*"])


def test_one_line_runs_a_test_with_the_flag_off_and_on(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BOTH_TEST)
    result = pytester.runpytest_subprocess("-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_both?off? PASSED*", "*test_both?on? PASSED*"])


def test_example_of_the_readme_passes_with_the_flag_off_and_on(pytester: pytest.Pytester) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (test,) = [block for block in blocks if "def test_" in block]
    imports = (
        "from fi_flags.tuner import wall_clock\nfrom fi_flags.workloads.cpu import CpuDecoder\n"
    )
    pytester.makepyfile(blocks[0] + imports + test)
    pytester.runpytest_subprocess().assert_outcomes(passed=2)


def test_fixtures_are_listed_with_what_they_do(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--fixtures")
    result.stdout.fnmatch_lines(
        ["flashinfer_flag*", "*Sets the flag*", "both_flashinfer_flags*", "*Runs a test twice*"]
    )


def test_plug_in_costs_a_pytest_nothing_that_it_does_not_use(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    code = (
        "import pytest, sys; code = pytest.main(['-q']);"
        "ours = {name for name in sys.modules if name.split('.')[0] in"
        " ('fi_flags', 'torch', 'flashinfer', 'pydantic', 'structlog')};"
        "assert ours == {'fi_flags', 'fi_flags.pytest_plugin'}, ours; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_helpers_costs_neither_torch_nor_pytest() -> None:
    code = (
        "import fi_flags.testing, sys;"
        "assert not {'torch', 'flashinfer', 'pytest', '_pytest'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_flag_set_in_a_thread_or_a_copied_context_holds_and_is_undone(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import contextvars

        from fi_flags.settings import FlashInferSettings, Mode

        def test_elsewhere(flashinfer_flag):
            contextvars.copy_context().run(flashinfer_flag, "on")
            assert FlashInferSettings.load().persistent_cache is Mode.ON

        def test_afterwards():
            assert FlashInferSettings.load().persistent_cache is Mode.OFF
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=2)
