"""The documentation is true: tables, commands, links and names are compared with the code."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fi_flags import errors, logs, render
from fi_flags.cli import app
from fi_flags.decision import Reason
from fi_flags.gates import Effect, load_gates
from fi_flags.layers import PREFIX, Inputs
from fi_flags.report import Outcome
from fi_flags.settings import FlashInferSettings, Mode, describe, plan_values
from fi_flags.table import Status

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fi_flags"
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/compatibility.md",
    "docs/coordination.md",
    "docs/rollout.md",
)
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table whose head starts with a cell, without head and rule."""
    lines = iter(text.splitlines())
    assert any(line.startswith(f"| {heading} |") for line in lines), f"no table of {heading}"
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def column(text: str, heading: str) -> list[str]:
    return [row[0].strip("`") for row in rows(text, heading)]


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# -- settings -------------------------------------------------------------------------------


def default_of(value: object, *, required: bool) -> str:
    if required:  # it depends on the machine, which its meaning says
        return "see meaning"
    if isinstance(value, bool):
        return "`on`" if value else "`off`"
    if isinstance(value, list):
        value = ",".join(value)
    if value is None:
        return "none"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{text}`" if text else "none"


def test_settings_table_is_the_model() -> None:
    here = describe(FlashInferSettings(Inputs(environ={}, dotenv=None, places=())))
    expected = []
    for name, field in FlashInferSettings.model_fields.items():
        told = here[name]
        default = default_of(told["value"], required=field.is_required())
        variable = str(told["env"]).removeprefix(PREFIX)
        names = [f"`{name}`", f"`{variable}`", f"`{told['toml']}`"]
        expected.append([*names, default, str(field.description)])
    assert rows(README, "setting") == expected


def test_settings_that_ranks_must_share_are_all_named() -> None:
    (line,) = [line for line in README.splitlines() if line.startswith("All ranks of a group must")]
    assert re.findall(r"`(\w+)`", line) == list(plan_values(FlashInferSettings()))


def test_modes_are_the_models() -> None:
    assert column(README, "mode") == [mode.value for mode in Mode]


@pytest.mark.parametrize("mode", list(Mode))
def test_every_spelling_in_the_table_asks_for_its_mode(mode: Mode) -> None:
    (cell,) = [row[1] for row in rows(README, "mode") if row[0] == f"`{mode}`"]
    for word in re.findall(r"`(\w+)`", cell):
        assert FlashInferSettings(persistent_cache=word).persistent_cache is mode


def test_reasons_in_capitals_exist() -> None:
    known = {reason.value for reason in Reason}
    for page in (README, ARCHITECTURE, (ROOT / "docs" / "rollout.md").read_text()):
        spoken = set(re.findall(r"`([A-Z]+_[A-Z_]+)`", page))
        variables = {str(one["env"]) for one in describe(FlashInferSettings()).values()}
        bare = {name.removeprefix(PREFIX) for name in variables}
        assert spoken <= known | variables | bare | {PREFIX, f"{PREFIX}FLAGS_FILE"} | {
            "PIP_EXTRA_INDEX_URL"
        }


# -- gates ----------------------------------------------------------------------------------


def test_gates_table_is_the_shipped_gates() -> None:
    told = [re.match(r"\[`(.+)`\]\((.+)\)", row[0]) for row in rows(README, "gate id")]
    shipped = load_gates()
    assert [one and one.groups() for one in told] == [(gate.id, gate.url) for gate in shipped]
    for row, gate in zip(rows(README, "gate id"), shipped, strict=True):
        assert row[2] == (", ".join(gate.archs) or "any")
        assert re.findall(r"`([\w:]+)`", row[3]) == [
            *gate.ops,
            *["autotune_distributed_sync"] * (gate.effect is Effect.NO_SYNC),
        ]


def test_file_of_gates_that_is_shown_is_accepted(tmp_path: Path) -> None:
    (shown,) = [block for block in blocks("toml") if "[[gate]]" in block]
    file = tmp_path / "gates.toml"
    file.write_text(shown)
    gates = {gate.id: gate for gate in load_gates(file)}
    assert gates["our-moe"].ops
    assert gates["cluster-z-results"].lifted_by == str(file)


# -- command line ---------------------------------------------------------------------------


def commands() -> dict[str, set[str]]:
    """Every command with its options."""
    found: dict[str, set[str]] = {}

    def walk(group: Any, before: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, f"{before} {name}")
            else:
                options = {option for parameter in command.params for option in parameter.opts}
                found[f"{before} {name}"] = {o for o in options if o.startswith("-")}

    walk(typer.main.get_command(app), "fi-flags")
    return found


def test_every_command_is_in_the_readme_with_its_options() -> None:
    told = {
        row[0].strip("`"): set(re.findall(r"`(--[a-z-]+)`", row[1]))
        for row in rows(README, "command")
    }
    assert told == commands()


