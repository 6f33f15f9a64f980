"""Test harnesses around one app with the middleware: however they run it, the second turn is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from kvproxy import KVCacheMiddleware
from tests.cache.support import long_text
from tests.hosts.test_frameworks import ENGINES, starlette

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]
CHAT = "/v1/chat/completions"
TURN = {"model": "m", "messages": [{"role": "user", "content": long_text("w")}]}
#: Yields what was preferred for each of two equal requests, or more.
Harness = Callable[[Any], Iterator[str | None]]


def _read(answer: Any) -> str | None:
    assert answer.status_code == 200, answer.text
    preferred: str | None = answer.json()["preferred"]
    return preferred


def client_without_lifespan(app: Any) -> Iterator[str | None]:
    """Run each request in an event loop of its own."""
    for _ in range(3):
        yield _read(TestClient(app).post(CHAT, json=TURN))


def client_with_lifespan(app: Any) -> Iterator[str | None]:
    """Run one life of the app."""
    with TestClient(app) as client:
        for _ in range(2):
            yield _read(client.post(CHAT, json=TURN))


def lives_in_turn(app: Any) -> Iterator[str | None]:
    """Run a life for each test of a module."""
    for _ in range(3):
        with TestClient(app) as client:
            yield _read(client.post(CHAT, json=TURN))


def both_mixed(app: Any) -> Iterator[str | None]:
    """Run requests before, within and after a life."""
    yield _read(TestClient(app).post(CHAT, json=TURN))
    with TestClient(app) as client:
        yield _read(client.post(CHAT, json=TURN))
    yield _read(TestClient(app).post(CHAT, json=TURN))


async def _ask(app: Any, count: int = 1) -> list[str | None]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        return [_read(await client.post(CHAT, json=TURN)) for _ in range(count)]


def asgi_transport(app: Any) -> Iterator[str | None]:
    """Run without lifespan events in one loop."""
    yield from asyncio.run(_ask(app, 2))


def asyncio_run_thrice(app: Any) -> Iterator[str | None]:
    """Run three loops, as pytest-asyncio does by default."""
    for _ in range(3):
        yield from asyncio.run(_ask(app))


def asgi_lifespan(app: Any) -> Iterator[str | None]:
    """Run by asgi-lifespan, whose state is shared by all requests."""
    module = pytest.importorskip("asgi_lifespan")

    async def live() -> list[str | None]:
        async with module.LifespanManager(app) as manager:
            return await _ask(manager.app, 2)

    yield from asyncio.run(live())


HARNESSES: tuple[Harness, ...] = (
    client_without_lifespan,
    client_with_lifespan,
    lives_in_turn,
    both_mixed,
    asgi_transport,
    asyncio_run_thrice,
    asgi_lifespan,
)


def make_app() -> Any:
    """Return a Starlette app with the middleware added as its docs say."""
    app = starlette(CHAT)
    app.add_middleware(KVCacheMiddleware, endpoints=ENGINES)
    return app


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.__name__)
def test_the_second_turn_is_known(harness: Harness) -> None:
    first, *later = harness(make_app())
    assert first is None
    assert set(later) == {"b"}


def test_a_fresh_app_for_each_test_knows_nothing_of_others() -> None:
    for _ in range(2):
        with TestClient(make_app()) as client:
            assert _read(client.post(CHAT, json=TURN)) is None


@pytest.mark.parametrize("lifespan", [True, False])
def test_under_trio_requests_pass(lifespan: bool) -> None:
    pytest.importorskip("trio")
    client = TestClient(make_app(), backend="trio")
    if not lifespan:
        assert _read(client.post(CHAT, json=TURN)) is None
        return
    with client:
        assert _read(client.post(CHAT, json=TURN)) is None
