"""The proxy under another ASGI server: started and ended by lifespan events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config
from tests.support.asgi import call, http_scope
from tests.support.until import until

ENDPOINTS = {"a": "http://127.0.0.1:9"}


async def live(proxy: Proxy) -> Sequence[Message]:
    """Send the events of a whole life; the answers."""
    events: list[Message] = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    answers: list[Message] = []

    async def receive() -> Message:
        return events.pop(0)

    async def send(message: Message) -> None:
        answers.append(message)

    with suppress(OSError):
        await proxy({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
    return answers


def broken(tmp_path: Path) -> Proxy:
    """Return a proxy whose receipts have no place."""
    taken = tmp_path / "file"
    taken.write_text("")
    return Proxy(load_config({"endpoints": ENDPOINTS, "receipts": {"path": str(taken / "receipts")}}))


async def test_a_start_and_an_end_are_answered() -> None:
    answers = await live(Proxy(load_config({"endpoints": ENDPOINTS})))
    assert [answer["type"] for answer in answers] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_start_that_fails_is_answered_so(tmp_path: Path) -> None:
    """An error out of the app would tell the server that there is no lifespan, and it would serve all the same."""
    [answer] = await live(broken(tmp_path))
    assert answer["type"] == "lifespan.startup.failed"
    assert answer["message"].startswith("kvproxy cannot start: ")
    assert "receipts" in answer["message"]


def test_a_start_that_fails_ends_a_test_client(tmp_path: Path) -> None:
    """With the error: one that only got the answer would wait for the end of an app that never began."""
    with pytest.raises(OSError, match="receipts"), TestClient(broken(tmp_path)):
        pass


async def test_a_start_that_fails_leaves_no_task(tmp_path: Path) -> None:
    """Parts that had started are ended."""
    before = asyncio.all_tasks()
    with pytest.raises(OSError, match="receipts"):
        await broken(tmp_path).__aenter__()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_without_lifespan_events_the_first_request_starts_it() -> None:
    """Unstarted it would probe no engine and answer every request with an error. Requests at once start it once."""
    proxy = Proxy(load_config({"endpoints": ENDPOINTS}))
    try:
        answers = await asyncio.gather(*(call(proxy, http_scope("/health")) for _ in range(3)))
        tasks = [task.get_name() for task in asyncio.all_tasks()]
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert tasks.count("event loop lag") == 1
    finally:
        await proxy.__aexit__()


async def test_a_proxy_that_has_ended_is_not_started_by_a_late_request() -> None:
    proxy = Proxy(load_config({"endpoints": ENDPOINTS}))
    await live(proxy)
    before = asyncio.all_tasks()
    await call(proxy, http_scope("/v1/models"))
    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize("raw_path", [None, b"/my%20llm/health"])
async def test_mounted_below_a_path_it_serves_its_own_paths(raw_path: bytes | None) -> None:
    scope = http_scope("/my llm/health", root_path="/my llm", raw_path=raw_path)
    async with Proxy(load_config({"endpoints": ENDPOINTS})) as proxy:
        answer = await call(proxy, scope)
    assert answer.status == 200


async def test_a_websocket_is_refused_with_a_sentence() -> None:
    """Left without an answer, servers report an app that is broken."""
    scope = http_scope("/v1/realtime", type="websocket", extensions={"websocket.http.response": {}})
    proxy = Proxy(load_config({"endpoints": ENDPOINTS}))
    start, body = (await call(proxy, scope, {"type": "websocket.connect"})).messages
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 501)
    assert b"connect to an engine" in body["body"]


async def test_a_server_that_can_send_no_sentence_refuses_a_websocket_by_itself() -> None:
    proxy = Proxy(load_config({"endpoints": ENDPOINTS}))
    [close] = (await call(proxy, http_scope("/v1/realtime", type="websocket"), {"type": "websocket.connect"})).messages
    assert (close["type"], close["code"]) == ("websocket.close", 1003)