@pytest.mark.parametrize("page", ["README.md", "docs/rollout.md"])
def test_every_command_that_is_shown_exists_with_its_options(page: str) -> None:
    known = commands()
    shown = [
        shlex.split(line.partition("#")[0])
        for block in blocks("sh", page)
        for line in block.splitlines()
        if re.search(r"fi[-_]flags", line)
    ]
    assert shown
    for words in shown:
        at = next(i for i, word in enumerate(words) if word in ("fi-flags", "fi_flags"))
        options = {word for word in words[at + 2 :] if word.startswith("-")}
        name = " ".join(words[at + 1 : at + (3 if words[at + 1] == "cache" else 2)])
        assert options <= known[f"fi-flags {name}"]


def error_classes(of: type[errors.FlagsError] = errors.FlagsError) -> Iterator[type[Any]]:
    yield of
    for below in of.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from error_classes(below)


def test_exit_codes_are_those_of_the_errors() -> None:
    told = {
        name: int(row[0])
        for row in rows(README, "exit code")
        for name in re.findall(r"`(\w+)`", row[1])
    }
    assert told == {error.__name__: error.exit_code for error in error_classes()}
    without_error = [row[0] for row in rows(README, "exit code") if not row[1]]
    assert without_error == ["0", "130, 143"]


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# -- what it prints -------------------------------------------------------------------------


def test_outcomes_and_statuses_are_all_told() -> None:
    assert column(README, "outcome") == [outcome.value for outcome in Outcome]
    assert column(ARCHITECTURE, "outcome") == [outcome.value for outcome in Outcome]
    assert set(render._MEANING) == {outcome.value for outcome in Outcome}
    assert set(column(ARCHITECTURE, "status")) == {status.value for status in Status}


def test_the_run_that_is_shown_speaks_as_the_code_does() -> None:
    (shown,) = [block for block in blocks("text") if block.startswith("===")]
    titles = re.findall(r"^start '(.*?)'", (ROOT / "docs/demo.sh").read_text(), re.MULTILINE)
    assert re.findall(r"^=== (.*)$", shown, re.MULTILINE) == titles
    spoken = re.findall(r"^outcome +(\w+): (.*)$", shown, re.MULTILINE)
    assert [outcome for outcome, _ in spoken] == ["uncached", "cold", "warm"]
    for outcome, meaning in spoken:
        assert meaning.removesuffix("; nothing was kept") == render._MEANING[outcome]


def test_log_lines_that_are_shown_are_our_events() -> None:
    lines = [json.loads(line) for block in blocks("json") for line in block.splitlines()]
    assert {line["event"] for line in lines} == {logs.PLAN, logs.OUTCOME}


def test_every_event_is_told() -> None:
    events = {value for name, value in vars(logs).items() if name.isupper() and name != "LOGGER"}
    assert set(column(README, "event")) == events


# -- examples -------------------------------------------------------------------------------


