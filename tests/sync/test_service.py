"""Whole proxies with their sockets: what one learns the other knows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvproxy.app import Proxy
from kvproxy.config.load import load_config
from kvproxy.listener.server import Server
from kvproxy.sync.datagrams import MAX_WAITING, DatagramLink, Siblings
from kvproxy.sync.deltas import Spent
from kvproxy.sync.peers import SyncStatus
from kvproxy.types import EndpointId
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve
from tests.support.proxy import chat
from tests.support.until import until

LONG = "a" * 4000


@dataclass
class Worker:
    """A running proxy, and a client of it."""

    proxy: Proxy
    client: httpx.AsyncClient

    @property
    def status(self) -> SyncStatus:
        assert self.proxy.sync is not None
        return self.proxy.sync.status

    def entries(self) -> int:
        """Blocks in its approximate index."""
        assert self.proxy.kvcache is not None
        return self.proxy.kvcache.overlap.indexes["default"].approximate.entries

    async def ask(self, text: str = LONG, **headers: str) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat(text), headers=headers)

    def spent(self) -> float:
        """Requests that are missing in its rate limit's buckets."""
        [table] = self.proxy.sync._world.limits if self.proxy.sync is not None else []
        return sum(amount for _, _, amount in table.missing(self.proxy.clock()))

    def metric(self, name: str, **labels: str) -> float:
        return self.proxy.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def worker(folder: Path, number: int, engine_url: str, **config: Any) -> AsyncIterator[Worker]:
    """One of up to three workers of a machine."""
    raw = {
        "endpoints": {"a": engine_url},
        "policy": "kv_aware",
        "health": {"active": False},
        "sync": {"heartbeat": "50ms"},
        **config,
    }
    siblings = Siblings(folder, number, 3)
    async with (
        Proxy(load_config(raw), siblings=siblings) as proxy,
        Server(proxy, drain_s=2.0) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        yield Worker(proxy, client)


async def test_what_one_worker_serves_the_other_knows(tmp_path: Path) -> None:
    """The prompt is in both indexes, and learned ratios are those of both."""
    async with (
        serve(FakeEngine("a")) as engine,
        worker(tmp_path, 0, engine) as one,
        worker(tmp_path, 1, engine) as two,
    ):
        await until(lambda: one.status is two.status is SyncStatus.SYNCED)
        assert (await one.ask()).status_code == 200
        await until(lambda: two.entries() == one.entries() > 0)
        assert two.metric("kvproxy_sync_consistency_ratio") == 1.0
        assert one.proxy.metrics.registry.get_sample_value("kvproxy_sync_store_up") is None  # nor is there a store
        assert one.proxy.kvcache is not None
        assert two.proxy.kvcache is not None
        ratio = one.proxy.kvcache.state.bytes_per_token.learned
        await until(lambda: two.proxy.kvcache is not None and two.proxy.kvcache.state.bytes_per_token.learned == ratio)


async def test_a_new_worker_knows_what_the_others_do(tmp_path: Path) -> None:
    """Index, drained endpoints and rate limits come with the snapshot; so they do for one that comes again."""
    limited = {"filters": ["inference_request", "kvcache", {"rate_limit": {"requests_per_minute": 60}}, "router"]}
    async with serve(FakeEngine("a")) as engine, worker(tmp_path, 0, engine, **limited) as one:
        for _ in range(3):
            await one.ask()
        one.proxy.clusters["default"].drain_endpoint(EndpointId("a"))
        for _ in range(2):
            async with worker(tmp_path, 1, engine, **limited) as two:
                await until(lambda: two.status is SyncStatus.SYNCED)
                assert two.entries() == one.entries() > 0
                assert two.proxy.clusters["default"].endpoints[0].draining
                refused = await two.ask()
                assert float(refused.headers["x-ratelimit-remaining-requests"]) <= 57
            await until(lambda: one.status is SyncStatus.ALONE)


async def test_limits_hold_for_all_workers_together(tmp_path: Path) -> None:
    """What one lets in the others count, and tokens that were charged at the end of a request as well."""
    chain = ["inference_request", {"rate_limit": {"requests_per_minute": 4, "burst": 1}}, "router"]
    async with (
        serve(FakeEngine("a")) as engine,
        worker(tmp_path, 0, engine, filters=chain, policy="round_robin") as one,
        worker(tmp_path, 1, engine, filters=chain, policy="round_robin") as two,
    ):
        await until(lambda: one.status is two.status is SyncStatus.SYNCED)
        statuses: list[int] = []
        for number in range(8):
            asked, other = (one, two) if number % 2 else (two, one)
            statuses.append((await asked.ask("hello")).status_code)
            await until(lambda other=other: other.spent() > statuses.count(200) - 0.5)  # type: ignore[misc]
        assert sorted(statuses) == [200] * 4 + [429] * 4


async def test_a_drain_holds_everywhere_until_it_is_taken_back(tmp_path: Path) -> None:
    """An operator tells one worker."""
    async with (
        serve(FakeEngine("a")) as engine,
        worker(tmp_path, 0, engine) as one,
        worker(tmp_path, 1, engine) as two,
    ):
        await until(lambda: one.status is two.status is SyncStatus.SYNCED)
        [endpoint] = two.proxy.clusters["default"].endpoints
        for draining in (True, False, True):
            one.proxy.clusters["default"].drain_endpoint(EndpointId("a"), draining=draining)
            await until(lambda: endpoint.draining is draining)  # noqa: B023
        two.proxy.clusters["default"].drain_endpoint(EndpointId("a"), draining=False)
        await until(lambda: not one.proxy.clusters["default"].endpoints[0].draining)


async def test_a_reload_goes_on_sharing(tmp_path: Path) -> None:
    """The states stay, and new parts are watched as the old ones were."""
    async with (
        serve(FakeEngine("a")) as engine,
        worker(tmp_path, 0, engine) as one,
        worker(tmp_path, 1, engine) as two,
    ):
        await until(lambda: one.status is two.status is SyncStatus.SYNCED)
        raw = {"endpoints": {"a": engine}, "policy": "least_ttft", "health": {"active": False},
               "sync": {"heartbeat": "50ms"}}  # fmt: skip
        for each in (one, two):
            await each.proxy.reload(load_config(raw))
        await one.ask()
        await until(lambda: two.entries() == one.entries() > 0)


async def test_what_is_no_message_is_counted_and_harms_nothing(tmp_path: Path) -> None:
    """Whatever is in a datagram."""
    async with (
        serve(FakeEngine("a")) as engine,
        worker(tmp_path, 0, engine) as one,
        worker(tmp_path, 1, engine) as two,
    ):
        await until(lambda: one.status is two.status is SyncStatus.SYNCED)
        assert two.proxy.sync is not None
        for junk in (b"", b"\x00", b"\x93\x01\x02\x03", b"x" * 1000):
            two.proxy.sync._send(junk, None)
        await until(lambda: one.metric("kvproxy_sync_messages_total", outcome="malformed") == 4)
        await one.ask()
        await until(lambda: two.entries() == one.entries() > 0)


async def test_what_cannot_be_told_holds_nothing_else_up(tmp_path: Path) -> None:
    """It is left out, and counted."""
    async with (
        serve(FakeEngine("a")) as engine,
        worker(tmp_path, 0, engine) as one,
        worker(tmp_path, 1, engine) as two,
    ):
        await until(lambda: one.status is two.status is SyncStatus.SYNCED)
        assert one.proxy.sync is not None
        one.proxy.sync.journal.add(Spent(0, "\ud800", "requests", 1.0))
        await one.ask()
        await until(lambda: two.entries() == one.entries() > 0)
        assert one.metric("kvproxy_sync_dropped_total", what="deltas") == 1
        await until(lambda: two.status is SyncStatus.SYNCED)


async def test_a_worker_that_does_not_read_holds_no_other_up(tmp_path: Path) -> None:
    """What it cannot take waits within a bound, and is dropped from then on, oldest first, and counted."""
    heard: list[bytes] = []
    async with (
        DatagramLink(Siblings(tmp_path, 0, 2), on_message=heard.append) as one,
        DatagramLink(Siblings(tmp_path, 1, 2), on_message=heard.append) as two,
    ):
        for number in range(5000):
            one.send(b"%d" % number, None)
        assert one.waiting <= MAX_WAITING
        assert one.dropped > 0
        await until(lambda: heard and heard[-1] == b"4999")
        assert one.waiting == two.dropped == 0
        assert len(heard) == 5000 - one.dropped


async def test_what_is_to_be_done_once_is_granted_to_one_worker(tmp_path: Path) -> None:
    """The owner of a claim grants it once; the one that has it may have it again, and another one another claim."""
    async with (
        serve(FakeEngine("a")) as engine,
        worker(tmp_path, 0, engine) as one,
        worker(tmp_path, 1, engine) as two,
    ):
        await until(lambda: one.status is two.status is SyncStatus.SYNCED)
        assert one.proxy.sync is not None
        assert two.proxy.sync is not None
        for number in range(10):  # some are owned by the one, some by the other
            assert await one.proxy.sync.claim(f"pin a {number}", 60.0)
            assert not await two.proxy.sync.claim(f"pin a {number}", 60.0)
            assert await one.proxy.sync.claim(f"pin a {number}", 60.0)
            assert await two.proxy.sync.claim(f"pin b {number}", 60.0)


async def test_what_was_learned_last_is_told_before_the_end(tmp_path: Path) -> None:
    """A worker that ends waits for no batch: what it served in its last moment stays known."""
    slow = {"sync": {"heartbeat": "50ms", "interval": "1s"}}
    async with serve(FakeEngine("a")) as engine, worker(tmp_path, 0, engine) as one:
        async with worker(tmp_path, 1, engine, **slow) as two:
            await until(lambda: one.status is two.status is SyncStatus.SYNCED)
            assert (await two.ask()).status_code == 200
        await until(lambda: one.status is SyncStatus.ALONE)
        assert one.entries() == two.entries() > 0
