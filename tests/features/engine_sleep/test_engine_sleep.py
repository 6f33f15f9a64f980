"""Engines woken for requests and put to sleep when idle, with simulated vLLMs and engines that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvproxy.base.errors import ConfigError
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.load import EngineState
from kvproxy.features.engine_sleep import engines as sleeping
from kvproxy.features.engine_sleep.engines import CROWDED, FAILED_S, EngineSleep
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import serve as serve_app
from tests.lab.simulator.support import Running, engine
from tests.operate.admin.support import admin_of
from tests.support.clock import FakeClock
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until

PATH = "/v1/chat/completions"
BODY = {**chat(), "model": "tiny", "max_tokens": 2}
HOUR_S = 3600.0


class Life:
    """A proxy whose engines are read only when a test says so."""

    def __init__(self, running: RunningProxy, clock: FakeClock) -> None:
        self.running = running
        self.clock = clock
        assert running.proxy.kvcache is not None
        self.kvcache = running.proxy.kvcache
        self.cluster = running.proxy.clusters["default"]
        found = self.kvcache.observers.find(EngineSleep)
        assert found is not None
        self.engines = found

    async def read(self, after_s: float = 0.0) -> None:
        """Read the engines' metrics, so much later."""
        self.clock.now += after_s
        await self.kvcache.scraper.scrape_all()

    async def ask(self) -> httpx.Response:
        """Send one request."""
        return await self.running.client.post(PATH, json=BODY)

    def endpoint(self, name: str) -> Endpoint:
        """Return it."""
        return next(one for one in self.cluster.endpoints if one.id == name)

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample."""
        return self.running.metric(name, **labels)

    def wakes(self, result: str) -> float:
        """Return the calls that woke an engine, or failed to."""
        return self.metric("kvproxy_engine_wakes_total", cluster="default", result=result)


@contextlib.asynccontextmanager
async def life(endpoints: Mapping[str, str], *, sleep_after: float = 0.0, within: float = 60.0) -> AsyncIterator[Life]:
    """Yield a proxy over these engines, on a clock that stands still."""
    clock = FakeClock()
    cluster = {"policy": "kv_aware", "wake_within": within, "sleep_after": sleep_after}
    filters = {"kvcache": {"engine_metrics_interval": "1h"}}
    async with running_proxy(dict(endpoints), clock=clock, filters=filters, **cluster) as running:
        yield Life(running, clock)


async def put_to_sleep(*engines: Running) -> None:
    """By another hand than the proxy's."""
    for one in engines:
        (await one.client.post("/sleep")).raise_for_status()


def wake_calls(one: Running) -> int:
    """Return how often it was to wake."""
    return one.app.state.calls["POST /wake_up"]


async def test_a_request_wakes_the_engine_of_its_model() -> None:
    """It is answered; the engine is a candidate again."""
    async with engine() as a, life({"a": a.url}) as proxy:
        await put_to_sleep(a)
        await proxy.read()
        assert proxy.endpoint("a").asleep
        answer = await proxy.ask()
        assert answer.status_code == 200
        assert wake_calls(a) == 1
        assert not proxy.endpoint("a").asleep
        assert proxy.wakes("done") == 1


async def test_requests_that_come_meanwhile_make_no_call_of_their_own() -> None:
    """All of them are held by the one call, and the gauge shows them."""
    async with engine() as a, life({"a": a.url}) as proxy:
        await put_to_sleep(a)
        await proxy.read()
        await a.faults(slow_wake_s=1000.0)
        asked = [asyncio.create_task(proxy.ask()) for _ in range(5)]
        await until(lambda: proxy.metric("kvproxy_requests_held_for_wake") == 5)
        await a.faults(reset=True)
        assert [one.status_code for one in await asyncio.gather(*asked)] == [200] * 5
        assert wake_calls(a) == 1
        assert proxy.metric("kvproxy_requests_held_for_wake") == 0


