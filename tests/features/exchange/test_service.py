"""Whole proxies with their sockets: what one learns the other knows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import SecretStr

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.types import EndpointId
from kvproxy.cache.overlap.last_served import RequestNames
from kvproxy.features.exchange import datagrams, snapshot, stores
from kvproxy.features.exchange.datagrams import DatagramLink
from kvproxy.features.exchange.deltas import Spent
from kvproxy.features.exchange.peers import SyncStatus
from kvproxy.features.exchange.stores import StoreLink
from kvproxy.features.exchange.wire import Heartbeat, Hello, Origin, decode_deltas, encode
from kvproxy.operate.admin.troubles import Troubles
from kvproxy.operate.companion import Siblings
from kvproxy.operate.config.load import load_config
from tests.features.exchange.support import Deciding, deciding, until_synced
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve
from tests.support.until import until

BEAT = {"sync": {"heartbeat": "50ms"}}


def worker(folder: Path, number: int, engine_url: str, **config: Any) -> AbstractAsyncContextManager[Deciding]:
    """One of up to three workers of a machine."""
    return deciding(engine_url, siblings=Siblings(folder, number, 3), **BEAT, **config)


@contextlib.asynccontextmanager
async def two_workers(folder: Path, **config: Any) -> AsyncIterator[tuple[Deciding, Deciding]]:
    """Of one machine, which know of each other, in front of one engine."""
    async with (
        serve(FakeEngine("a")) as engine,
        worker(folder, 0, engine, **config) as one,
        worker(folder, 1, engine, **config) as two,
    ):
        await until_synced(one, two)
        yield one, two


async def test_sessions_served_by_one_worker_are_known_to_the_other(tmp_path: Path) -> None:
    """The prompt is in both indexes."""
    async with two_workers(tmp_path) as (one, two):
        assert (await one.ask()).status_code == 200
        await until(lambda: two.entries() == one.entries() > 0)
        assert two.metric("kvproxy_sync_consistency_ratio") == 1.0
        assert one.proxy.metrics.registry.get_sample_value("kvproxy_sync_store_up") is None  # nor is there a store


async def test_facts_learned_by_one_worker_reach_the_other(tmp_path: Path) -> None:
    """Of a prompt's tokens, of what is asked for, of speeds, and of where a session is."""
    async with two_workers(tmp_path) as (one, two):
        here, there = one.proxy.kvcache, two.proxy.kvcache
        assert here is not None
        assert there is not None
        assert here.state.on_counted is not None
        here.state.on_counted("m", (5,), 3000, 1000)
        here.actions.hotness.count_use((5, 6), model="m", cache_salt="", instance="a", now=0.0)
        here.overlap.indexes["default"].last_served.note_served(
            RequestNames(session=3), response_id="", endpoint=EndpointId("a"), prompt_tokens=100, answer_tokens=10,
            now=one.proxy.clock(),
        )  # fmt: skip
        load = one.proxy.clusters["default"].endpoints[0].load
        assert load.watch is not None
        load.watch.sampled((1.0, 9000.0, 0.0, 0.0), 3.0, scraped=False)
        await until(lambda: there.state.bytes_per_token.look_up("m") == 3.0)
        await until(lambda: there.actions.hotness.find_prefix(6) is not None)
        await until(lambda: there.overlap.indexes["default"].last_served.sessions == 1)
        speeds = two.proxy.clusters["default"].speeds
        assert speeds is not None
        await until(lambda: not speeds.learning)


async def test_a_new_worker_knows_what_the_others_do(tmp_path: Path) -> None:
    """Index, drained endpoints and rate limits come with the snapshot; so they do for one that comes again."""
    limited = {
        "filters": ["inference_request", "kvcache", {"rate_limit": {"requests_per_minute": 6, "burst": 10}}, "router"]
    }
    async with serve(FakeEngine("a")) as engine, worker(tmp_path, 0, engine, **limited) as one:
        for _ in range(30):
            await one.ask()
        one.proxy.clusters["default"].operator.drain_endpoint(EndpointId("a"))
        for _ in range(2):
            async with worker(tmp_path, 1, engine, **limited) as two:
                await until(lambda: two.status is SyncStatus.SYNCED)
                assert two.entries() == one.entries() > 0
                assert two.proxy.clusters["default"].endpoints[0].draining
                refused = await two.ask()
                assert 20 <= float(refused.headers["x-ratelimit-remaining-requests"]) < 40  # charged, and only once
            await until(lambda: one.status is SyncStatus.ALONE)


