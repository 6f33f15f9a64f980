"""The process log: readable or JSON, written by a thread of its own, and never in the way of a request."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvproxy.operate.commands import logging_setup
from kvproxy.operate.commands.logging_setup import LogOutput, log_to
from kvproxy.operate.log_lines import log_fields
from kvproxy.proxy.settings import LogSettings


def logged(settings: LogSettings, *records: tuple[str, int, str]) -> list[str]:
    out = io.StringIO()
    with log_to(settings, stream=out):
        for logger, level, message in records:
            logging.getLogger(logger).log(level, message)
    return out.getvalue().splitlines()


RFC_3339 = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"


def test_console_lines_have_time_and_level_and_access_lines_are_complete() -> None:
    """A person reads it, another day and in another country too; what is a whole line already is not wrapped again."""
    lines = logged(LogSettings(), ("kvproxy", logging.WARNING, "hot"), ("kvproxy.access", logging.INFO, "GET / 200"))
    assert re.fullmatch(f"{RFC_3339} WARNING hot", lines[0])
    assert lines[1] == "GET / 200"


@pytest.mark.parametrize("form", ["console", "json"])
def test_audit_lines_look_like_the_others(form: str) -> None:
    """Fields are members of the object where the log is JSON, and words elsewhere; none can be forged."""
    out = io.StringIO()
    fields = {"action": "endpoint.drain", "endpoint": "a b\n", "was": False, "more": {"x": 1}}
    logging.getLogger("kvproxy.audit").setLevel(logging.INFO)
    with log_to(LogSettings.model_validate({"format": form}), stream=out):
        log_fields(logging.getLogger("kvproxy.audit"), "admin", fields)
    [line] = out.getvalue().splitlines()
    if form == "json":
        said = json.loads(line)
        assert re.fullmatch(RFC_3339, said.pop("time"))
        assert said == {"level": "info", "logger": "kvproxy.audit", "event": "admin", **fields}
    else:
        words = r'admin action=endpoint.drain endpoint="a b\n" was=False more={"x": 1}'
        assert re.fullmatch(f"{RFC_3339} INFO    {re.escape(words)}", line)


def test_json_lines_are_objects() -> None:
    """One each; an access line that is JSON already stays as it is, one that is text becomes a message."""
    settings = LogSettings.model_validate({"format": "json"})
    lines = logged(
        settings,
        ("kvproxy", logging.ERROR, 'a "quoted" word'),
        ("kvproxy.access", logging.INFO, '{"status": 200}'),
        ("kvproxy.access", logging.INFO, "GET / 200"),
    )
    first, second, third = map(json.loads, lines)
    assert (first["level"], first["message"]) == ("error", 'a "quoted" word')
    assert re.fullmatch(RFC_3339, first["time"])
    assert second == {"status": 200}
    assert third["message"] == "GET / 200"


def test_an_exception_is_part_of_its_record() -> None:
    """With its traceback, still on one line."""
    out = io.StringIO()
    with log_to(LogSettings.model_validate({"format": "json"}), stream=out):
        try:
            raise ZeroDivisionError("boom")
        except ZeroDivisionError:
            logging.getLogger("kvproxy").exception("failed")
    (line,) = out.getvalue().splitlines()
    assert "ZeroDivisionError: boom" in json.loads(line)["exception"]


def test_the_level_is_honoured_and_restored() -> None:
    """Nothing below it; afterwards the root logger is as before."""
    before = logging.getLogger().level
    lines = logged(LogSettings.model_validate({"level": "error"}), ("kvproxy", logging.WARNING, "no"))
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


def test_a_stuck_terminal_loses_records_and_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that logs is never held up."""
    monkeypatch.setattr(logging_setup, "END_S", 30.0)  # a busy machine writes 10,000 lines in a second only sometimes
    out = Stuck()
    with log_to(LogSettings(), stream=out):
        for _ in range(10_100):
            logging.getLogger("kvproxy").warning("x")
        out.let_go.set()
    assert re.search(r"^\d+ log records were dropped", out.getvalue(), re.MULTILINE)
    assert out.getvalue().count("WARNING x") <= 10_001


def test_a_log_reader_that_is_stuck_does_not_keep_the_process() -> None:
    """A full pipe that is not emptied: the block ends in time, and so does the interpreter after it."""
    script = """
import logging, sys
from kvproxy.operate.commands.logging_setup import log_to
from kvproxy.proxy.settings import LogSettings
with log_to(LogSettings()):
    for number in range(3000):
        logging.getLogger("kvproxy").warning("x" * 100)
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
        assert process.stderr is not None
        written = process.stderr.read()
    assert written.count(b"WARNING x") > 100


def test_a_file_gets_every_line_whole(tmp_path: Path) -> None:
    """Whatever its length, and what came before it first; characters a log cannot hold are escaped."""
    path = tmp_path / "log"
    with path.open("w") as out:
        out.write("before\n")
        with log_to(LogSettings(), stream=out):
            logging.getLogger("kvproxy.access").info("a" * 200_000)
        LogOutput(out).write("\udc80 é\n")
    assert path.read_text().splitlines() == ["before", "a" * 200_000, "\\udc80 é"]


def test_a_pipe_gets_every_line_whole() -> None:
    """Also one that is longer than the pipe takes at once, by a reader that is slow but there."""
    readable, writable = os.pipe()
    got: list[bytes] = []

    def read() -> None:
        with open(readable, "rb") as pipe:
            got.append(pipe.read())

    reader = threading.Thread(target=read)
    reader.start()
    with open(writable, "w") as out, log_to(LogSettings(), stream=out):
        logging.getLogger("kvproxy.access").info("a" * 300_000)
    reader.join(10)
    assert got == [b"a" * 300_000 + b"\n"]


def test_a_reader_that_left_hurts_nobody() -> None:
    """A broken pipe loses the log, and nothing else."""
    readable, writable = os.pipe()
    os.close(readable)
    with open(writable, "w") as out, log_to(LogSettings(), stream=out):
        logging.getLogger("kvproxy").warning("x")
