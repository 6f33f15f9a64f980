"""Replicas that meet at a real Redis or NATS: partitions, a store that is killed or slow, a death in mid-action."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from kvproxy.features.exchange import snapshot
from kvproxy.features.exchange.peers import SyncStatus
from kvproxy.features.exchange.stores import RedisLink
from kvproxy.features.exchange.wire import Origin, decode_deltas
from kvproxy.operate.companion import Siblings
from tests.cache.support import controller, long_text
from tests.features.exchange.support import Deciding, deciding, until_synced
from tests.features.leases.test_proxy import Engine
from tests.services.install import found
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve
from tests.support.ports import free_port
from tests.support.until import until, until_says

SERVERS = {"redis": "redis-server", "valkey": "valkey-server", "nats": "nats-server"}
PASSWORD = "s3cret-of-the-store"
LONG = long_text("long", 1200)

pytestmark = pytest.mark.services


@dataclass
class Store:
    """A server in a process of its own, always at the same port, and the way there that a test may cut."""

    server: str
    folder: Path
    port: int = 0
    process: asyncio.subprocess.Process | None = None
    connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def kind(self) -> str:
        """Setting it goes by: Valkey speaks Redis's protocol."""
        return "nats" if Path(self.server).name == SERVERS["nats"] else "redis"

    @property
    def program(self) -> list[str]:
        at = ["127.0.0.1", str(self.port)]
        if self.kind == "redis":
            return [self.server, "--bind", at[0], "--port", at[1], "--save", "", "--requirepass", PASSWORD]
        return [self.server, "-a", at[0], "-p", at[1], "--user", "kvproxy", "--pass", PASSWORD]

    def url(self, port: int | None = None) -> str:
        user = "" if self.kind == "redis" else "kvproxy"
        return f"{self.kind}://{user}:{PASSWORD}@127.0.0.1:{port or self.port}"

    async def start(self) -> None:
        """Until it takes connections."""
        if not self.port:
            self.port = free_port()
        null = asyncio.subprocess.DEVNULL
        self.process = await asyncio.create_subprocess_exec(
            *self.program, cwd=self.folder, stdout=null, stderr=null
        )  # fmt: skip
        await until_says(True, self._is_up)

    async def kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    def halt(self) -> None:
        """Halt the store: it takes connections, and does nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    async def _is_up(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True


@pytest.fixture(params=list(SERVERS))
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    program = found(SERVERS[request.param])
    if program is None:
        pytest.skip(f"needs {SERVERS[request.param]} (make test-services)")
    server = Store(program, tmp_path)
    await server.start()
    yield server
    server.go_on()
    await server.kill()


class Wire:
    """One replica's way to the store, which can be cut."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self.cut = False
        self.dumb = False  # what the store says to a connection that subscribed does not come
        self.delay_s = 0.0  # by which each piece comes later
        self.port = 0

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.break_off()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def break_off(self) -> None:
        """Every connection that there is ends."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cut:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there = None
        try:
            there = await asyncio.open_connection("127.0.0.1", self._store.port)
            async with asyncio.TaskGroup() as both:
                subscribed = asyncio.Event()
                both.create_task(self._carry(reader, there[1], subscribed=subscribed))
                both.create_task(self._carry(there[0], writer, lost=lambda: self.dumb and subscribed.is_set()))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for one in (writer, there[1] if there else writer):
                one.close()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        lost: Callable[[], bool] = lambda: False,
        subscribed: asyncio.Event | None = None,
    ) -> None:
        while data := await reader.read(65536):
            if subscribed is not None and b"SUB" in data:
                subscribed.set()
            await asyncio.sleep(self.delay_s)
            if not lost():
                writer.write(data)
                await writer.drain()
        raise ConnectionError


def replica(
    store: Store, name: str, engine: str, *, port: int | None = None, ahead_s: float = 0.0
) -> contextlib.AbstractAsyncContextManager[Deciding]:
    hardly_refilled = {"requests_per_minute": 0.06, "burst": 1000}
    chain = ["inference_request", "kvcache", {"rate_limit": hardly_refilled}, "router"]
    sync = {store.kind: store.url(port), "replica": name, "heartbeat": "100ms"}
    return deciding(engine, filters=chain, sync=sync, ahead_s=ahead_s)


def weights(*replicas: Deciding) -> list[float]:
    """Return the weight of a charge in each."""
    return [one.sync.journal.weight for one in replicas]


def text(number: int) -> str:
    return f"{number} " * 800


async def test_replicas_know_what_each_other_serves(store: Store) -> None:
    """A third one starts with what the two know; no credential is in what is shown."""
    async with serve(FakeEngine("a")) as engine, replica(store, "one", engine) as one:
        async with replica(store, "two", engine) as two:
            await until_synced(one, two)
            await one.ask(text(1))
            await until(lambda: two.entries() == one.entries() > 0)
            await two.ask(text(2))
            await until(lambda: two.entries() == one.entries())
            async with replica(store, "three", engine) as three:
                await until_synced(three)
                await until(lambda: three.entries() == one.entries())
        await until(lambda: one.status is SyncStatus.ALONE)
        assert PASSWORD not in str(one.sync.describe_state())


async def test_a_store_that_is_killed_and_comes_back(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Requests go on without it, limits fall to a share, and what was missed is there again afterwards."""
    async with (
        serve(FakeEngine("a")) as engine,
        replica(store, "one", engine) as one,
        replica(store, "two", engine) as two,
    ):
        await until_synced(one, two)
        caplog.clear()
        await store.kill()
        await until(lambda: caplog.text.count("goes on alone") == 2)
        await until(lambda: one.status is two.status is SyncStatus.ALONE)
        await until(lambda: weights(one, two) == [2.0, 2.0])
        assert (await one.ask(text(1))).status_code == 200
        assert (await two.ask(text(2))).status_code == 200
        assert one.entries() != 0
        assert caplog.text.count("goes on alone") == 2
        await store.start()
        await until_synced(one, two)
        await until(lambda: one.entries() == two.entries() > 10)
        await until(lambda: weights(one, two) == [1.0, 1.0])
        assert PASSWORD not in caplog.text