async def test_limits_hold_for_all_workers_together(tmp_path: Path) -> None:
    """Each counts the requests that the others let in, and tokens charged at the end of a request as well."""
    chain = ["inference_request", {"rate_limit": {"requests_per_minute": 4, "burst": 1}}, "router"]
    async with two_workers(tmp_path, filters=chain, policy="round_robin") as (one, two):
        statuses: list[int] = []
        for number in range(8):
            asked, other = (one, two) if number % 2 else (two, one)
            statuses.append((await asked.ask("hello")).status_code)
            await until(lambda other=other: other.spent() > statuses.count(200) - 0.5)  # type: ignore[misc]
        assert sorted(statuses) == [200] * 4 + [429] * 4


async def test_a_drain_holds_everywhere_until_it_is_taken_back(tmp_path: Path) -> None:
    """An operator tells one worker."""
    async with two_workers(tmp_path) as (one, two):
        [endpoint] = two.proxy.clusters["default"].endpoints
        for draining in (True, False, True):
            one.proxy.clusters["default"].operator.drain_endpoint(EndpointId("a"), draining=draining)
            await until(lambda: endpoint.draining is draining)  # noqa: B023
        two.proxy.clusters["default"].operator.drain_endpoint(EndpointId("a"), draining=False)
        await until(lambda: not one.proxy.clusters["default"].endpoints[0].draining)


async def test_a_reload_goes_on_sharing(tmp_path: Path) -> None:
    """The states stay, and new parts are watched as the old ones were."""
    async with two_workers(tmp_path) as (one, two):
        for each in (one, two):
            raw = {"endpoints": {"a": str(each.proxy.clusters["default"].endpoints[0].origin)}, **BEAT}
            await each.proxy.reload(load_config({**raw, "policy": "least_ttft", "health": {"active": False}}))
        await one.ask()
        await until(lambda: two.entries() == one.entries() > 0)


async def test_invalid_messages_are_counted_and_harm_nothing(tmp_path: Path) -> None:
    """Whatever is in a datagram."""
    async with two_workers(tmp_path) as (one, two):
        for junk in (b"", b"\x00", b"\x93\x01\x02\x03", b"x" * 1000):
            two.sync._send(junk, None)
        await until(lambda: one.metric("kvproxy_sync_messages_total", outcome="malformed") == 4)
        await one.ask()
        await until(lambda: two.entries() == one.entries() > 0)


async def test_an_unencodable_delta_holds_nothing_else_up(tmp_path: Path) -> None:
    """It is left out, and counted."""
    async with two_workers(tmp_path) as (one, two):
        one.sync.journal.add(Spent("rate_limit", "\ud800", "requests", 1.0))
        await one.ask()
        await until(lambda: two.entries() == one.entries() > 0)
        assert one.metric("kvproxy_sync_dropped_total", what="deltas") == 1
        await until(lambda: two.status is SyncStatus.SYNCED)


