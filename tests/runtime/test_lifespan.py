"""The proxy under another ASGI server: started and ended by lifespan events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from starlette.types import Message

from kvproxy.app import Proxy, build
from kvproxy.operate.config.load import load_config

ENDPOINTS = {"a": "http://127.0.0.1:9"}


async def live(proxy: Proxy) -> Sequence[Message]:
    """Send the events of a whole life; the answers."""
    events: list[Message] = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    answers: list[Message] = []

    async def receive() -> Message:
        return events.pop(0)

    async def send(message: Message) -> None:
        answers.append(message)

    await proxy({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
    return answers


def broken(tmp_path: Path) -> Proxy:
    """A proxy whose receipts have no place."""
    taken = tmp_path / "file"
    taken.write_text("")
    return build(load_config({"endpoints": ENDPOINTS, "receipts": {"path": str(taken / "receipts")}}))


async def test_a_start_and_an_end_are_answered() -> None:
    answers = await live(build(load_config({"endpoints": ENDPOINTS})))
    assert [answer["type"] for answer in answers] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_start_that_fails_is_answered_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error out of the app would tell the server that there is no lifespan, and it would serve all the same."""
    [answer] = await live(broken(tmp_path))
    assert answer["type"] == "lifespan.startup.failed"
    assert answer["message"].startswith("kvproxy cannot start: ")
    assert "receipts" in answer["message"]
    assert "kvproxy cannot start" in caplog.text


async def test_a_start_that_fails_leaves_no_task(tmp_path: Path) -> None:
    """What had started is ended."""
    before = asyncio.all_tasks()
    with pytest.raises(OSError, match="receipts"):
        await broken(tmp_path).__aenter__()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