async def test_a_partition_between_replicas(store: Store) -> None:
    """One loses its way to the store, the other does not: afterwards both know the same."""
    async with (
        serve(FakeEngine("a")) as engine,
        Wire(store) as wire,
        replica(store, "one", engine) as one,
        replica(store, "two", engine, port=wire.port) as two,
    ):
        await until_synced(one, two)
        wire.cut = True
        wire.break_off()
        await until(lambda: one.status is two.status is SyncStatus.ALONE)
        await until(lambda: weights(one, two) == [1.0, 2.0])
        for number in range(5):
            await one.ask(text(number))
            await two.ask(text(100 + number))
        wire.cut = False
        await until_synced(one, two)
        await until(lambda: one.entries() == two.entries())


async def test_a_store_that_answers_nothing_holds_no_request_up(store: Store) -> None:
    """Messages for it wait within a bound; later its state is requested."""
    async with (
        serve(FakeEngine("a")) as engine,
        replica(store, "one", engine) as one,
        replica(store, "two", engine) as two,
    ):
        await until_synced(one, two)
        store.halt()
        async with asyncio.timeout(60):
            for number in range(20):
                assert (await one.ask(text(number))).status_code == 200
        await until(lambda: one.status is two.status is SyncStatus.ALONE)
        store.go_on()
        await until_synced(one, two)
        await until(lambda: one.entries() == two.entries() > 0)


async def test_a_store_that_is_slow_holds_no_request_up(store: Store) -> None:
    """Each word takes seconds to it and back; twenty requests would take more than half a minute if they waited."""
    async with (
        serve(FakeEngine("a")) as engine,
        Wire(store) as wire,
        replica(store, "one", engine) as one,
        replica(store, "two", engine, port=wire.port) as two,
    ):
        await until_synced(one, two)
        wire.delay_s = 1.0
        async with asyncio.timeout(25):
            for number in range(20):
                assert (await two.ask(text(number))).status_code == 200
        wire.delay_s = 0.0
        await until_synced(one, two)
        await until(lambda: one.entries() == two.entries() > 100)


