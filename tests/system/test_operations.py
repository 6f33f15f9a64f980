"""An operator's view of a running proxy beyond single rooms: learned speeds, lag, process, places with a bound."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.metrics import SpeedMetrics
from kvproxy.operate.commands.serving import _show_process
from kvproxy.proxy.listener.server import Server
from tests.support.asgi import Inner
from tests.support.fake_engine import Call, FakeEngine, event, reply, start_stream
from tests.support.loopback import serve
from tests.support.proxy import chat, running_proxy
from tests.support.until import until


async def stream(engine: FakeEngine, call: Call, send: Send) -> None:
    """Send a token and a usage."""
    await start_stream(send)
    usage = b'{"prompt_tokens":240,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":224}}'
    await event(send, b'{"choices":[],"usage":%s}' % usage)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def test_traffic_shows_in_every_new_metric() -> None:
    """Through a whole proxy: times, ratios, savings, learned speeds, the time of facts and the loop's lag."""
    engine = [{"id": "a", "url": "", "models": ["m"]}]
    async with serve(FakeEngine("a", stream)) as url:
        engine[0]["url"] = url
        async with running_proxy(engine, policy="kv_aware", shadow_policy="random") as proxy:
            for _ in range(3):
                body = chat("the same words over and over " * 30, stream=True)
                assert (await proxy.client.post("/v1/chat/completions", json=body)).status_code == 200
            at = {"cluster": "default", "endpoint": "a", "model": "m"}
            assert proxy.metric("kvproxy_ttft_seconds_count", **at, stream="true") == 3
            for name in ("itl", "request_duration"):
                assert proxy.metric(f"kvproxy_{name}_seconds_count", **at) == 3
            assert proxy.metric("kvproxy_cache_hit_ratio", cluster="default", by="requests") == 1.0
            assert proxy.metric("kvproxy_saved_prompt_tokens_total", model="m", tenant="") == 3 * 224
            assert proxy.metric("kvproxy_saved_prefill_seconds_total", model="m", tenant="") > 0
            assert proxy.metric("kvproxy_tier_hits_total", cluster="default", tier="device") == 2
            assert proxy.metric("kvproxy_learned_prefill_tokens_per_second", cluster="default") > 0
            assert proxy.metric("kvproxy_learned_slowness", cluster="default", endpoint="a") > 0
            assert proxy.metric("kvproxy_kvcache_facts_seconds_count") == 3
            assert proxy.metric("kvproxy_kvcache_index_bytes", index="approximate") > 0
            assert (
                proxy.metric("kvproxy_shadow_decisions_total", cluster="default", policy="random", result="same") == 3
            )
            long = chat("the same words over and over " * 300)  # a short prompt is hashed whole each time
            assert (await proxy.client.post("/v1/chat/completions", json=long)).status_code == 200
            assert proxy.metric("kvproxy_kvcache_index_bytes", index="sessions") > 0
            shown = proxy.proxy.metrics.registry.get_sample_value
            assert shown("kvproxy_kvcache_index_bytes", {"index": "prefixes"}) == 0  # nothing pins or evicts
            await until(lambda: proxy.metric("kvproxy_event_loop_lag_seconds_count") > 0)


async def test_a_policy_that_learns_nothing_shows_no_speeds() -> None:
    """Rather than those that were not measured."""
    async with serve(FakeEngine("a")) as url, running_proxy({"a": url}) as proxy:
        (family,) = proxy.proxy.metrics.group(SpeedMetrics).learned_slowness.collect()
        assert family.samples == []


async def test_the_process_and_its_connections() -> None:
    """Metrics that `kvproxy serve` adds to the catalogue."""
    metrics = Metrics()
    async with Server(Inner(), drain_s=1.0) as server:
        _show_process(metrics, server, limit=77)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        sample = metrics.registry.get_sample_value
        await until(lambda: sample("kvproxy_queue_depth", {"queue": "connections"}) == 1)
        assert sample("kvproxy_queue_limit", {"queue": "connections"}) == 77
        assert (sample("process_resident_memory_bytes") or 0) > 0
        assert (sample("process_open_fds") or 0) > 0
        writer.close()
        await writer.wait_closed()


async def test_models_have_names_in_metrics_although_no_configuration_names_them() -> None:
    """By the engines' own lists, a moment after the first request; a name that no engine lists stays `other`."""

    async def lists(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 200, b'{"object":"list","data":[{"id":"m","object":"model"}]}')

    engine = FakeEngine("a", lists)
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:

        async def counted(model: str) -> float:
            await proxy.client.post("/v1/chat/completions", json=chat("hello", **{"model": model}))
            at = {"cluster": "default", "endpoint": "a"}
            return proxy.metric("kvproxy_request_duration_seconds_count", **at, model=model)

        assert await counted("m") == 0
        await until(lambda: engine.listings)
        async with asyncio.timeout(60):
            while not await counted("m"):
                pass
        assert await counted("made-up") == 0
