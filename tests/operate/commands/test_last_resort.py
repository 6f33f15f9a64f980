"""The end of the process is bounded, whatever hangs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading

import pytest

from kvproxy.operate.commands.last_resort import LastResort


def armed(exits: queue.SimpleQueue[int]) -> LastResort:
    return LastResort(exit_process=exits.put)


async def test_the_deadline_ends_the_process_and_names_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    """With the status of the earliest deadline."""
    exits: queue.SimpleQueue[int] = queue.SimpleQueue()
    hanging = asyncio.create_task(asyncio.Event().wait(), name="deaf library")
    with caplog.at_level(logging.ERROR, logger="kvproxy"), armed(exits) as last_resort:
        last_resort.watch_loop()
        last_resort.end_within(1000.0, 5)
        last_resort.end_within(0.0, 7)
        last_resort.end_within(1000.0, 5)
        assert await asyncio.to_thread(exits.get, timeout=60) == 7
    assert "still run: task 'deaf library'" in caplog.text
    hanging.cancel()


def test_an_end_in_time_calls_it_off() -> None:
    """Its thread is gone, and nothing exits."""
    exits: queue.SimpleQueue[int] = queue.SimpleQueue()
    with armed(exits) as last_resort:
        last_resort.end_within(1000.0)
        last_resort.end_threads(0)
        (thread,) = [one for one in threading.enumerate() if one.name == "last resort"]
    thread.join(60)
    assert not thread.is_alive()
    assert exits.empty()
