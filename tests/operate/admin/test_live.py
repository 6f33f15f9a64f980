"""The live view: one answer with everything the page shows, from a history sampled once a second."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvproxy.app import Proxy
from kvproxy.base.types import EndpointId, InferenceRequest, Prompt, RequestKind
from kvproxy.operate.admin.app import build_admin_app
from kvproxy.operate.admin.live import HOT_AGAIN_S
from kvproxy.operate.runtime.history import COARSE, HOUR_KEPT, INTERVAL_S, KEPT, History, find_quantile
from kvproxy.operate.runtime.operated import ConfigFinding
from kvproxy.proxy.listener.server import serve
from kvproxy.proxy.metrics import CacheUseMetrics, RequestMetrics
from kvproxy.proxy.request.exchange import Exchange, Outcome
from tests.operate.admin.support import admin_of, proxy_of
from tests.support.clock import FakeClock
from tests.support.fake_engine import FakeEngine
from tests.support.proxy import chat, running_proxy
from tests.support.until import until


def ended(
    proxy: Proxy, clock: FakeClock, *, end: str = "completed", status: int = 200, ttft_s: float | None = 0.2
) -> None:
    """End a request to `a` like this."""
    exchange = Exchange(received_at=clock() - 1.0)
    exchange.inference = InferenceRequest(RequestKind.CHAT, "m", Prompt(b"", ()), stream=True)
    exchange.outcome = Outcome(
        endpoint=EndpointId("a"), cluster="default", policy="least_request", status=status, end=end, ttft_s=ttft_s,
        attempts=2,
    )  # fmt: skip
    proxy.recent.finished(exchange, clock())


async def live_of(proxy: Proxy, history: History) -> dict[str, Any]:
    proxy.admin = build_admin_app(proxy, history)
    async with admin_of(proxy) as client:
        answer: dict[str, Any] = (await client.get("/live")).json()
    return answer


async def test_everything_the_page_shows(clock: FakeClock) -> None:
    """State, shares of the last minute, series, routing and decisions; failures count apart from clients that left."""
    proxy = proxy_of(clock=clock)
    proxy.findings = [ConfigFinding("warning", "endpoints[0]", "sent in clear text", "use https")]
    history = History(proxy)
    clock.advance(1.0)
    for end in ("completed", "client_disconnected", "upstream_died"):
        ended(proxy, clock, end=end)
    await history.take_sample()
    live = await live_of(proxy, history)
    assert (live["ready"], live["readiness"], live["time"]) == (True, "ready", "2026-01-02T12:00:00+00:00")
    assert live["last_minute"] == {"requests": 3, "failed": 1, "saved_prefill_s": None}
    assert live["clusters"] == {"default": {"requests": 3, "failed": 1}}
    assert (live["endpoints"][0]["id"], live["endpoints"][0]["requests_last_minute"]) == ("a", 3)
    assert live["history"]["requests"] == [3]
    assert (live["history"]["failed"], live["history"]["ttft_p50_s"]) == ([1], [0.2])
    assert live["routing"]["default"]["policy"] == "kv_aware"
    assert (live["decisions"][0]["end"], live["decisions"][0]["retries"]) == ("upstream_died", 1)
    assert live["findings"][0] == {
        "severity": "warning", "where": "endpoints[0]", "what": "sent in clear text", "fix": "use https",
        "age_s": 0.0,
    }  # fmt: skip


async def test_the_last_minute_ends(clock: FakeClock) -> None:
    """Older requests do not count in the shares."""
    proxy = proxy_of(clock=clock)
    history = History(proxy)
    ended(proxy, clock)
    await history.take_sample()
    clock.advance(59.0)
    assert [sum(one.tally.values()) for one in history.last_minute(clock())] == [1]
    clock.advance(1.0)
    assert history.last_minute(clock()) == []


async def test_samples_are_differences_and_bounded(clock: FakeClock) -> None:
    """Counters only grow; a sample says by how much. A quiet second has no time to first byte."""
    proxy = proxy_of(clock=clock)
    history = History(proxy)
    for total in range(1, KEPT + 3):
        proxy.metrics.group(RequestMetrics).prompt_tokens.labels("default").inc(total)
        proxy.metrics.group(RequestMetrics).cached_tokens.labels("default").inc(1)
        clock.advance(1.0)
        await history.take_sample()
    assert len(history.samples) == KEPT
    last = history.samples[-1]
    assert (last.prompt_tokens, last.cached_tokens, last.predicted_tokens) == (KEPT + 2, 1, 0)
    assert (last.ttft_p50_s, last.tally) == (None, {})


def test_quantiles_of_few() -> None:
    """The nearest rank."""
    assert find_quantile([], 0.5) is None
    assert find_quantile([1.0], 0.95) == 1.0
    assert [find_quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 3.0, 4.0, 4.0]


async def test_the_sampler_goes_on_after_a_mistake(clock: FakeClock) -> None:
    """Once a second, whatever one sample runs into; it ends with its owner."""
    pauses: list[float] = []
    step = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await step.wait()
        step.clear()

    proxy = proxy_of(clock=clock)
    history = History(proxy, sleep=sleep)
    good = proxy.recent.ttfts_since
    async with history:
        proxy.recent.ttfts_since = None  # type: ignore[assignment]
        step.set()
        await until(lambda: len(pauses) == 2)
        proxy.recent.ttfts_since = good  # type: ignore[method-assign]
        step.set()
        await until(lambda: len(pauses) == 3)
    assert (len(history.samples), set(pauses)) == (1, {INTERVAL_S})
    await History(proxy).__aexit__(None, None, None)


async def test_viewers_share_an_answer(clock: FakeClock) -> None:
    """Within half a second nothing is put together again; after it, it is."""
    proxy = proxy_of(clock=clock)
    history = History(proxy)
    proxy.admin = build_admin_app(proxy, history)
    async with admin_of(proxy) as client:
        first = (await client.get("/live")).json()
        clock.advance(0.4)
        assert (await client.get("/live")).json() == first
        clock.advance(0.2)
        assert (await client.get("/live")).json()["uptime_s"] == 0.6000000000000227


async def test_the_cache_is_part_of_it(clock: FakeClock) -> None:
    """Hot prefixes with their holders; looked for again only after some seconds. Without the filter there is none."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware") as running:
        for _ in range(3):
            await running.client.post("/v1/chat/completions", json=chat("x" * 2000))
        running.proxy.clock = clock
        history = History(running.proxy)
        live = await live_of(running.proxy, history)
        assert live["cache"]["hot"][0]["replicas"] == {"a": live["cache"]["hot"][0]["blocks"]}
        assert live["cache"]["running"] == []
        assert live["endpoints"][0]["cache"]["state"] == "approximate"
        async with admin_of(running.proxy) as client:
            await running.client.post("/v1/chat/completions", json=chat("y" * 2000))
            clock.advance(HOT_AGAIN_S - 1)
            assert len((await client.get("/live")).json()["cache"]["hot"]) == len(live["cache"]["hot"])
            clock.advance(1.0)
            assert len((await client.get("/live")).json()["cache"]["hot"]) > len(live["cache"]["hot"])
    bare = proxy_of(clock=clock, policy="random", filters=["inference_request", "router"])
    assert (await live_of(bare, History(bare)))["cache"] is None


