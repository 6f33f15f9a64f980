"""Decisions of one worker reach the others: over real datagrams, in one process."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from starlette.types import Send

from kvproxy.cluster.prober import ProbeOutcome
from kvproxy.features.exchange.deltas import Drained, Probed
from kvproxy.features.exchange.operated import find_service
from kvproxy.features.exchange.peers import SyncStatus
from kvproxy.features.exchange.wire import Batch, Hello, Origin
from kvproxy.proxy.listener.server import serve
from tests.cache.support import Fake
from tests.features.workers.together import begin_worker, status_of, together
from tests.support.fake_engine import Call, FakeEngine, start_stream
from tests.support.proxy import chat
from tests.support.until import until

CHAT = "/v1/chat/completions"


async def test_a_rate_limit_holds_for_all_workers_together() -> None:
    """A request let through by one counts in the other, in its headers and for its refusal."""
    filters = ["request_id", {"rate_limit": {"requests_per_minute": 4}}, "router"]
    async with serve(FakeEngine("a")) as url, together({"a": url}, filters=filters) as both:
        await both.synced()
        one, other = both.clients
        for _ in range(3):
            assert (await one.post(CHAT, json=chat())).status_code == 200
        limits = both.proxies[1].generations.current.limits["rate_limit"]
        await until(lambda: sum(missing for _, _, missing in limits.missing(both.proxies[1].clock())) > 2.5)
        assert (await other.post(CHAT, json=chat())).status_code == 200
        assert (await other.post(CHAT, json=chat())).status_code == 429


async def test_routes_of_one_worker_reach_the_other() -> None:
    """A turn's cached prefix is known through whichever worker the next one comes."""
    async with serve(FakeEngine("a")) as a, serve(FakeEngine("b")) as b:
        filters = ["request_id", "inference_request", "kvcache", "router"]
        async with together({"a": a, "b": b}, policy="kv_aware", filters=filters) as both:
            await both.synced()
            prompt = chat("a long prompt " * 500)
            first = await both.clients[0].post(CHAT, json=prompt)
            entries = [proxy.kvcache for proxy in both.proxies]
            await until(
                lambda: all(
                    one is not None and one.overlap.indexes["default"].approximate.counts.entries for one in entries
                )
            )
            again = await both.clients[1].post(CHAT, json=prompt, headers={"x-kvproxy-debug": "1"})
            assert f"matched={first.headers['x-kvproxy-endpoint']}:" in again.headers["x-kvproxy-decision"]
            live = await both.live()
            assert live["sync"]["status"] == "synced"
            assert len(live["sync"]["peers"]) == 2


async def test_a_worker_that_starts_again_is_told_everything() -> None:
    """By a sibling, before it serves: its index is as full as theirs."""
    filters = ["request_id", "inference_request", "kvcache", "router"]
    async with serve(FakeEngine("a")) as url, together({"a": url}, policy="kv_aware", filters=filters) as both:
        await both.synced()
        await both.clients[0].post(CHAT, json=chat("a long prompt " * 500))
        both.end(1)
        async with begin_worker(both.workers.supervisor, 1) as again:
            await until(lambda: status_of(again) is SyncStatus.SYNCED)
            entries = [one.kvcache.overlap.indexes["default"].approximate.counts.entries
                       for one in (both.proxies[0], again) if one.kvcache is not None]  # fmt: skip
            assert entries[0] == entries[1] > 0


