"""The log: structlog events that travel through the standard logger `fi_flags`.

Inside a server its own handlers and levels apply, and nobody's configuration changes. A
record's message is one readable line; the event itself is its attribute `fi_flags`, a dict.
On the command line `setup_cli_logging` attaches a handler of ours for as long as it runs.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, Final, TextIO

import structlog
from structlog.stdlib import BoundLogger

from fi_flags.decision import Decision
from fi_flags.settings import LogFormat

LOGGER: Final = "fi_flags"

# Every event we log, by name.
DECISION: Final = "flashinfer_cache_decision"
SETTING_WARNING: Final = "flashinfer_cache_setting_warning"
PROBE_DISAGREES: Final = "flashinfer_cache_probe_disagrees"
PROBE_FAILED: Final = "flashinfer_cache_probe_failed"
PLAN: Final = "flashinfer_autotune_plan"
WITHOUT: Final = "flashinfer_autotune_without"
TUNING: Final = "flashinfer_autotune_running"
WAITING: Final = "flashinfer_autotune_waiting"
NOTHING_TO_TUNE: Final = "flashinfer_autotune_nothing_to_tune"
QUARANTINED: Final = "flashinfer_cache_quarantined"
NOT_QUARANTINED: Final = "flashinfer_cache_not_quarantined"
START_DIED: Final = "flashinfer_cache_start_died"
BROUGHT_BACK: Final = "flashinfer_cache_brought_back"
RETUNING: Final = "flashinfer_autotune_retuning"
NOT_KEPT: Final = "flashinfer_cache_not_kept"
NO_PROGRESS: Final = "flashinfer_autotune_no_progress_shown"
NOT_GIVEN_BACK: Final = "flashinfer_tactics_not_given_back"
TRACED: Final = "flashinfer_autotune_traced"
NOT_TRACED: Final = "flashinfer_autotune_not_traced"
OUTCOME: Final = "flashinfer_autotune_outcome"
PEER_FAILED: Final = "flashinfer_autotune_peer_failed"
ENDED: Final = "flashinfer_autotune_rank_ended"


def get_logger(**context: Any) -> BoundLogger:  # noqa: ANN401 - what structlog takes
    """A logger whose events carry context; independent of structlog's global configuration."""
    logger: BoundLogger = structlog.wrap_logger(
        logging.getLogger(LOGGER),
        processors=[_to_record],
        wrapper_class=BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    ).bind(**context)
    return logger


def log_decision(log: BoundLogger, decision: Decision) -> None:
    """Log a decision as one record, as loudly as it deserves."""
    getattr(log, decision.level)(DECISION, **decision.to_json())


def event_of(record: logging.LogRecord) -> dict[str, Any]:
    """The event that a record carries; for a record of someone else, its message."""
    event = getattr(record, LOGGER, None)
    return dict(event) if isinstance(event, Mapping) else {"event": record.getMessage()}


@contextmanager
def setup_cli_logging(log_format: LogFormat, stream: TextIO | None = None) -> Iterator[None]:
    """Write our events to a stream, standard error by default, until the block ends."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Lines(log_format, terminal=handler.stream.isatty()))
    logger = logging.getLogger(LOGGER)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
        handler.close()


class _Lines(logging.Formatter):
    """Renders each event as a line: JSON, or columns for a person."""

    def __init__(self, log_format: LogFormat, *, terminal: bool) -> None:
        super().__init__()
        person = log_format is LogFormat.CONSOLE or (log_format is LogFormat.AUTO and terminal)
        self._console = structlog.dev.ConsoleRenderer(colors=terminal) if person else None

    def format(self, record: logging.LogRecord) -> str:
        event = event_of(record)
        when = datetime.fromtimestamp(record.created, timezone.utc)
        event["timestamp"] = when.isoformat(timespec="milliseconds")
        event["level"] = record.levelname.lower()
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return _dumps(event) if self._console is None else self._console(None, "", event)


def _to_record(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, Any]]:
    """Hand an event to the standard logger: a line as its message, itself as an attribute."""
    # Four frames of structlog lie between the caller and the standard logger.
    passed = {"exc_info": event.pop("exc_info", None), "stacklevel": 4}
    line = " ".join(
        [str(event["event"])]
        + [f"{key}={_dumps(value)}" for key, value in event.items() if key != "event"]
    )
    return (line,), {**passed, "extra": {LOGGER: dict(event)}}


def _dumps(value: object) -> str:
    return json.dumps(value, default=str)
