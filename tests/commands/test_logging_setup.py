"""The process log: readable or JSON, written by a thread of its own, and never in anybody's way."""

from __future__ import annotations

import io
import json
import logging
import re
import threading

from kvproxy.commands.logging_setup import logging_to
from kvproxy.config.schema import Log


def logged(settings: Log, *records: tuple[str, int, str]) -> list[str]:
    out = io.StringIO()
    with logging_to(settings, stream=out):
        for logger, level, message in records:
            logging.getLogger(logger).log(level, message)
    return out.getvalue().splitlines()


def test_console_lines_have_time_and_level_and_access_lines_are_complete() -> None:
    """A person reads it; what is a whole line already is not wrapped again."""
    lines = logged(Log(), ("kvproxy", logging.WARNING, "hot"), ("kvproxy.access", logging.INFO, "GET / 200"))
    assert lines[0].endswith("WARNING hot")
    assert lines[1] == "GET / 200"


def test_json_lines_are_objects() -> None:
    """One each; an access line that is JSON already stays as it is, one that is text becomes a message."""
    settings = Log.model_validate({"format": "json"})
    lines = logged(
        settings,
        ("kvproxy", logging.ERROR, 'a "quoted" word'),
        ("kvproxy.access", logging.INFO, '{"status": 200}'),
        ("kvproxy.access", logging.INFO, "GET / 200"),
    )
    first, second, third = map(json.loads, lines)
    assert (first["level"], first["message"]) == ("error", 'a "quoted" word')
    assert second == {"status": 200}
    assert third["message"] == "GET / 200"


def test_an_exception_is_part_of_its_record() -> None:
    """With its traceback, still on one line."""
    out = io.StringIO()
    with logging_to(Log.model_validate({"format": "json"}), stream=out):
        try:
            raise ZeroDivisionError("boom")
        except ZeroDivisionError:
            logging.getLogger("kvproxy").exception("failed")
    (line,) = out.getvalue().splitlines()
    assert "ZeroDivisionError: boom" in json.loads(line)["exception"]


def test_the_level_is_honoured_and_restored() -> None:
    """Nothing below it; afterwards the root logger is as before."""
    before = logging.getLogger().level
    lines = logged(Log.model_validate({"level": "error"}), ("kvproxy", logging.WARNING, "no"))
    assert lines == []
    assert logging.getLogger().level == before


class Stuck(io.StringIO):
    """A terminal that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.let_go.wait(10)
        return super().write(text)


def test_a_stuck_terminal_loses_records_and_says_how_many() -> None:
    """Whoever logs is never held up."""
    out = Stuck()
    with logging_to(Log(), stream=out):
        for _ in range(10_100):
            logging.getLogger("kvproxy").warning("x")
        out.let_go.set()
    assert re.search(r"^\d+ log records were dropped", out.getvalue(), re.MULTILINE)
    assert out.getvalue().count("WARNING x") <= 10_001