async def test_a_request_is_held_no_longer_than_wake_within() -> None:
    """Then it is refused with `retry-after`; the engine wakes on for the next one."""
    async with engine() as a, life({"a": a.url}, within=0.05) as proxy:
        await put_to_sleep(a)
        await proxy.read()
        await a.faults(slow_wake_s=1000.0)
        asked = asyncio.create_task(proxy.ask())
        await until(lambda: proxy.engines.held == 1)
        proxy.clock.now += 1.0
        answer = await asked
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "asleep"
        await a.faults(reset=True)
        await until(lambda: proxy.wakes("done"))
        assert (await proxy.ask()).status_code == 200


@pytest.mark.parametrize(("within", "status"), [(60.0, 200), (0.0, 503)])
async def test_a_cluster_that_requests_wake_is_ready(within: float, status: int) -> None:
    """Without its requests, which a load balancer keeps away from one that is not, nothing would ever wake it; where
    requests wake nothing the page asks an operator to."""
    async with engine() as a, running_proxy({"a": a.url}, policy="kv_aware", wake_within=within) as running:
        await put_to_sleep(a)
        assert running.proxy.kvcache is not None
        await running.proxy.kvcache.scraper.scrape_all()
        assert (await running.client.get("/health")).status_code == status
        async with admin_of(running.proxy) as admin:
            assert (await admin.get("/readyz")).status_code == status
            live = (await admin.get("/live")).json()
    assert (live["state"]["kind"] == "down") == (status == 503)
    asks = any("sleeps by its own metrics" in one["what"] for one in live["findings"])
    assert asks == (status == 503)


async def test_no_more_requests_are_held_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further ones are refused at once."""
    monkeypatch.setattr(sleeping, "MAX_HELD", 0)
    async with engine() as a, life({"a": a.url}) as proxy:
        await put_to_sleep(a)
        await proxy.read()
        answer = await proxy.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "asleep")
        assert wake_calls(a) == 0


async def test_nothing_is_woken_while_another_engine_is_awake() -> None:
    """It serves the request."""
    async with engine() as a, engine() as b, life({"a": a.url, "b": b.url}) as proxy:
        await put_to_sleep(a)
        await proxy.read()
        answer = await proxy.ask()
        assert answer.headers["x-kvproxy-endpoint"] == "b"
        assert wake_calls(a) == 0


async def test_only_one_of_several_engines_is_woken() -> None:
    """The first in the configuration."""
    async with engine() as a, engine() as b, life({"a": a.url, "b": b.url}) as proxy:
        await put_to_sleep(a, b)
        await proxy.read()
        answer = await proxy.ask()
        assert answer.headers["x-kvproxy-endpoint"] == "a"
        assert (wake_calls(a), wake_calls(b)) == (1, 0)


async def test_one_more_is_woken_where_requests_wait_in_all_that_are_awake() -> None:
    """By several readings in a row; nothing is held for that."""
    async with engine() as a, engine() as b, life({"a": a.url, "b": b.url}) as proxy:
        await put_to_sleep(b)
        await proxy.read()
        load = proxy.endpoint("a").load
        load.engine = EngineState(proxy.clock.now, waiting=3)
        for _ in range(CROWDED - 1):
            proxy.engines.tick()
        assert proxy.endpoint("b").asleep
        load.engine = EngineState(proxy.clock.now, waiting=0)
        proxy.engines.tick()
        load.engine = EngineState(proxy.clock.now, waiting=3)
        for _ in range(CROWDED):
            proxy.engines.tick()
        await until(lambda: not proxy.endpoint("b").asleep)
        assert wake_calls(b) == 1


def asleep(name: str, *, wake: int = 500, order: list[str] | None = None, sleep: asyncio.Event | None = None) -> Any:
    """Return an engine that reports by its metrics that it sleeps, or with `sleep` falls asleep by that."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        path = call.path
        if order is not None and path in ("/sleep", "/wake_up"):
            order.append(path)
        if path == "/sleep" and sleep is not None:
            await sleep.wait()
        await reply(send, wake if path == "/wake_up" else 200, b"{}")

    return FakeEngine(name, behave)


async def test_an_engine_that_cannot_be_woken_is_left_alone_for_a_while() -> None:
    """Requests are refused meanwhile, without a call each; the next engine is tried before."""
    broken = asleep("a")
    async with serve_app(broken) as url, life({"a": url}) as proxy:
        proxy.endpoint("a").asleep = True
        answers = [await proxy.ask() for _ in range(3)]
        assert [one.status_code for one in answers] == [503] * 3
        assert answers[0].headers["retry-after"] == "10"
        assert "none could be started" in answers[0].text
        assert [call.path for call in broken.calls] == ["/wake_up"]
        proxy.clock.now += FAILED_S
        await proxy.ask()
        assert proxy.wakes("failed") == 2


