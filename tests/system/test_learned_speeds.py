"""A slow engine is seen through answers that are not streamed, over sockets, by the engines' own counters."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_server import VllmApp
from tests.cache.support import long_text
from tests.lab.simulator.support import TINY
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy

SLOWNESS = {"a": 2.5, "b": 2.5, "c": 1.0, "d": 1.0}
ROUNDS, AT_ONCE = 8, 8


@contextlib.asynccontextmanager
async def mixed_fleet() -> AsyncIterator[RunningProxy]:
    """Half the engines at 0.4x; their metrics are read when the test asks."""
    timing = EngineTiming(prefill_tokens_per_s=10_000.0, decode_step_s=0.001)  # long beside what a busy machine adds
    filters = ["inference_request", {"kvcache": {"engine_metrics_interval": "1h"}}, "router"]
    async with contextlib.AsyncExitStack() as stack:
        urls = {}
        for name, slowness in SLOWNESS.items():
            engine = EngineSettings(4096, 16, timing=replace(timing, slowness=slowness), token_outputs=True)
            app = await stack.enter_async_context(VllmApp(replace(TINY, engine=engine)))
            urls[name] = await stack.enter_async_context(serve(app))
        yield await stack.enter_async_context(running_proxy(urls, policy="kv_aware", filters=filters))


async def ask(proxy: RunningProxy, number: int) -> str:
    """One answer in one piece, to a prompt of its own; which engine gave it."""
    message = {"role": "user", "content": f"{number} {long_text('w', 500)}"}
    body = {"model": "tiny", "messages": [message], "max_tokens": 8}
    answer = await proxy.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    return answer.headers["x-kvproxy-endpoint"]


@pytest.mark.slow
async def test_a_slow_half_gets_less_of_unary_traffic() -> None:
    """Nothing is streamed and nothing is configured: four engines alike at first, two of them slow in the end."""
    async with mixed_fleet() as proxy:
        kvcache, policy = proxy.proxy.kvcache, proxy.proxy.clusters["default"].policies.own.policy
        assert kvcache is not None
        assert policy.speeds is not None
        took: Counter[str] = Counter()
        await kvcache.scraper.scrape_all()
        for number in range(ROUNDS):
            answers = [ask(proxy, number * AT_ONCE + each) for each in range(AT_ONCE)]
            served = await asyncio.gather(*answers)
            await kvcache.scraper.scrape_all()
            if number >= ROUNDS // 2:
                took.update(served)
        learned = policy.speeds.estimates(proxy.proxy.clock())
    assert learned.samples_by_kind["streamed"] == 0
    assert learned.samples_by_kind["scraped"] >= ROUNDS * AT_ONCE // 2
    slow, fast = (sum(learned.slowness[EndpointId(name)] for name in pair) for pair in ("ab", "cd"))
    assert 1.5 < slow / fast < 3.5
    assert took["a"] + took["b"] < 0.4 * took.total()
