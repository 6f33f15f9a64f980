"""A real vLLM that is told to drop its cache, and one that is put to sleep."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.cache.service import KvCache
from kvproxy.cluster.endpoint import Condition
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.kvcache import ask, following
from tests.real.pair import warm_up
from tests.real.prompts import chat, text
from tests.support.until import until

pytestmark = pytest.mark.real
A = EndpointId("a")


@pytest.fixture(scope="module")
def server(saw: Saw) -> Iterator[Vllm]:
    needs_memory(gib=4)
    one = Vllm("losses", TINY, core=0)
    saw("starting a vLLM server")
    with vllm.running([one]):
        warm_up(one)
        yield one


async def tell(server: Vllm, path: str) -> None:
    """One of its developers' commands."""
    async with httpx.AsyncClient() as http:
        (await http.post(f"{server.url}{path}", timeout=30)).raise_for_status()


def loss(service: KvCache) -> LossReason | None:
    found = service.state.losses.latest_loss("default", A)
    return None if found is None else found.reason


@pytest.mark.parametrize("events", [True, False])
async def test_a_cache_that_is_cleared(server: Vllm, saw: Saw, events: bool) -> None:
    """An idle engine's event comes with its next request, so that one prediction is wrong either way."""
    async with following(server.url, events=events) as (proxy, service):
        body = chat(TINY.name, text(600, seed=f"cleared {events}"), max_tokens=4)
        first, second = await ask(proxy.client, body), await ask(proxy.client, body)
        assert first.cached_tokens < 64 < second.cached_tokens
        await tell(server, "/reset_prefix_cache")
        third = await ask(proxy.client, body)
        saw(f"events {events}: {second.cached_tokens} reused, then {third.predicted} predicted, {third.cached_tokens}")
        assert third.cached_tokens == 0
        if events:
            await until(lambda: loss(service) in (LossReason.CLEARED, LossReason.FORGOT), within_s=20)
        assert (await ask(proxy.client, body)).cached_tokens == second.cached_tokens


async def test_a_cache_that_is_cleared_without_events(server: Vllm, saw: Saw) -> None:
    """Eight chats that find nothing of what was there just now are a lost cache; of the others nothing is predicted."""
    async with following(server.url, events=False) as (proxy, service):
        bodies = [chat(TINY.name, text(300, seed=f"forgot {number}"), max_tokens=1) for number in range(12)]
        for body in bodies * 2:
            await ask(proxy.client, body)
        assert loss(service) is None
        await tell(server, "/reset_prefix_cache")
        after = [await ask(proxy.client, body) for body in bodies]
        predicted = [one.predicted for one in after]
        saw(f"predicted {predicted}, reused {[one.cached_tokens for one in after]}")
        assert loss(service) is LossReason.FORGOT
        assert all(one.cached_tokens < 2 * 32 for one in after)
        assert all(tokens > 300 for tokens in predicted[:8])
        assert all(tokens < 100 for tokens in predicted[8:])


async def test_a_pause(server: Vllm) -> None:
    """Level 0: left out while it lasts, and nothing is forgotten."""
    async with following(server.url, events=True) as (proxy, service):
        body = chat(TINY.name, text(600, seed="paused"), max_tokens=4)
        held = [await ask(proxy.client, body) for _ in range(2)][1].cached_tokens
        [endpoint] = proxy.proxy.clusters["default"].endpoints
        await tell(server, "/sleep?level=0")
        try:
            await service.scraper.scrape_all()
            assert endpoint.condition(0.0) is Condition.ASLEEP
        finally:
            await tell(server, "/wake_up")
        await service.scraper.scrape_all()
        assert endpoint.condition(0.0) is Condition.UP
        assert loss(service) is None
        after = await ask(proxy.client, body)
        assert (after.cached_tokens, after.predicted > 0) == (held, True)