async def test_decisions_are_listed_newest_first() -> None:
    """Through a real request: reason, tokens predicted and reused, and no more than asked for."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware") as running:
        for _ in range(3):
            await running.client.post("/v1/chat/completions", json=chat("x" * 2000))
        async with admin_of(running.proxy) as client:
            decisions = (await client.get("/decisions", params={"limit": 2})).json()["decisions"]
    assert len(decisions) == 2
    newest = decisions[0]
    assert (newest["endpoint"], newest["model"], newest["status"], newest["end"]) == ("a", "m", 200, "completed")
    assert (newest["policy"], newest["cached_tokens"], newest["retries"]) == ("kv_aware", 4, 0)
    assert newest["matched_tokens"] > 0
    assert newest["ttft_s"] <= newest["duration_s"]
    assert "xxxx" not in str(decisions)


async def test_without_the_listener_nothing_is_recorded() -> None:
    """An app with the middleware pays for nothing."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}, admin={"enabled": False}) as running:
        await running.client.post("/v1/chat/completions", json=chat())
        assert len(running.proxy.recent) == 0


async def test_the_hour_is_kept_by_ten_seconds(clock: FakeClock) -> None:
    """Coarser, bounded, and of the same requests."""
    proxy = proxy_of(clock=clock)
    history = History(proxy)
    proxy.admin = build_admin_app(proxy, history)
    for second in range(COARSE * 3):
        ended(proxy, clock, status=500 if second < COARSE else 200, ttft_s=second / 10)
        proxy.metrics.group(RequestMetrics).prompt_tokens.labels("default").inc(7)
        clock.advance(1.0)
        await history.take_sample()
    async with admin_of(proxy) as client:
        hour = (await client.get("/live", params={"span": "1h"})).json()["history"]
        minutes = (await client.get("/live")).json()["history"]
        refused = await client.get("/live", params={"span": "1y"})
    assert (hour["ago_s"], hour["requests"], hour["failed"]) == ([20.0, 10.0, 0.0], [10] * 3, [10, 0, 0])
    assert (hour["prompt_tokens"], hour["ttft_p50_s"]) == ([70.0] * 3, [0.5, 1.5, 2.5])
    assert (len(minutes["requests"]), refused.status_code) == (30, 400)
    assert history.hour.maxlen == HOUR_KEPT