async def test_clocks_that_differ_by_hours(store: Store) -> None:
    """Each decides by its own: what is known, spent, claimed and given to a third one is as with clocks that agree."""
    async with (
        serve(FakeEngine("a")) as engine,
        replica(store, "one", engine, ahead_s=7200.0) as one,
        replica(store, "two", engine) as two,
    ):
        await until_synced(one, two)
        await one.ask(text(1))
        await two.ask(text(2))
        await until(lambda: one.entries() == two.entries() > 10)
        await until(lambda: 1.0 < one.spent() <= 2.0 and 1.0 < two.spent() <= 2.0)
        granted = [await replicated.sync.locks.claim("pin a 17", 60.0) for replicated in (one, two)]
        assert sorted(granted) == [False, True]
        async with replica(store, "three", engine, ahead_s=-7200.0) as three:
            await until_synced(one, two, three)
            await until(lambda: three.entries() == one.entries() and 1.0 < three.spent() <= 2.0)


async def test_replicas_that_start_at_once(store: Store) -> None:
    """None waits for what another, which is as new, could tell it; and neither does a request."""
    async with serve(FakeEngine("a")) as engine, contextlib.AsyncExitStack() as stack:
        starting = [stack.enter_async_context(replica(store, name, engine)) for name in ("one", "two", "three")]
        together = await asyncio.gather(*starting)
        for number, each in enumerate(together):
            assert (await each.ask(text(number))).status_code == 200
        await until_synced(*together)
        await until(lambda: len({each.entries() for each in together}) == 1 and together[0].entries() > 15)


async def test_workers_that_start_together_are_sent_the_state_of_another_replica(store: Store, tmp_path: Path) -> None:
    """They meet each other before the store, and know as little; batches of the time before are kept nowhere."""
    async with serve(FakeEngine("a")) as engine, Wire(store) as wire, replica(store, "one", engine) as one:
        for number in range(5):
            await one.ask(text(number))
        one.sync.peers.publish(one.proxy.clock())
        one.sync.peers.own.sent.clear()
        wire.cut = True
        sync = {store.kind: store.url(wire.port), "replica": "two", "heartbeat": "100ms"}
        folder = tmp_path / "workers"
        async with contextlib.AsyncExitStack() as stack:
            starting = [
                stack.enter_async_context(deciding(engine, siblings=Siblings(folder, number, 2), sync=sync))
                for number in range(2)
            ]
            both = await asyncio.gather(*starting)
            await until(lambda: all(each.sync.peers.status is SyncStatus.SYNCED for each in both))
            wire.cut = False
            await until_synced(one, *both)
            await until(lambda: [each.entries() for each in both] == [one.entries()] * 2)


async def test_claimed_work_is_done_once(store: Store) -> None:
    """Of three that want it one may; when that one dies in the middle of it, another may once its time is over."""
    async with (
        serve(FakeEngine("a")) as engine,
        replica(store, "one", engine) as one,
        replica(store, "two", engine) as two,
    ):
        others = [one.sync, two.sync]
        async with replica(store, "three", engine) as three:
            everyone = [*others, three.sync]
            await until(lambda: all(len(one.peers.living) == 2 for one in everyone))
            granted = [await one.locks.claim("pin a 17", 60.0) for one in everyone]
            assert sorted(granted) == [False, False, True]
            winner = everyone[granted.index(True)]
            assert await winner.locks.claim("pin a 17", 1.0)
            losers = [one for one in others if one is not winner]
        await until(lambda: all(len(one.peers.living) == 1 for one in others))

        async def granted_later() -> bool:
            return any([await one.locks.claim("pin a 17", 1.0) for one in losers])

        await until_says(True, granted_later, pause_s=0.05)  # its time to live has to run out