async def test_the_next_engine_is_woken_where_one_fails() -> None:
    """The request waits for both."""
    async with serve_app(asleep("a")) as url, engine() as b, life({"a": url, "b": b.url}) as proxy:
        await put_to_sleep(b)
        proxy.endpoint("a").asleep = proxy.endpoint("b").asleep = True
        answer = await proxy.ask()
        assert answer.headers["x-kvproxy-endpoint"] == "b"
        assert (proxy.wakes("failed"), proxy.wakes("done")) == (1, 1)


async def test_an_idle_engine_is_put_to_sleep_and_its_cache_forgotten() -> None:
    """After `sleep_after` without a request by its own metrics; a request wakes it again."""
    async with engine() as a, life({"a": a.url}, sleep_after=HOUR_S) as proxy:
        await proxy.running.client.post(PATH, json={**BODY, **chat("word " * 1000), "model": "tiny"})
        counts = proxy.kvcache.overlap.indexes["default"].approximate.counts
        assert counts.held_blocks(proxy.endpoint("a").id)
        await proxy.read()
        await proxy.read(after_s=HOUR_S - 1)
        assert not proxy.endpoint("a").asleep
        await proxy.read(after_s=1)
        await until(lambda: proxy.metric("kvproxy_engine_sleeps_total", cluster="default", result="done"))
        assert (await a.client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert counts.held_blocks(proxy.endpoint("a").id) == 0
        await proxy.read()
        assert proxy.endpoint("a").asleep
        assert (await proxy.ask()).status_code == 200


async def test_an_engine_that_others_use_is_not_idle() -> None:
    """Its counter of prompt tokens grows by their requests."""
    async with engine() as a, life({"a": a.url}, sleep_after=HOUR_S) as proxy:
        await proxy.read()
        (await a.client.post(PATH, json=BODY)).raise_for_status()
        await proxy.read(after_s=2 * HOUR_S)
        await proxy.read(after_s=HOUR_S - 1)
        assert not proxy.endpoint("a").asleep
        assert a.app.state.calls["POST /sleep"] == 0


async def test_an_engine_with_a_request_is_not_idle() -> None:
    """However long the answer takes."""
    async with engine() as a, life({"a": a.url}, sleep_after=HOUR_S) as proxy:
        await a.faults(stall_first_byte_s=1000.0)
        asked = asyncio.create_task(proxy.ask())
        await until(lambda: proxy.endpoint("a").load.in_flight)
        for _ in range(3):
            await proxy.read(after_s=2 * HOUR_S)
        assert a.app.state.calls["POST /sleep"] == 0
        await a.faults(reset=True)
        assert (await asked).status_code == 200


async def test_an_engine_that_refuses_to_sleep_serves_on() -> None:
    """As one without the path does; it is tried again after it was idle for as long again."""
    async with engine() as a, life({"a": a.url}, sleep_after=HOUR_S) as proxy:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sleeping, "SLEEP", "/no_such_path")
            await proxy.read()
            await proxy.read(after_s=HOUR_S)
            await until(lambda: proxy.metric("kvproxy_engine_sleeps_total", cluster="default", result="failed"))
            assert not proxy.endpoint("a").asleep
            await proxy.read()
            assert not proxy.endpoint("a").asleep
        assert (await proxy.ask()).status_code == 200


async def test_a_wake_call_comes_after_the_sleep_call_that_is_under_way() -> None:
    """Else it could overtake that one, and the engine would sleep with requests in it."""
    order: list[str] = []
    slept = asyncio.Event()
    fake = asleep("a", wake=200, order=order, sleep=slept)
    async with serve_app(fake) as url, life({"a": url}, sleep_after=HOUR_S) as proxy:
        engines = proxy.cluster.engines
        proxy.engines._idle[engines[0]] = sleeping._Idle(0, 0.0)
        proxy.engines._begin_sleep(proxy.cluster, engines[0])
        asked = asyncio.create_task(proxy.ask())
        await until(lambda: proxy.engines.held)
        await until(lambda: order)
        assert order == ["/sleep"]
        slept.set()
        assert (await asked).status_code == 200
        assert order == ["/sleep", "/wake_up"]


