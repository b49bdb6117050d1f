"""The story of a warm-up, on one page.

Vote 1, of the world, says what each rank decided, has and can do; each tuning group's plan is a
pure function of that; a strategy carries it out. Where the world has several groups, one more vote
of the world ends it, which also the ranks of a group that failed enter. Nothing that can fail comes
before vote 1, so that no rank waits for one that has already given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from structlog.stdlib import BoundLogger

from fi_flags import logs
from fi_flags.ballots import cut
from fi_flags.decision import Decision, Reason
from fi_flags.errors import FlagsError, RanksError, WorkloadError
from fi_flags.facts import Facts
from fi_flags.plan import Action, Plan, count_ballots, read_plans
from fi_flags.prepare import Ready, prepare
from fi_flags.ranks import Meeting, Ranks, Talk
from fi_flags.report import Outcome, Report, rank_reports
from fi_flags.run import Crew
from fi_flags.settings import FlashInferSettings, OnFailure, settings_or_off
from fi_flags.store import write_whole
from fi_flags.strategies import LeaderWorker, PerRank, Result, Shadow, Strategy
from fi_flags.trace import render
from fi_flags.tuner import OnStep
from fi_flags.watch import Deadlines
from fi_flags.workloads import Workload

__all__ = ["deadlines", "flashinfer_autotune", "teller", "warm_up"]

# A rank that must still come out of the model, where the group means to go on without tuning.
_PATIENT_GRACE_S = 60.0
_GRACE_S = 5.0


def warm_up(
    workload: Workload,
    *,
    ranks: Ranks | None = None,
    settings: FlashInferSettings | None = None,
    facts: Facts | None = None,
    on_step: OnStep | None = None,
) -> Report:
    """Tune a workload's FlashInfer calls on a group of ranks, or load what was tuned before.

    Every rank of the group calls this with the same workload. Nothing that is wrong with the cache
    stops it: the worst case is what the flag's ``off`` does.

    Args:
        workload: The dummy forward.
        ranks: The tuning group; ``Ranks.detect()`` if not given.
        settings: The flag and its knobs; read from environment and files if not given, where a
            value that cannot be read means off.
        facts: What is known of this machine; looked up if not given.
        on_step: Called with an op, the profiles done, and the profiles known so far.

    Raises:
        RanksError: A rank did not come, was lost, or is stuck; the error names it.
        WorkloadError: The workload failed on some rank, and ``on_failure`` is ``raise``.
        TunerError: FlashInfer cannot be imported.
    """
    began = time.perf_counter()
    settings = settings_or_off() if settings is None else settings
    ranks = Ranks.detect() if ranks is None else ranks
    log = logs.get_logger(rank=ranks.rank)
    with ranks.meet(deadlines(settings), tell=teller(log)) as meeting:
        ready = prepare(workload, ranks, settings, facts, log)
        plan = read_plans(meeting.vote(ready.ballot.to_json(), count_ballots))[ranks.group]
        meeting.timeline.met()
        if plan.action is Action.FAIL:
            text = f"the group cannot start: {plan.why}"
            raise ready.error or RanksError(text, ranks=list(plan.failed), phase="join")
        assert ready.tuner is not None  # noqa: S101 - or its ballot had an error
        assert ready.decision is not None  # noqa: S101 - likewise
        talk = meeting.among(plan.members)
        if talk is not meeting:
            log = log.bind(group=ranks.group)
        if talk.first:
            if ranks.rank != 0:
                logs.log_decision(log, ready.decision)
            _say_plan(log, plan, meeting.all_votes)
        crew = Crew(meeting, talk, ready.tuner, ready.before, workload, log, on_step)
        strategy = _strategy(plan, ready)
        with _traced(meeting, plan, settings.autotune_trace, log), _last_vote(meeting, talk):
            result = strategy.carry_out(crew, plan)
        report = _report(result, ready.decision, meeting, time.perf_counter() - began)
        if talk.first:
            _say_outcome(log, report)
    return report


def _strategy(plan: Plan, ready: Ready) -> Strategy:
    if ready.home is None or ready.trial is None:
        return PerRank()
    if plan.action is Action.UNCACHED:
        return Shadow(ready.home) if plan.shadow else PerRank()
    return LeaderWorker(ready.home, ready.trial)


@contextlib.contextmanager
def _last_vote(meeting: Meeting, talk: Talk) -> Iterator[None]:
    """Once this rank's group is done, or has failed, hear of the other groups.

    Raises:
        WorkloadError: This group failed, or another did.
    """
    failure: WorkloadError | None = None
    try:
        yield
    except WorkloadError as error:  # all ranks of the group came out with the same
        failure = error
    if talk is not meeting:  # else the group's own last vote has said it all
        group, text = meeting.ranks.group, str(failure or "")
        failed = meeting.vote([group, cut(text, 500)], _count_failures)
        if failed and failure is None:
            text = "; ".join(f"group {name}: {why}" for name, why in failed.items())
            failure = WorkloadError(text, hint="this group is well, but it cannot go on without")
    if failure is not None:
        raise failure


def _count_failures(said: list[list[str]]) -> dict[str, str]:
    return {group: text for group, text in reversed(said) if text}


@contextlib.contextmanager
def _traced(meeting: Meeting, plan: Plan, path: Path | None, log: BoundLogger) -> Iterator[None]:
    """Write what all ranks did when, where rank 0 asked for it; also of a start that failed."""
    ended, together = "interrupted", False
    try:
        yield
        ended, together = "done", plan.trace
    except FlagsError as error:
        ended = f"{type(error).__name__}: {error.message}"
        together = plan.trace and not isinstance(error, RanksError)  # else some rank is lost
        raise
    finally:
        own = meeting.timeline.to_json(meeting.rank, meeting.ranks.host)
        timelines: list[dict[str, Any]] | None = [own]
        with contextlib.suppress(RanksError):  # one that died since must not stop this rank
            timelines = meeting.gather(0, own) if together else timelines
        if meeting.rank == 0 and timelines is not None and path is not None:
            try:
                write_whole(path, render(timelines, {"ended": ended}))
                log.info(logs.TRACED, path=str(path), ranks=len(timelines))
            except Exception as error:  # noqa: BLE001 - a trace never stops a start
                why = f"{type(error).__name__}: {error}"
                log.warning(logs.NOT_TRACED, path=str(path), why=why)


class VllmRunner(Protocol):
    """What vLLM's model runner offers to a warm-up."""

    scheduler_config: Any

    def _dummy_run(self, *, num_tokens: int, skip_eplb: bool, is_profile: bool) -> object: ...