async def test_sessions_and_limits_outlive_all_replicas(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a key of the store for a while: one that starts when none is left knows them, and has not charged twice."""
    if store.kind != "redis":
        pytest.skip("NATS core keeps nothing")
    monkeypatch.setattr(snapshot, "KEEP_EVERY_S", 0.05)
    async with serve(FakeEngine("a")) as engine:
        async with replica(store, "one", engine) as one, replica(store, "two", engine) as two:
            await until_synced(one, two)
            for number, each in enumerate([one, two] * 5):
                await each.ask(text(number), session=f"s{number}")
            await until(lambda: one.sessions() == two.sessions() == 10)
            kept_in = one.sync.store
            assert isinstance(kept_in, RedisLink)
            async with asyncio.timeout(60):
                while len(decode_deltas((await kept_in.recall(600.0))[0] or b"\x90")) < 11:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # in a store there is no event to wait for
        async with replica(store, "three", engine) as three:
            await until(lambda: three.sessions() == 10 and 8.0 < three.spent() <= 10.0)


async def test_a_replica_that_dies_in_the_middle_of_an_action(store: Store) -> None:
    """It had a prefix to pin, for all of them: another does so once its claim is over, and not before."""
    began = asyncio.Event()

    async def pin(asked: dict[str, Any]) -> dict[str, Any]:
        if not began.is_set():
            began.set()
            await asyncio.Event().wait()
        return {"event_id": "x", "num_tokens": len(asked["tokens"])}

    lmcache = controller(lambda _: {}, pin=pin)
    async with serve(Engine().app) as engine, serve(lmcache) as at, Wire(store) as wire:
        hot = {"enable_pinning": True, "hot_content_threshold": 1}
        cache = {"lmcache_endpoint": at, "cache_strategy": hot}
        config: dict[str, Any] = {"filters": ["inference_request", {"kvcache": cache}, "router"]}

        def acting(name: str, port: int | None = None) -> contextlib.AbstractAsyncContextManager[Deciding]:
            sync = {store.kind: store.url(port), "replica": name, "heartbeat": "100ms"}
            return deciding(engine, sync=sync, **config)

        async with acting("two") as two:
            async with acting("one", wire.port) as one:
                await until_synced(one, two)
                await one.ask(LONG)
                await asyncio.wait_for(began.wait(), 60)
                await two.ask(LONG)
                await until(lambda: two.metric("kvproxy_kvcache_actions_total", action="pin", result="elsewhere") > 0)
                assert lmcache.calls["/pin"] == 1
                wire.cut = True
                wire.break_off()

            async def times_pinned() -> float:
                await two.ask(LONG)  # which needs it pinned still
                return two.metric("kvproxy_kvcache_actions_total", action="pin", result="done")

            await until_says(1.0, times_pinned, pause_s=0.1)


async def test_a_way_back_that_is_gone_is_noticed(store: Store) -> None:
    """Writes are taken, and no answer comes: the connection is made again, as often as it takes."""
    async with (
        serve(FakeEngine("a")) as engine,
        Wire(store) as wire,
        replica(store, "one", engine) as one,
        replica(store, "two", engine, port=wire.port) as two,
    ):
        await until_synced(one, two)
        wire.dumb = True
        assert two.sync.store is not None
        await until(lambda: two.sync.store is not None and not two.sync.store.connected)
        for number in range(3):
            await one.ask(text(number))
        wire.dumb = False
        await until_synced(one, two)
        await until(lambda: one.entries() == two.entries() > 0)


async def test_two_replicas_of_one_name_say_so(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Each of them, once."""
    async with (
        serve(FakeEngine("a")) as engine,
        replica(store, "one", engine) as one,
        replica(store, "one", engine) as two,
    ):
        await until(lambda: one.sync.namesake.lives and two.sync.namesake.lives)
        await until(lambda: one.status is two.status is SyncStatus.ALONE)
        assert caplog.text.count("has the name one/0") == 2


async def test_a_wrong_password_is_said_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the right one nor the wrong one is in the log."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (make test-services)")
    store = Store("redis-server", tmp_path)
    await store.start()
    link = RedisLink(
        SecretStr(f"redis://:wrong-one@127.0.0.1:{store.port}"),
        "topic",
        Origin("h", 0, 1),
        on_message=lambda data: None,
        on_change=lambda reached: None,
        beat_s=0.5,
        rng=random.Random(0),
    )
    async with link:
        await until(lambda: "is away" in caplog.text)
    await store.kill()
    assert "wrong-one" not in caplog.text
    assert PASSWORD not in caplog.text
