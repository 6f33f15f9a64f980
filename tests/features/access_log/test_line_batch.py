"""Lines for a logger, many in one record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from kvproxy.features.access_log.access_log import MAX_LINES, LineBatch


class Records(logging.Handler):
    """Keeps the messages, and says when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.came = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.came.set()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Yield a logger of its own."""
    logger = logging.getLogger("tests.lines")
    logger.setLevel(logging.INFO)
    yield logger
    logger.handlers.clear()


@pytest.fixture
def records(logger: logging.Logger) -> Records:
    """Collect the records of the logger."""
    records = Records()
    logger.addHandler(records)
    return records


async def test_lines_go_out_together_after_the_delay(logger: logging.Logger, records: Records) -> None:
    """One record for all that came meanwhile, and then the next one for what follows."""
    async with LineBatch(logger, delay_s=0.01) as lines:
        for line in ("a %s", "b"):
            lines.add_line(line)
        assert records.messages == []
        await records.came.wait()
        assert records.messages == ["a %s\nb"]
        records.came.clear()
        lines.add_line("c")
        await records.came.wait()
    assert records.messages == ["a %s\nb", "c"]


async def test_no_more_than_a_bound_wait(logger: logging.Logger, records: Records) -> None:
    """However long the delay."""
    async with LineBatch(logger, delay_s=3600) as lines:
        for number in range(MAX_LINES + 1):
            lines.add_line(str(number))
        assert [message.count("\n") + 1 for message in records.messages] == [MAX_LINES]


async def test_the_end_loses_nothing(logger: logging.Logger, records: Records) -> None:
    """Waiting lines go out when the batch is left, and a later one at once."""
    async with LineBatch(logger, delay_s=3600) as lines:
        lines.add_line("a")
    assert records.messages == ["a"]
    lines.add_line("b")
    assert records.messages == ["a", "b"]


def test_listeners_are_known(logger: logging.Logger) -> None:
    """A line that would not be seen need not be made."""
    lines = LineBatch(logger)
    assert lines.is_wanted()
    logger.setLevel(logging.WARNING)
    assert not lines.is_wanted()
