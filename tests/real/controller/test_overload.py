"""An engine that refuses for being full is passed over, not punished."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.real.conftest import Saw
from tests.real.engines.vllm import MAX_QUEUED, MAX_RUNNING, Vllm
from tests.real.pair import Pair, until_in_flight
from tests.real.prompts import chat, text
from tests.support.proxy import running_proxy

pytestmark = pytest.mark.real


@contextlib.asynccontextmanager
async def full(server: Vllm) -> AsyncIterator[None]:
    """Inside the block the engine runs and queues all it will; afterwards it is idle again. Not at every moment: what
    outgrows its memory waits again, and what ends makes room for one more."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        tasks: list[asyncio.Task[httpx.Response]] = []
        try:
            while not await _refused(tasks):  # one by one: a burst gets in before it is counted
                assert len(tasks) <= MAX_RUNNING + MAX_QUEUED, "the engine takes more than it was told to"
                prompt = text(20, seed=f"full {server.name} {len(tasks)}")
                body = chat(server.model.name, prompt, max_tokens=7000, ignore_eos=True)
                post = http.post("/v1/chat/completions", json=body)
                tasks.append(asyncio.create_task(post, name=f"filler {len(tasks)}"))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until_in_flight(http, server, 0)


async def _refused(tasks: list[asyncio.Task[httpx.Response]]) -> bool:
    """Whether the newest request came back at once; a refusal takes milliseconds, an answer of 7000 tokens does not."""
    if not tasks:
        return False
    done, _ = await asyncio.wait({tasks[-1]}, timeout=0.3)
    return bool(done) and tasks[-1].result().status_code == 503


async def test_a_full_engine_is_passed_over(pair: Pair, saw: Saw) -> None:
    """vLLM's 503 `busy` leads to the other engine, which answers all that was refused; the full one is not ejected for
    it."""
    async with running_proxy(pair.urls) as proxy, full(pair.a):
        answers = [
            await proxy.client.post("/v1/chat/completions", json=chat(pair.model.name, f"question {n}"))
            for n in range(6)
        ]
        retries = proxy.metric("kvproxy_retries_total", reason="busy")
        failures = proxy.proxy.clusters["default"].endpoints[0].health.failures
    assert [answer.status_code for answer in answers] == [200] * 6
    by_b = sum(answer.headers["x-kvproxy-endpoint"] == "b" for answer in answers)
    assert by_b >= retries > 0
    assert failures == 0
    saw(f"engine a full: {by_b} of six answered by b, {retries:.0f} of them after a's 503; a is not blamed")


async def test_when_all_are_full_the_client_hears_it(pair: Pair, saw: Saw) -> None:
    """The engine's own 503 is the answer then."""
    async with running_proxy({"a": pair.a.url}) as proxy, full(pair.a):
        for number in range(20):
            answer = await proxy.client.post("/v1/chat/completions", json=chat(pair.model.name, f"anyone? {number}"))
            if answer.status_code != 200:
                break
    assert answer.status_code == 503
    assert "busy" in answer.json()["error"]["message"]
    saw(f"all full: 503 {answer.json()['error']['message'][:60]!r}")
