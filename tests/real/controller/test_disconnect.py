"""A client that leaves frees the engine."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx
import pytest

from kvproxy.cache.clients.vllm import VllmClient
from tests.real.conftest import Saw
from tests.real.pair import Pair, engine_client, until_in_flight
from tests.real.prompts import chat, text
from tests.support.proxy import running_proxy
from tests.support.until import until_says

pytestmark = pytest.mark.real

#: The model rambles on: without the client's leave this takes the engine half a minute.
ENDLESS = {"max_tokens": 6000, "ignore_eos": True}


async def running(engine: VllmClient) -> int | None:
    """Return requests, by its own gauge."""
    return (await engine.fetch_metrics()).running


async def test_leaving_a_stream_frees_the_engine(pair: Pair, saw: Saw) -> None:
    """The client closes after the first events; the engine stops computing for it at once."""
    body = chat(pair.model.name, text(50, seed="leaves"), stream=True, **ENDLESS)
    async with running_proxy({"a": pair.a.url}) as proxy, engine_client(pair.a) as engine, httpx.AsyncClient() as http:
        async with proxy.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(10):
                await anext(lines)
            await until_says(1, partial(running, engine))  # the gauge is written a moment after the first tokens
        freed_s = await until_in_flight(http, pair.a, 0)
        await until_says(0, partial(running, engine))  # so is it a moment after the last
        end = proxy.metric("kvproxy_request_ends_total", end="client_disconnected")
        failures = proxy.proxy.clusters["default"].endpoints[0].health.failures
    assert (end, failures) == (1, 0)
    assert freed_s < 5
    saw(f"a stream left: the engine's running requests 1 -> 0, known {freed_s * 1000:.0f} ms later; nobody blamed")


async def test_leaving_before_the_answer_frees_the_engine(pair: Pair, saw: Saw) -> None:
    """So does a client that waits for a whole answer and gives up."""
    body = chat(pair.model.name, text(50, seed="gives up"), **ENDLESS)
    async with running_proxy({"a": pair.a.url}) as proxy, engine_client(pair.a) as engine, httpx.AsyncClient() as http:
        asking = asyncio.create_task(proxy.client.post("/v1/chat/completions", json=body), name="impatient client")
        await until_in_flight(http, pair.a, 1)
        asking.cancel()
        freed_s = await until_in_flight(http, pair.a, 0)
        idle = await engine.fetch_metrics()
        in_flight = proxy.metric("kvproxy_in_flight", cluster="default", endpoint="a")
    assert (idle.running, in_flight) == (0, 0)
    assert freed_s < 5
    saw(f"a whole answer given up: the engine is free {freed_s * 1000:.0f} ms later")