async def test_workers_on_whatever_port_is_free_are_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes differ, and without a port nothing else tells one proxy of a machine from another."""
    pids = count(1)
    monkeypatch.setattr("os.getpid", lambda: next(pids))
    async with together({"a": "http://127.0.0.1:9"}, listen="127.0.0.1:0") as both:
        assert len({service.origin.host for one in both.proxies if (service := find_service(one))}) == 1


async def test_an_engines_metrics_are_read_once_for_all() -> None:
    """By whose round comes first; the others know as much."""
    engine = Fake({"/metrics": lambda _: b"vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running 3\n"})
    never = {"kvcache": {"engine_metrics_interval": "1h"}}  # by itself
    filters = ["request_id", "inference_request", never, "router"]
    async with serve(engine) as url, together({"a": url}, filters=filters) as both:
        await both.synced()
        scrapers = [proxy.kvcache.scraper for proxy in both.proxies if proxy.kvcache is not None]
        asked = engine.calls["/metrics"]
        await scrapers[0].scrape_all()
        endpoint = both.proxies[1].clusters["default"].endpoints[0]
        await until(lambda: scrapers[1].signals.latest_scrape(endpoint) is not None and scrapers[1].readings._heard)
        await scrapers[1].scrape_all()
        assert engine.calls["/metrics"] <= asked + 1  # none more if the first had just heard of the other's first round
        assert await both.metric('kvproxy_engine_requests{cluster="default",endpoint="a",state="running"}') == 3


async def test_an_engine_is_probed_by_one_worker_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it found each draws the same conclusion; it is counted once."""
    monkeypatch.setattr("kvproxy.cluster.prober.FIRST_PROBES_S", 3600.0)
    health = {"interval": "1h", "unhealthy_threshold": 3}
    async with serve(FakeEngine("a")) as url, together({"a": url}, health=health) as both:
        await both.synced()
        clusters = [proxy.clusters["default"] for proxy in both.proxies]
        for cluster in clusters:
            cluster._prober.probe_engines(())  # none comes by itself
        healths = [cluster.endpoints[0].health for cluster in clusters]
        clusters[0].verdicts.record_probe(clusters[0].engines[0], ProbeOutcome.OK)
        for failed in (1, 2):
            clusters[0].verdicts.record_probe(clusters[0].engines[0], ProbeOutcome.UNREACHABLE)
            await until(lambda failed=failed: [one.failed_probes for one in healths] == [failed, failed])
        clusters[1].verdicts.record_probe(clusters[1].engines[0], ProbeOutcome.TIMEOUT)
        await until(lambda: not any(one.is_healthy for one in healths))
        assert all(one.heard for one in healths)
        counted = 'kvproxy_health_probes_total{cluster="default",endpoint="a",outcome="unreachable"}'
        assert await both.metric(counted) == 2
        assert await both.metric('kvproxy_ejections_total{cluster="default",endpoint="a",reason="probes"}') == 1


async def test_replicas_probe_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine may reach what another one cannot."""
    monkeypatch.setattr("kvproxy.cluster.prober.FIRST_PROBES_S", 3600.0)
    async with serve(FakeEngine("a")) as url, together({"a": url}, health={"interval": "1h"}) as both:
        await both.synced()
        there, cluster = find_service(both.proxies[1]), both.proxies[1].clusters["default"]
        assert there is not None
        other = Origin("elsewhere", 0, 1)
        there.peers.receive(Hello(other), both.proxies[1].clock())
        probed = Probed("default", "a", ProbeOutcome.UNREACHABLE)
        batch = Batch(other, 1, 0.0, [probed, Drained("default", "a", True)], [])
        there.peers.receive(batch, both.proxies[1].clock())
        assert cluster.endpoints[0].draining
        assert not cluster.endpoints[0].health.heard


async def test_requests_of_one_worker_are_load_in_the_other() -> None:
    """And are counted once in the one page's metrics."""
    go_on = asyncio.Event()

    async def once_it_may(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async with serve(FakeEngine("a", once_it_may)) as url, together({"a": url}) as both:
        await both.synced()
        asking = asyncio.create_task(both.clients[0].post(CHAT, json=chat()))
        loads = [proxy.clusters["default"].endpoints[0].load for proxy in both.proxies]
        await until(lambda: [load.in_flight for load in loads] == [1, 1])
        assert await both.metric('kvproxy_in_flight_requests{cluster="default",endpoint="a"}') == 1
        live = await both.live()
        assert [one["in_flight"] for one in live["endpoints"]] == [1]
        go_on.set()
        assert (await asking).status_code == 200
        await until(lambda: [load.in_flight for load in loads] == [0, 0])