def test_examples_run_and_print_what_the_readme_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.toy import fresh_tuner, own_tuners  # noqa: PLC0415 - brings FlashInfer along

    code = compile("\n".join(blocks("python")), "README.md", "exec", dont_inherit=True)
    printed = []
    with own_tuners(monkeypatch):
        for _ in range(2):
            fresh_tuner()
            exec(code, {"__name__": "readme"})  # noqa: S102 - it is our own
            printed.append(capsys.readouterr().out.strip())
    assert printed == ["cold OPERATOR_ON", "warm OPERATOR_ON"]
    assert f"prints `{printed[0]}`, the next one `{printed[1]}`" in README


# -- links and names ------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_between_files_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = (ROOT / page).parent / name if name else ROOT / page
        assert there.is_file(), target
        assert not anchor or anchor in anchors(there.read_text()), target


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_that_are_named_exist(page: str) -> None:
    named = re.findall(
        r"`((?:fi_flags|tests|docs|config)/[\w./]+)(?:::(\w+))?`", (ROOT / page).read_text()
    )
    for name, test in named:
        assert (ROOT / name).exists(), name
        assert not test or f"def {test}(" in (ROOT / name).read_text(), f"{name}::{test}"


def test_every_module_has_a_row_and_no_other() -> None:
    told = [name for name in column(ARCHITECTURE, "module") if name.endswith(".py")]
    assert sorted(told) == MODULES
    assert "gates.toml" in column(ARCHITECTURE, "module")


def imports(path: Path) -> Iterator[str]:
    """Our own modules that a module imports, anywhere but for type checking only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        else:
            continue
        for name in names:
            module = PACKAGE.parent.joinpath(*name.split("."))
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.is_file():
                    yield str(file.relative_to(PACKAGE))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_those_above_it_in_the_table(module: str) -> None:
    order = column(ARCHITECTURE, "module")
    for name in imports(PACKAGE / module):
        # A package's own file is imported with every module of it.
        if name not in ("__init__.py", str(Path(module).with_name("__init__.py"))):
            assert order.index(name) < order.index(module), f"{module} imports {name}"


def test_nothing_is_unpickled_or_executed() -> None:
    for module in MODULES:
        tree = ast.parse((PACKAGE / module).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                text = ast.unparse(node)
                assert not re.search(r"\b(pickle|marshal|shelve|dill|cloudpickle)\b", text), text
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in {"eval", "exec", "compile", "torch.load"}


def test_private_names_of_flashinfer_that_are_told_are_those_touched() -> None:
    told = {name for row in rows(ARCHITECTURE, "name") for name in re.findall(r"`(\w+)`", row[0])}
    from fi_flags import tuner  # noqa: PLC0415 - the only contact

    listed = {*tuner.NAMES}
    assert {*tuner._TACTICS, *tuner._BOOKKEEPING, *tuner._ENTRANCES} <= listed
    source = (PACKAGE / "tuner.py").read_text()
    assert listed <= told
    assert all(name in source for name in told)
    for used in re.findall(r"(?:_tuner|\btuner|auto_tuner)\.(_[a-z]\w+)", source):
        assert used in told, used


def test_the_only_reminder_in_the_code_is_the_one_beside_the_default() -> None:
    found = [
        (module, line)
        for module in MODULES
        for line in (PACKAGE / module).read_text().splitlines()
        if re.search(r"\b(TODO|FIXME|XXX)\b", line)
    ]
    assert [module for module, _ in found] == ["settings.py"]
    assert not any("TODO" in (ROOT / page).read_text() for page in PAGES)


def test_every_page_that_is_checked_is_every_page_there_is() -> None:
    there = {*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")}
    assert {str(path.relative_to(ROOT)) for path in there} == set(PAGES)


def test_every_reported_failure_has_a_test_of_its_name() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests" / "faults").glob("test_*.py"))
    named = set(re.findall(r"^def test_(f\d\d)_", text, re.MULTILINE))
    assert named == {f"f{number:02}" for number in range(1, 37)}