def flashinfer_autotune(runner: VllmRunner) -> None:
    """Warm a vLLM model runner up; a drop-in for vLLM's function of this name.

    With the flag off it does what vLLM 0.22.1 does, with a vote in place of the barrier, so that a
    failure reaches every rank: each rank runs the dummy forward under FlashInfer's ``autotune``
    (https://github.com/vllm-project/vllm/pull/43119).
    """
    warm_up(_RunnerWorkload(runner))


@dataclass(frozen=True)
class _RunnerWorkload:
    runner: VllmRunner
    name: str = "vllm"

    @property
    def needs_cuda(self) -> bool:
        return str(getattr(self.runner, "device", "cuda")).startswith("cuda")

    @property
    def identity(self) -> Mapping[str, Any]:
        config = getattr(self.runner, "vllm_config", None)
        return {
            "runner": type(self.runner).__qualname__,
            "config": None if config is None else str(config.compute_hash()),
            "max_num_batched_tokens": self.runner.scheduler_config.max_num_batched_tokens,
        }

    def run(self) -> None:
        import torch  # noqa: PLC0415 - importing fi_flags must not cost torch

        with torch.inference_mode():
            self.runner._dummy_run(  # noqa: SLF001 - it is what vLLM's own function calls
                num_tokens=self.runner.scheduler_config.max_num_batched_tokens,
                skip_eplb=True,
                is_profile=True,
            )