async def test_prefill_saved_is_not_invented(clock: FakeClock) -> None:
    """None until a speed was learned; then the seconds of the last minute."""
    proxy = proxy_of(clock=clock, policy="kv_aware")
    history = History(proxy)
    proxy.metrics.group(CacheUseMetrics).saved_seconds.labels("m", "").inc(4.5)
    await history.take_sample()
    assert (await live_of(proxy, history))["last_minute"]["saved_prefill_s"] is None
    speeds = proxy.clusters["default"].speeds
    assert speeds is not None
    speeds.observe(EndpointId("a"), (1.0, 1000.0, 0.0, 0.0), 0.2, clock())
    assert (await live_of(proxy, history))["last_minute"]["saved_prefill_s"] == 4.5
    clock.advance(61.0)
    assert (await live_of(proxy, history))["last_minute"]["saved_prefill_s"] == 0


async def test_one_decision_with_its_candidates() -> None:
    """Each candidate's cost and cached tokens, the cheapest first; a decision that is no longer kept is 404."""
    engines = {name: FakeEngine(name) for name in ("a", "b")}
    async with (
        serve(engines["a"]) as a,
        serve(engines["b"]) as b,
        running_proxy({"a": a, "b": b}, policy="kv_aware") as running,
    ):
        for _ in range(2):
            await running.client.post("/v1/chat/completions", json=chat("x" * 2000))
        async with admin_of(running.proxy) as client:
            newest = (await client.get("/decisions", params={"limit": 1})).json()["decisions"][0]
            one = (await client.get(f"/decisions/{newest['number']}")).json()
            gone = await client.get("/decisions/99")
            never = [await client.get(f"/decisions/{number}") for number in ("x", "-1", "9" * 5000)]
            failed = (await client.get("/decisions", params={"result": "failed"})).json()["decisions"]
            wrong = await client.get("/decisions", params={"result": "bad"})
    assert [answer.status_code for answer in never] == [404, 404, 404]
    first, second = one["candidates"]
    assert (one["number"], one["request_id"], one["result"]) == (2, newest["request_id"], "ok")
    assert {first["endpoint"], second["endpoint"]} == {"a", "b"}
    assert first["endpoint"] == one["endpoint"]
    assert first["cost"] < second["cost"]
    assert (first["source"], first["matched_tokens"] > 0, second["matched_tokens"]) == ("approximate", True, 0)
    assert (gone.status_code, failed, wrong.status_code) == (404, [], 400)


@pytest.mark.parametrize(
    ("listen", "said"), [(":8888", "http://0.0.0.0:8888"), ("[::1]:1", "http://[::1]:1"), ("127.0.0.1:0", "")]
)
async def test_where_clients_connect(clock: FakeClock, listen: str, said: str) -> None:
    """As configured until a listener said so."""
    proxy = proxy_of(clock=clock, listen=listen)
    history = History(proxy)
    assert (await live_of(proxy, history))["public_url"] == said
    proxy.public_url = "http://127.0.0.1:43215"
    assert (await live_of(proxy, history))["public_url"] == "http://127.0.0.1:43215"
