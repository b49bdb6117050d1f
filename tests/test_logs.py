from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import structlog

from fi_flags.decision import decide
from fi_flags.facts import Facts
from fi_flags.gates import load_gates
from fi_flags.logs import DECISION, event_of, get_logger, log_decision, setup_cli_logging
from fi_flags.settings import LogFormat, settings_or_off

OLD = Facts(flashinfer="0.6.12", torch=None, python="3.11", host="here")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("flag", "level"), [("off", "INFO"), ("on", "WARNING"), ("auto", "INFO"), ("maybe", "ERROR")]
)
def test_decision_is_one_record_with_reason_mode_source_and_links(
    flag: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"VLLM_FLASHINFER_PERSISTENT_CACHE": flag}
    decision = decide(settings_or_off(environ=environ, dotenv=None), OLD, load_gates())
    with caplog.at_level(logging.INFO, logger="fi_flags"):
        log_decision(get_logger(rank=3), decision)
    (record,) = caplog.records
    assert record.name == "fi_flags"
    assert record.levelname == level
    assert event_of(record) == {"event": DECISION, "rank": 3, **decision.to_json()}
    message = record.getMessage()
    assert message.startswith(DECISION)
    assert f'reason="{decision.reason.value}"' in message
    assert all(link in message for link in decision.todo)


def test_record_points_at_the_line_that_logged(caplog: pytest.LogCaptureFixture) -> None:
    get_logger().warning("something")
    assert caplog.records[0].filename == Path(__file__).name
    assert caplog.records[0].funcName == "test_record_points_at_the_line_that_logged"


def test_servers_own_levels_apply(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fi_flags"):
        get_logger().info("quiet")
    assert caplog.records == []


def test_nobodys_configuration_changes() -> None:
    root = logging.getLogger()
    before = (structlog.get_config()["processors"][:], structlog.is_configured())
    handlers = root.handlers[:]
    ours = logging.getLogger("fi_flags")
    with setup_cli_logging(LogFormat.JSON, io.StringIO()):
        get_logger().info("something")
        assert root.handlers == handlers
    assert (structlog.get_config()["processors"], structlog.is_configured()) == before
    assert root.handlers == handlers
    assert (ours.handlers, ours.level, ours.propagate) == ([], logging.NOTSET, True)


def test_structlog_of_the_host_does_not_govern_us(caplog: pytest.LogCaptureFixture) -> None:
    def swallow(*_args: object) -> Any:
        raise structlog.DropEvent

    structlog.configure(processors=[swallow], cache_logger_on_first_use=True)
    try:
        get_logger().warning("something")
    finally:
        structlog.reset_defaults()
    assert [event_of(record)["event"] for record in caplog.records] == ["something"]


@pytest.mark.parametrize(
    ("chosen", "terminal", "is_json"),
    [
        (LogFormat.AUTO, False, True),
        (LogFormat.AUTO, True, False),
        (LogFormat.JSON, True, True),
        (LogFormat.CONSOLE, False, False),
    ],
)
def test_command_line_writes_json_or_columns(
    chosen: LogFormat,
    terminal: bool,
    is_json: bool,
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    with setup_cli_logging(chosen, stream):
        get_logger().bind(path=Path("/x")).info("something", count=2)
    (line,) = stream.getvalue().splitlines()
    if is_json:
        event = json.loads(line)
        assert event.pop("timestamp").endswith("+00:00")
        assert event == {"event": "something", "path": "/x", "count": 2, "level": "info"}
    else:
        assert "something" in line
        assert ("\x1b[" in line) is terminal


def test_exception_is_part_of_its_event(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with setup_cli_logging(LogFormat.JSON, stream):
        try:
            int("why")
        except ValueError:
            get_logger().exception("something")
    assert "ValueError: invalid literal" in json.loads(stream.getvalue())["exception"]
    assert caplog.records == []


def test_foreign_record_on_our_logger_is_rendered_too() -> None:
    stream = io.StringIO()
    with setup_cli_logging(LogFormat.JSON, stream):
        logging.getLogger("fi_flags.other").warning("%d%%", 5)
    assert json.loads(stream.getvalue())["event"] == "5%"


def test_errors_go_to_standard_error_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with setup_cli_logging(LogFormat.JSON):
        get_logger().info("something")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "something"


def test_percent_signs_in_values_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    get_logger().warning("100%", share="%s")
    assert caplog.records[0].getMessage() == '100% share="%s"'