async def test_a_worker_that_does_not_read_holds_no_other_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that it cannot take wait within a bound; beyond it the oldest are dropped and counted."""
    monkeypatch.setattr(datagrams, "MAX_WAITING_BYTES", 20_000)
    heard: list[bytes] = []
    async with (
        DatagramLink(Siblings(tmp_path, 0, 2), on_message=heard.append) as one,
        DatagramLink(Siblings(tmp_path, 1, 2), on_message=heard.append) as two,
    ):
        for number in range(5000):
            one.send(b"%d" % number, None)
        assert 0 < one.held_bytes <= 20_000
        assert one.dropped > 0
        await until(lambda: heard and heard[-1] == b"4999")
        assert one.held_bytes == two.dropped == 0
        assert len(heard) == 5000 - one.dropped


async def test_claimed_work_is_granted_to_one_worker(tmp_path: Path) -> None:
    """The owner of a claim grants it once; the one that has it may have it again, and another one another claim."""
    async with two_workers(tmp_path) as (one, two):
        for number in range(10):  # some are owned by the one, some by the other
            assert await one.sync.locks.claim(f"pin a {number}", 60.0)
            assert not await two.sync.locks.claim(f"pin a {number}", 60.0)
            assert await one.sync.locks.claim(f"pin a {number}", 60.0)
            assert await two.sync.locks.claim(f"pin b {number}", 60.0)


async def test_the_last_samples_are_sent_before_the_end(tmp_path: Path) -> None:
    """A worker that ends waits for no batch: what it served in its last moment stays known."""
    slow = {"sync": {"heartbeat": "50ms", "interval": "1s"}}
    async with serve(FakeEngine("a")) as engine, worker(tmp_path, 0, engine) as one:
        async with deciding(engine, siblings=Siblings(tmp_path, 1, 3), **slow) as two:
            await until_synced(one, two)
            assert (await two.ask()).status_code == 200
        await until(lambda: one.status is SyncStatus.ALONE)
        assert one.entries() == two.entries() > 0


async def test_another_process_of_the_same_name_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once in the log, and in status as long as it lives: neither one's own words nor a last word make one."""
    async with serve(FakeEngine("a")) as engine, worker(tmp_path, 0, engine) as one:
        sync = one.sync
        own, other = sync.origin, Origin(sync.origin.host, sync.origin.worker, sync.origin.epoch - 1)
        for _ in range(10):
            sync._heard(encode(_beat_of(own)), store=True)
            sync._heard(encode(Hello(other)), store=True)
        assert sync.describe_state()["namesake"] is False
        for _ in range(5):
            sync._heard(encode(_beat_of(other)), store=True)
        assert sync.describe_state()["namesake"] is True
        findings = await Troubles(one.proxy).update_findings(0.0, {}, {}, {})
        [finding] = [found for found, _ in findings if found.where == "sync"]
        assert "has the name" in finding.what
        assert caplog.text.count("has the name") == 1
        await until(lambda: sync.describe_state()["namesake"] is False)  # it fell silent


def _beat_of(origin: Origin) -> Heartbeat:
    return Heartbeat(origin, 0, 1.0, 0, joining=False, blocks=0, echoes=[])


class Echo(StoreLink):
    """A store in memory, which can fall dumb."""

    name = "echo"

    def __init__(self, **hears: Any) -> None:
        super().__init__(
            SecretStr("echo://:secret@here:1"), "t", Origin("h", 0, 1), beat_s=0.001, rng=Random(0), **hears
        )
        self.reached = 0
        self.dumb = False

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[asyncio.Queue[bytes]]:
        self.reached += 1
        yield asyncio.Queue()

    async def _receive(self, connection: asyncio.Queue[bytes]) -> None:
        self._said = connection
        while True:
            self._on_message(await connection.get())

    async def _publish(self, connection: asyncio.Queue[bytes], messages: list[tuple[str, bytes]]) -> None:
        for _, payload in messages if not self.dumb else ():
            connection.put_nowait(payload)


