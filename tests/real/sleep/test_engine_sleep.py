"""A real vLLM that kvproxy puts to sleep and wakes. The CPU build refuses `--enable-sleep-mode`, and without it takes
the calls, stops scheduling, drops its prefix cache and reports that it sleeps; only its memory stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from kvproxy.base.types import EndpointId
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.kvcache import ask, with_kvcache
from tests.real.pair import warm_up
from tests.real.prompts import chat, text
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until, until_says

pytestmark = pytest.mark.real
A = EndpointId("a")
KVCACHE = {"kv_events": True, "engine_metrics_interval": "250ms", "lookup_routing_timeout": "5s"}


@pytest.fixture(scope="module")
def server(saw: Saw) -> Iterator[Vllm]:
    needs_memory(gib=4)
    saw("starting a vLLM server")
    one = Vllm("sleep", TINY, core=0)
    with vllm.running([one]):
        warm_up(one)
        yield one


@contextlib.asynccontextmanager
async def sleeping(server: Vllm, **times: Any) -> AsyncIterator[RunningProxy]:
    """Yield a proxy that wakes the engine for requests."""
    filters = with_kvcache(**KVCACHE)
    cluster = {"policy": "kv_aware", "wake_within": "60s", **times}
    async with running_proxy({"a": server.url}, filters=filters, **cluster) as proxy:
        yield proxy


async def is_sleeping(server: Vllm) -> bool:
    """Return the engine's own account."""
    async with httpx.AsyncClient(timeout=30) as direct:
        found: bool = (await direct.get(f"{server.url}/is_sleeping")).json()["is_sleeping"]
        return found


def count(proxy: RunningProxy, name: str) -> float:
    """Return the calls that succeeded."""
    return proxy.metric(f"kvproxy_engine_{name}_total", cluster="default", result="done")


async def test_an_idle_engine_sleeps_and_requests_wake_it_once(server: Vllm, saw: Saw) -> None:
    """All are answered, and nothing is predicted of the cache that the engine dropped."""
    async with sleeping(server, sleep_after="8s") as proxy:
        assert proxy.proxy.kvcache is not None
        indexes = proxy.proxy.kvcache.overlap.indexes["default"]
        await until(lambda: set(indexes.exact) == {A}, within_s=30)
        question = chat(TINY.name, text(400, seed="sleeps"), max_tokens=4)
        first = await ask(proxy.client, question)
        again = await ask(proxy.client, question)
        assert again.cached_tokens > 0
        await until(lambda: count(proxy, "sleeps") == 1, within_s=120)
        assert await is_sleeping(server)
        await until(lambda: indexes.precise.count_rows(A) == 0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        answers = await asyncio.gather(
            ask(proxy.client, question),
            *(ask(proxy.client, chat(TINY.name, text(50, seed=f"meanwhile {number}"))) for number in range(4)),
        )
        saw(
            f"{again.cached_tokens} tokens reused before; five requests, {count(proxy, 'wakes'):.0f} wake call "
            f"in {loop.time() - began:.2f} s; the same prompt: predicted {answers[0].predicted}, "
            f"reused {answers[0].cached_tokens}"
        )
        assert not await is_sleeping(server)
        assert count(proxy, "wakes") == 1
        assert (answers[0].predicted, answers[0].cached_tokens) == (0, 0)
        assert answers[0].text == first.text


async def test_an_engine_that_another_hand_put_to_sleep_is_woken(server: Vllm, saw: Saw) -> None:
    """Its metrics report that it sleeps."""
    async with sleeping(server) as proxy:
        (endpoint,) = proxy.proxy.clusters["default"].endpoints
        async with httpx.AsyncClient(timeout=60) as direct:
            (await direct.post(f"{server.url}/sleep", params={"level": 1})).raise_for_status()
        await until(lambda: endpoint.asleep, within_s=30)
        asked = await ask(proxy.client, chat(TINY.name, "hello", max_tokens=4))
        saw(f"slept by its own metrics, woken for {asked.prompt_tokens} prompt tokens")
        assert count(proxy, "wakes") == 1
        await until_says(False, partial(is_sleeping, server))
        await until(lambda: not endpoint.asleep)
