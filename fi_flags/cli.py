"""The command line: parse, call, render, exit.

Results go to standard output, with `--json` as exactly one document; logs and errors for a
person go to standard error.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from fi_flags import __version__
from fi_flags.cli_cache import cache
from fi_flags.cli_shared import AsJson, Config, configured, error_json, print_json, reported
from fi_flags.decision import decide
from fi_flags.errors import SettingsError
from fi_flags.facts import Facts, gather_facts
from fi_flags.gates import NOT_PROBED, Gate, load_gates
from fi_flags.logs import (
    PROBE_DISAGREES,
    PROBE_FAILED,
    get_logger,
)
from fi_flags.rollout import preview
from fi_flags.settings import describe

if TYPE_CHECKING:
    from fi_flags.probe import Probed

app = typer.Typer(
    help="A feature flag for FlashInfer's persistent autotune cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.add_typer(cache, name="cache")

Probe: TypeAlias = Annotated[
    bool, typer.Option("--probe", help="Also try the installed FlashInfer, in a child process.")
]


class Device(str, Enum):
    """Where the decoder of ``warmup`` runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def main(prog_name: str = "fi-flags") -> None:
    """Run the command line and exit."""
    if "--json" not in sys.argv[1:]:
        app(prog_name=prog_name)
    try:
        code = app(prog_name=prog_name, standalone_mode=False)
    except typer.Abort:
        raise SystemExit(130) from None
    except Exception as error:
        # typer tells wrong usage by an exception of the click that it brings, under some name.
        if not hasattr(error, "format_message"):
            raise
        wrong = SettingsError(error.format_message(), hint="see --help")
        print_json({"error": error_json(wrong)})
        typer.echo(f"Error: {wrong.message}", err=True)
        raise SystemExit(wrong.exit_code) from None
    raise SystemExit(code or 0)


def _version(on: bool) -> None:  # noqa: FBT001 - typer calls it so
    if on:
        facts = gather_facts()
        gpu = f"{facts.gpu} ({facts.arch}), driver {facts.driver}" if facts.gpu else None
        for name, version in {
            "fi-flags": __version__,
            "Python": facts.python,
            "FlashInfer": facts.flashinfer,
            "torch": facts.torch,
            "CUDA": facts.cuda,
            "vLLM": facts.vllm,
            "SGLang": facts.sglang,
            "GPU": gpu,
        }.items():
            typer.echo(f"{name} {version or 'none'}")
        raise typer.Exit


@app.callback(invoke_without_command=False)
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the versions that a bug report needs, and exit.",
            callback=_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


@app.command()
def explain(*, probe: Probe = False, as_json: AsJson = False, config: Config = None) -> None:
    """Show the decision for this machine, and every setting with its source."""
    with reported(as_json=as_json), configured(config) as settings:
        facts, known = gather_facts(), load_gates(settings.gates_file)
        found = _probed(known, facts).found if probe else NOT_PROBED
        decision = decide(settings, facts, known, probed=found)
        described = describe(settings)
        files = {
            "file": None if settings.file is None else str(settings.file),
            "hidden_files": [str(path) for path in settings.hidden],
        }
        if as_json:
            print_json({"decision": decision.to_json(), "settings": described, **files})
        else:
            from fi_flags.render import console, render_explanation  # noqa: PLC0415 - no JSON

            render_explanation(decision, described, files, console())


@app.command()
def gates(*, probe: Probe = False, as_json: AsJson = False, config: Config = None) -> None:
    """Show each upstream defect, whether it closes a gate here, and why."""
    with reported(as_json=as_json), configured(config) as settings:
        facts, known = gather_facts(), load_gates(settings.gates_file)
        probed = _probed(known, facts) if probe else None
        found = probed.found if probed else NOT_PROBED
        listed = [_gate_json(gate, facts, found) for gate in known]
        if as_json:
            print_json({"gates": listed, "probe": probed and probed.to_json()})
        else:
            from fi_flags.render import console, render_gates  # noqa: PLC0415

            failed = f"it did not run: {probed.failure}" if probed and probed.failure else "it ran"
            render_gates(listed, failed if probed else "not asked for; see --probe", console())


@app.command()
def rollout(
    *,
    ids: Annotated[
        Path,
        typer.Option(
            "--ids",
            metavar="FILE",
            help="One id a line; blank lines and those with # are left out; - is standard input.",
        ),
    ],
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Show which deployments the roll-out's percentage and salt include, by their ids."""
    with reported(as_json=as_json), configured(config) as settings:
        places = preview(settings, _read_ids(ids))
        included = sum(one.included for one in places)
        document = {
            "percent": settings.rollout_percent,
            "salt": settings.rollout_salt,
            "total": len(places),
            "included": included,
            "share": round(included / len(places) * 100, 3) if places else None,
            "ids": [dataclasses.asdict(one) for one in places],
        }
        if as_json:
            print_json(document)
        else:
            from fi_flags.render import console, render_rollout  # noqa: PLC0415

            render_rollout(document, console())


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
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write what each rank did when, for Perfetto."
        ),
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Warm a group of ranks up with a small decoder, as the flag says."""
    from fi_flags.launch import Job, launch  # noqa: PLC0415 - brings torch's launcher along

    with reported(as_json=as_json):
        if trace is not None and not trace.absolute().parent.is_dir():
            raise SettingsError(
                f"--trace {trace}: there is no directory {trace.absolute().parent}",
                hint="make it, or name a file in one that is there",
                name="--trace",
                value=str(trace),
                source="command line",
                accepted="a file in a directory that exists",
            )
        job = Job(
            device=device.value,
            tokens=tokens,
            config=config,
            bar=sys.stderr.isatty() and not as_json,
            trace=trace and trace.absolute(),
        )
        load_gates(job.settings().gates_file)  # a bad value is told before any rank starts
        report = launch(job, ranks)
        if report is None:
            return  # another rank prints
        if as_json:
            print_json(report)
        else:
            from fi_flags.render import console, render_report  # noqa: PLC0415

            render_report(report, console())


def _probed(known: Sequence[Gate], facts: Facts) -> Probed:
    """What the probes find; where that is not what the versions say, the log says so."""
    from fi_flags.probe import run_probes  # noqa: PLC0415 - a start without --probe is faster

    probed = run_probes()
    log = get_logger()
    if probed.failure:
        log.warning(PROBE_FAILED, message="the table of versions stands", cause=probed.failure)
    for gate in known:
        standing = gate.standing(facts, probed.found)
        if standing.contradicted:
            log.warning(PROBE_DISAGREES, gate=gate.id, message=standing.evidence)
    return probed


def _gate_json(gate: Gate, facts: Facts, found: Mapping[str, bool]) -> dict[str, Any]:
    standing = gate.standing(facts, found)
    return {
        "id": gate.id,
        "title": gate.title,
        "state": standing.state,
        "url": gate.url,
        "fixed_in": gate.fixed_in,
        "evidence": standing.evidence,
    }


def _read_ids(path: Path) -> list[str]:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        lines = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{path} cannot be read: {error}",
            hint="--ids takes a text file of ids, one a line, or - for standard input",
            name="--ids",
            value=str(path),
            source="command line",
            accepted="a readable text file",
        ) from None
    return [line for line in lines if line and not line.startswith("#")]