def deadlines(settings: FlashInferSettings) -> Deadlines:
    """How long a group with these settings waits for its ranks."""
    patient = settings.autotune_on_failure is OnFailure.UNTUNED
    grace = _PATIENT_GRACE_S if patient else _GRACE_S
    return Deadlines(
        join=settings.autotune_join_s,
        silence=settings.autotune_timeout_s,
        standstill=settings.autotune_stall_s,
        report=settings.autotune_heartbeat_s,
        grace=grace if settings.autotune_abort_peers else None,
        patient=patient,
    )


def teller(log: BoundLogger) -> Any:  # noqa: ANN401 - a Tell
    """What hands a meeting's events to a log."""
    events = {
        "waiting": (log.info, logs.WAITING),
        "tuning": (log.info, logs.TUNING),
        "peer_failed": (log.error, logs.PEER_FAILED),
        "ended": (log.error, logs.ENDED),
    }

    def tell(event: str, **fields: Any) -> None:  # noqa: ANN401
        speak, name = events[event]
        speak(name, **fields)

    return tell


def _say_plan(log: BoundLogger, plan: Plan, votes: int) -> None:
    # A table that is there and cannot be used is news, also where the group only tunes afresh.
    troubled = plan.spoilt or plan.reason in (Reason.RANKS_DISAGREE, Reason.CACHE_UNUSABLE)
    speak = log.warning if troubled else log.info
    # Should the run fail, moving this file away is the mend.
    table = {"table": plan.stored.place} if plan.action is Action.WARM else {}
    shown = {"action": plan.action.value, "reason": plan.reason.value, "why": plan.why}
    speak(logs.PLAN, **shown, votes=votes, **table)
    for feature, why in plan.without.items():
        log.warning(logs.WITHOUT, feature=feature, why=why)


def _report(
    result: Result,
    decision: Decision,
    meeting: Meeting,
    seconds: float,
) -> Report:
    plan = result.plan
    if plan.reason in (Reason.RANKS_DISAGREE, Reason.CACHE_UNUSABLE) and plan.action in (
        Action.UNCACHED,
        Action.UNTUNED,
    ):
        decision = decision.overruled(plan.reason, plan.why)
    recorded = plan.stored.cold_seconds
    saved = None
    if result.outcome in (Outcome.WARM, Outcome.TOPPED_UP) and recorded:
        saved = round(recorded - max(tally.seconds for tally in result.tallies), 3)
    return Report(
        outcome=result.outcome,
        decision=decision,
        plan=plan,
        seconds=round(seconds, 3),
        saved_seconds=saved,
        table=result.table,
        ranks=rank_reports(result.outcome, list(result.tallies), meeting.all_votes),
        shadow=result.shadow,
    )


def _say_outcome(log: BoundLogger, report: Report) -> None:
    failing = report.outcome is Outcome.UNTUNED or report.decision.level == "warning"
    speak = log.warning if failing else log.info
    fields: dict[str, Any] = {
        "outcome": report.outcome.value,
        "seconds": report.seconds,
        "saved_seconds": report.saved_seconds,
        "votes": report.ranks[0].votes,
        "profiles": {
            name: sum(getattr(rank, name) for rank in report.ranks)
            for name in ("loaded", "tuned", "missing", "failed")
        },
    }
    if report.shadow is not None:
        fields["shadow"] = report.shadow.to_json()
    if report.table is not None and report.table.kept is not False:
        fields |= {"table": report.table.path, "digest": report.table.digest[:16]}
    if report.outcome is Outcome.UNTUNED or report.plan.reason is Reason.CACHE_UNUSABLE:
        fields["why"] = report.plan.why
    speak(logs.OUTCOME, **fields)
