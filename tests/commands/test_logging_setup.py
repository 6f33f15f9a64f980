"""What the process log makes of records."""

from __future__ import annotations

import io
import json
import logging

from kvproxy.commands.logging_setup import logging_to
from kvproxy.config.schema import Log


def written(form: str, *records: tuple[str, str]) -> list[str]:
    """The lines of a log in this format after these (logger, message) pairs."""
    stream = io.StringIO()
    with logging_to(Log(format=form), stream=stream):  # type: ignore[arg-type]
        for name, message in records:
            logging.getLogger(name).info(message)
    return stream.getvalue().splitlines()


def test_access_lines_that_came_together_are_lines_of_their_own() -> None:
    """Those that are JSON already stay as they are, the others become an object each."""
    lines = written("json", ("kvproxy.access", '{"status":200}\nGET / 200'), ("kvproxy", "a\nb"))
    assert lines[0] == '{"status":200}'
    assert [json.loads(line)["message"] for line in lines[1:]] == ["GET / 200", "a\nb"]


def test_people_see_access_lines_as_they_are() -> None:
    """And everything else with its level."""
    lines = written("console", ("kvproxy.access", "GET / 200\nGET /a 200"), ("kvproxy", "started"))
    assert lines[:2] == ["GET / 200", "GET /a 200"]
    assert lines[2].endswith("INFO    started")