async def test_a_question_for_a_place_wakes_the_engine_too() -> None:
    """`/pick` is for requests that other programs carry."""
    async with engine() as a, life({"a": a.url}) as proxy:
        await put_to_sleep(a)
        await proxy.read()
        async with admin_of(proxy.running.proxy) as client:
            answer = await client.post("/pick", json={"request": BODY})
        assert answer.status_code == 200, answer.text
        assert wake_calls(a) == 1


class Starter:
    """An engine that another program starts when it is called, and the file by which the proxy finds it."""

    def __init__(self, listed: Path, engine: str) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.status = 200
        self._listed = listed
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self.calls.append((scope["method"], scope["path"], headers.get(b"x-key", b"").decode()))
        if self.status == 200:
            self._listed.write_text(json.dumps([{"id": "a", "url": self._engine}]))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": headers.get(b"x-key", b"")})


@contextlib.asynccontextmanager
async def started_by_call(folder: Path) -> AsyncIterator[tuple[Starter, RunningProxy]]:
    """Yield a proxy whose file lists no endpoint, and the program that its requests call."""
    listed = folder / "endpoints.json"
    listed.write_text("[]")
    async with serve_app(FakeEngine("a")) as url:
        starter = Starter(listed, url)
        async with serve_app(starter) as call:
            cluster = {
                "policy": "kv_aware",
                "wake_within": "100s",
                "wake_call": {"url": f"{call}/start", "method": "PUT", "headers": {"x-key": "hidden"}},
                "discovery": {"file": {"path": str(listed), "interval": "100ms"}},
            }
            async with running_proxy({}, filters={"kvcache": {"engine_metrics_interval": "1h"}}, **cluster) as proxy:
                yield starter, proxy


async def test_a_call_starts_an_engine_where_there_is_none(tmp_path: Path) -> None:
    """Once for all requests that come meanwhile, with its headers; the effective configuration hides them."""
    async with started_by_call(tmp_path) as (starter, proxy):
        answers = await asyncio.gather(*(proxy.client.post(PATH, json=BODY) for _ in range(5)))
        assert [one.status_code for one in answers] == [200] * 5
        assert starter.calls == [("PUT", "/start", "hidden")]
        async with admin_of(proxy.proxy) as admin:
            shown = (await admin.get("/config")).text
        assert "x-key" in shown
        assert "hidden" not in shown


async def test_nothing_is_started_without_a_request(tmp_path: Path) -> None:
    """However often the engines' metrics are read meanwhile."""
    async with started_by_call(tmp_path) as (starter, proxy):
        assert proxy.proxy.kvcache is not None
        engines = proxy.proxy.kvcache.observers.find(EngineSleep)
        assert engines is not None
        for _ in range(2 * CROWDED):
            engines.tick()
        assert not engines._waking
        assert starter.calls == []


async def test_a_call_that_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its answer is in no log, since it may repeat the headers."""
    async with started_by_call(tmp_path) as (starter, proxy):
        starter.status = 403
        answer = await proxy.client.post(PATH, json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "answered with 403" in caplog.text
    assert "hidden" not in caplog.text


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"wake_call": {"url": "http://127.0.0.1:9/start"}, "filters": {"kvcache": {}}}, "wake_within"),
        ({"wake_call": {"url": "ftp://start"}, "wake_within": 60, "filters": {"kvcache": {}}}, "url"),
        ({"sleep_after": 60, "filters": {"kvcache": {}}}, "sleep_after"),
        ({"wake_within": 60, "filters": {"kvcache": {"engine_metrics_interval": 0}}}, "wake_within"),
    ],
)
def test_settings_that_would_leave_engines_asleep_are_refused(config: dict[str, Any], where: str) -> None:
    """By name, with the reason."""
    with pytest.raises(ConfigError) as refused:
        load_config({"endpoints": ["http://127.0.0.1:9"], **config})
    assert any(where in problem.path for problem in refused.value.problems)