async def test_a_connection_from_which_nothing_comes_back_is_made_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Although all that is sent is taken: what is said to all comes back to the one that says it."""
    monkeypatch.setattr(stores, "LOOK_S", 0.001)
    monkeypatch.setattr(stores, "TIMEOUT_S", 0.01)
    heard: list[bytes] = []
    changes: list[bool] = []
    async with Echo(on_message=heard.append, on_change=changes.append) as link:
        await until(lambda: link.connected)
        link.send(b"hello", None)
        await until(lambda: b"hello" in heard)
        link.dumb = True

        def say() -> bool:
            link.send(b"hello?", None)
            return link.reached > 2

        await until(say)
        assert changes == [True, False]
        link.dumb = False
        await until(lambda: changes == [True, False, True])
    assert "here:1 is away (ConnectionError)" in caplog.text
    assert "secret" not in caplog.text


async def test_messages_waiting_for_a_store_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, the oldest first, and counted; where there is no store all is."""
    monkeypatch.setattr(stores, "MAX_WAITING_BYTES", 10_000)
    heard: list[bytes] = []
    async with Echo(on_message=heard.append, on_change=lambda reached: None) as link:
        link.send(b"nobody there", None)
        assert (link.held_bytes, link.dropped) == (0, 1)
        await until(lambda: link.connected)
        for number in range(100):
            link.send(b"%d" % number * 200, None)
        assert 0 < link.held_bytes <= 10_000
        assert link.dropped > 50
        await until(lambda: b"99" * 200 in heard)
        assert len(heard) == 101 - link.dropped


class Memory(Echo):
    """A store that keeps what it is given."""

    def __init__(self, kept: bytes = b"", age_s: float = 0.0) -> None:
        super().__init__(on_message=lambda payload: None, on_change=lambda reached: None)
        self.connected = True
        self.client = self
        self.kept, self.age_s, self.recalls = kept, age_s, 0

    async def keep(self, payload: bytes, ttl_s: float) -> None:
        self.kept = payload

    async def recall(self, ttl_s: float) -> tuple[bytes, float]:
        self.recalls += 1
        return self.kept, self.age_s


@contextlib.asynccontextmanager
async def keeping(one: Deciding, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Keep the state in the store during the block."""
    for pause in ("KEEP_EVERY_S", "RECALL_S"):
        monkeypatch.setattr(snapshot, pause, 0.001)
    task = asyncio.create_task(one.sync._handover.keep_in(memory, one.sync.locks))
    yield
    await cancel_tasks([task])


LIMIT = {"rate_limit": {"requests_per_minute": 6, "burst": 10}}
LIMITED: dict[str, Any] = {"filters": ["inference_request", "kvcache", LIMIT, "router"]}


async def test_a_stores_contents_are_known_without_any_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As old as it is by then: a limit has filled again meanwhile."""
    memory = Memory()
    async with serve(FakeEngine("a")) as engine:
        async with worker(tmp_path, 0, engine, **LIMITED) as one, keeping(one, memory, monkeypatch):
            for number in range(5):
                await one.ask(session=f"s{number}")
            await until(lambda: len(decode_deltas(memory.kept or b"\x90")) == 6)
        again = Memory(memory.kept, age_s=20.0)
        async with worker(tmp_path, 1, engine, **LIMITED) as two, keeping(two, again, monkeypatch):
            await until(lambda: two.sessions() == 5)
            assert 2.0 < two.spent() <= 3.1
            assert again.recalls == 1


async def test_one_that_was_told_does_not_ask_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own charges would count twice. Of two only one writes."""
    first, second = Memory(), Memory()
    async with serve(FakeEngine("a")) as engine, worker(tmp_path, 0, engine, **LIMITED) as one:
        await one.ask(session="s")
        await until(lambda: not one.sync._handover._peers.newcomer.running)  # only then it tells others
        async with worker(tmp_path, 1, engine, **LIMITED) as two:
            await until_synced(one, two)
            async with keeping(one, first, monkeypatch):
                await until(lambda: bool(first.kept))
                async with keeping(two, second, monkeypatch):
                    await one.ask(session="t")
                    await until(lambda: len(decode_deltas(first.kept)) == 3)
            assert (second.recalls, second.kept) == (0, b"")


async def test_an_invalid_snapshot_is_reported_once_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is in the key."""
    memory = Memory(b"\xc1 nothing of ours")
    async with (
        serve(FakeEngine("a")) as engine,
        worker(tmp_path, 0, engine, **LIMITED) as one,
        keeping(one, memory, monkeypatch),
    ):
        await one.ask(session="s")
        await until(lambda: not memory.kept.startswith(b"\xc1") and len(decode_deltas(memory.kept)) == 2)
    assert caplog.text.count("keeps no state for a restart (DecodeError)") == 1
    assert "secret" not in caplog.text
