"""All that a rank does before vote 1: it decides, and looks at its tuner and its table.

Nothing here raises: what goes wrong is in the ballot, so that no rank waits for one that has
already given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structlog.stdlib import BoundLogger

from fi_flags import logs
from fi_flags.ballots import Ballot
from fi_flags.decision import Decision, Reason, Strategy, decide
from fi_flags.errors import FlagsError, SettingsError
from fi_flags.facts import Facts, gather_facts
from fi_flags.gates import Gate, load_gates
from fi_flags.home import Home
from fi_flags.imports import adoptable
from fi_flags.ranks import Ranks
from fi_flags.settings import Access, FlashInferSettings, Mode, off_because, plan_values
from fi_flags.store import Store, environment_name, plain_identity, workload_name
from fi_flags.table import Status
from fi_flags.trial import Trial
from fi_flags.tuner import PROCESS_GROUP, Snapshot, Tuner
from fi_flags.workloads import Workload

__all__ = ["Ready", "prepare"]


@dataclass(frozen=True)
class Ready:
    """What a rank has before vote 1; what went wrong so far is in its ballot."""

    ballot: Ballot
    decision: Decision | None = None
    tuner: Tuner | None = None
    before: Snapshot | None = None
    home: Home | None = None
    trial: Trial | None = None
    error: FlagsError | None = None


def prepare(
    workload: Workload,
    ranks: Ranks,
    settings: FlashInferSettings,
    facts: Facts | None,
    log: BoundLogger,
) -> Ready:
    """All that comes before vote 1; whatever fails becomes this rank's ballot."""
    fields: dict[str, Any] = {"rank": ranks.rank, "host": ranks.host, "group": ranks.group}
    try:
        settings, gates = _with_gates(settings)
        decision = _decide(workload, settings, gates, facts, ranks.rank, log)
        fields |= {
            "mode": decision.mode.value,
            "strategy": decision.strategy.value,
            "reason": decision.reason.value,
            "settings": plan_values(settings),
            "gate_ops": decision.skip_ops,
            "no_sync": decision.sync_forbidden,
            "trace": settings.autotune_trace is not None,
        }
        if decision.reason is Reason.INVALID_SETTING:
            fields["why"] = decision.message
        tuner = Tuner()
    except Exception as error:  # noqa: BLE001 - it becomes this rank's ballot
        known = error if isinstance(error, FlagsError) else None
        text = known.message if known else f"{type(error).__name__}: {error}"
        return Ready(Ballot(**fields, error=text), error=known)
    fields["lacking"] = lacking = tuner.lacking()
    if ranks.process_group is None:  # averaging timings takes a group to do it in
        lacking.setdefault(PROCESS_GROUP, "this rank has no process group")
    before: Snapshot | None = None
    with contextlib.suppress(Exception):  # it is only missed where a warm-up fails
        before = tuner.snapshot()
    if not _looks_up(decision, ranks.rank):
        return Ready(Ballot(**fields), decision, tuner, before)
    try:
        home, trial = _at_home(workload, ranks, settings, tuner, log)
        found, table = home.found, home.found.table
        more = {
            "workload": home.store.path.parent.name,
            "environment": home.stamps,
            "unusable": tuner.obstacle(),
            "held": tuner.held(),
            "table": found.status.value,
            "why": found.why,
            "entries": len(table.entries) if table else 0,
            "digest": table.about["digest"] if table else "",
            "cold_seconds": table.cold_seconds if table else 0.0,
            "place": str(home.store.path),
            "writable": home.store.writable(),
        }
    except Exception as error:  # noqa: BLE001 - a cache never stops a start
        unusable = f"{type(error).__name__}: {error}"
        return Ready(Ballot(**fields, unusable=unusable), decision, tuner, before)
    return Ready(Ballot(**(fields | more)), decision, tuner, before, home, trial)


def _with_gates(
    settings: FlashInferSettings,
) -> tuple[FlashInferSettings, tuple[Gate, ...]]:
    """The settings and their gates; a file of gates that is not accepted means off."""
    try:
        return settings, load_gates(settings.gates_file)
    except SettingsError as error:
        return off_because(error), load_gates()


def _decide(
    workload: Workload,
    settings: FlashInferSettings,
    gates: Sequence[Gate],
    facts: Facts | None,
    rank: int,
    log: BoundLogger,
) -> Decision:
    facts = gather_facts() if facts is None else facts
    decision = decide(settings, facts, gates, needs_cuda=workload.needs_cuda)
    if rank == 0:
        for warning in settings.warnings:
            log.warning(logs.SETTING_WARNING, message=warning)
    if rank == 0 or decision.reason is Reason.INVALID_SETTING:
        logs.log_decision(log, decision)
    return decision


def _at_home(
    workload: Workload,
    ranks: Ranks,
    settings: FlashInferSettings,
    tuner: Tuner,
    log: BoundLogger,
) -> tuple[Home, Trial]:
    stamps = tuner.stamps()
    identity = plain_identity(workload.identity)
    name = workload_name(workload.name, identity)
    store = Store.at(settings.autotune_cache_dir, environment_name(stamps), name, ranks.group)
    trial = Trial(store)
    shadow = settings.persistent_cache is Mode.SHADOW  # which runs on no table
    ro = settings.autotune_cache_access is Access.RO
    if not ro and not shadow and trial.recover():
        log.warning(logs.BROUGHT_BACK, path=str(store.path), why="a start without it died too")
    found = store.read(stamps)
    imported: tuple[Path, ...] = ()
    if found.status is Status.ABSENT:
        found, imported = adoptable(store, stamps)
    about = {"workload": {"name": workload.name, **identity}}
    if found.table is not None and not imported:
        about = {**found.table.about, **about}
    return Home(store, found, stamps, about, imported), trial


def _looks_up(decision: Decision, rank: int) -> bool:
    # Off means off. But under auto rank 0 answers for all whether the rollout includes them, so
    # the others must be ready for its answer.
    excluded = decision.mode is Mode.AUTO and decision.reason is Reason.ROLLOUT_EXCLUDED
    shadow = decision.reason is Reason.SHADOW
    return shadow or decision.strategy is Strategy.LEADER_WORKER or (excluded and rank != 0)
