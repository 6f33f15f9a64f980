"""Hot reload: validated first, applied whole or not at all, and no request notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.app import Proxy
from kvproxy.base.errors import ConfigError, Problem
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.commands.reload import FileReloader
from kvproxy.operate.config.load import load_config
from kvproxy.operate.config.schema import Config
from kvproxy.proxy.filters.chain import FilterContext, FilterType
from kvproxy.proxy.listener.server import Server, serve
from tests.support.fake_engine import Call, FakeEngine, answer_ok, event, start_stream
from tests.support.process import kvproxy_serve
from tests.support.proxy import chat, running_proxy
from tests.support.until import until


def config_of(endpoints: dict[str, str], **more: Any) -> Config:
    raw = {"endpoints": endpoints, "policy": "round_robin", "health": {"active": False}, **more}
    return load_config(raw)


@contextlib.asynccontextmanager
async def two_engines() -> AsyncIterator[tuple[str, str]]:
    async with serve(FakeEngine("a")) as a, serve(FakeEngine("b")) as b:
        yield a, b


async def served_by(client: httpx.AsyncClient) -> str:
    answer = await client.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 200
    return str(answer.headers["x-kvproxy-endpoint"])


async def test_endpoints_come_and_go_and_the_rest_stays() -> None:
    """The cluster, its learned state and the indexes are the same objects as before."""
    async with two_engines() as (a, b), running_proxy({"a": a}) as running:
        proxy = running.proxy
        cluster, kvcache = proxy.clusters["default"], proxy.kvcache
        assert await served_by(running.client) == "a"
        assert (await proxy.reload(config_of({"b": b}))).after_restart == ()
        assert [await served_by(running.client) for _ in range(2)] == ["b", "b"]
        assert proxy.clusters["default"] is cluster
        assert proxy.kvcache is kvcache
        assert kvcache is not None


async def test_a_running_stream_finishes_on_the_old_configuration() -> None:
    """Though policy and filters changed under it: its endpoint is the same one, and its load is counted out there."""
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b'{"n":1}')
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    engine = FakeEngine("a", slow)
    async with serve(engine) as url, running_proxy({"a": url}) as running:
        before = running.proxy.clusters["default"]
        reading = asyncio.create_task(
            running.client.post("/v1/chat/completions", json=chat(stream=True)), name="the stream"
        )
        await until(lambda: engine.calls)
        await running.proxy.reload(config_of({"a": url}, policy="least_request"))
        assert running.proxy.clusters["default"] is before
        assert (before.settings.policy.value, before.endpoints[0].load.in_flight) == ("least_request", 1)
        go_on.set()
        assert (await reading).text.endswith("data: [DONE]\n\n")
        await until(lambda: before.endpoints[0].load.in_flight == 0)


async def test_a_bad_configuration_changes_nothing() -> None:
    """Found before anything is touched: here a filter whose key file does not exist."""
    async with two_engines() as (a, b), running_proxy({"a": a}) as running:
        proxy = running.proxy
        before = (proxy.config, proxy.clusters["default"], proxy.kvcache)
        bad = config_of({"b": b}).model_copy(update={"filters": (*proxy.config.filters[-1:], *proxy.config.filters)})
        with pytest.raises(ConfigError):
            await proxy.reload(bad)
        assert (proxy.config, proxy.clusters["default"], proxy.kvcache) == before
        assert await served_by(running.client) == "a"


async def test_a_configuration_that_is_refused_shows_nothing() -> None:
    """Whatever was built of it before its fault was found: no gauge reads it."""
    async with two_engines() as (a, b), running_proxy({"a": a}) as running:
        proxy = running.proxy
        await served_by(running.client)

        def shown() -> set[tuple[str, str]]:
            return {
                (sample.name, str(sample.labels))
                for family in proxy.metrics.registry.collect()
                for sample in family.samples
            }

        before = shown()
        clusters = {"other": {"endpoints": {"b": b}, "policy": "kv_aware", "queue": {}, "shadow_policy": "dynamo"}}
        bad = load_config({"clusters": clusters, "filters": {"rate_limit": {"requests_per_minute": 1}}})
        with pytest.raises(ConfigError):
            await proxy.reload(bad.model_copy(update={"filters": (*bad.filters[1:], *bad.filters)}))
        assert shown() == before


class WillNotStart:
    """A part of a plug-in's filter."""

    async def __aenter__(self) -> None:
        raise RuntimeError("no luck today")

    async def __aexit__(self, kind: type[BaseException] | None, error: object, tb: TracebackType | None) -> None: ...


def build_unlucky(inner: Any, settings: object, context: FilterContext) -> Any:
    context.lifetimes.append(WillNotStart())
    return inner


async def test_a_part_that_cannot_start_leaves_the_old_ones_running() -> None:
    """New parts are started before the switch; those that had started end again."""
    extra = {"unlucky": FilterType(None, build_unlucky)}
    async with two_engines() as (a, b), Proxy(config_of({"a": a}), extra_filters=extra) as proxy:
        raw = {"endpoints": {"b": b}, "policy": "random", "filters": ["inference_request", "unlucky", "router"]}
        with pytest.raises(RuntimeError, match="no luck"):
            await proxy.reload(load_config(raw, extra_filters={"unlucky": None}))
        async with Server(proxy) as server, httpx.AsyncClient(base_url=server.url) as client:
            assert await served_by(client) == "a"


async def test_reloads_under_load_lose_no_request() -> None:
    """Endpoints, policies and filters change every few requests."""
    async with two_engines() as (a, b), running_proxy({"a": a, "b": b}) as running:
        finished = asyncio.Event()

        async def client_of(number: int) -> set[str]:
            seen = set()
            while not finished.is_set():
                seen.add(await served_by(running.client))
            return seen

        clients = [asyncio.create_task(client_of(number)) for number in range(8)]
        for policy in ("random", "round_robin", "least_request", "power_of_two", "kv_aware"):
            for endpoints in ({"a": a}, {"b": b}, {"a": a, "b": b}):
                await running.proxy.reload(config_of(endpoints, policy=policy))
                await asyncio.sleep(0.02)
        finished.set()
        seen = await asyncio.gather(*clients)
    assert set.union(*seen) == {"a", "b"}


async def test_a_cluster_that_is_gone_takes_its_metrics_along() -> None:
    """Otherwise dashboards would show it for ever."""
    async with two_engines() as (a, b):
        two = {"clusters": {"one": {"endpoints": {"a": a}}, "two": {"endpoints": {"b": b}}}}
        async with Proxy(load_config({**two, "routes": [{"cluster": "one"}]})) as proxy:
            up = proxy.metrics.registry.get_sample_value
            assert up("kvproxy_endpoint_up", {"cluster": "two", "endpoint": "b"}) == 1
            await proxy.reload(load_config({"clusters": {"one": two["clusters"]["one"]}}))
            await until(lambda: up("kvproxy_endpoint_up", {"cluster": "two", "endpoint": "b"}) is None)
            assert up("kvproxy_endpoint_up", {"cluster": "one", "endpoint": "a"}) == 1


async def test_a_cluster_that_comes_back_at_once_is_the_same_one() -> None:
    """A running request of the configuration that had it keeps it; its metrics stay when that request has ended."""
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, call: Call, send: Send) -> None:
        await go_on.wait()
        await answer_ok(engine, call, send)

    async with serve(FakeEngine("a", slow)) as a, serve(FakeEngine("b")) as b:
        one = {"one": {"endpoints": {"a": a}}}
        both = load_config({"clusters": {**one, "two": {"endpoints": {"b": b}}}, "routes": [{"cluster": "one"}]})
        async with Proxy(both) as proxy, serve(proxy) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            two = proxy.clusters["two"]
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=chat()), name="asked")
            await until(lambda: proxy.clusters["one"].endpoints[0].load.in_flight)
            await proxy.reload(load_config({"clusters": one}))
            await proxy.reload(both)
            assert proxy.clusters["two"] is two
            assert proxy.generations.ended == 0
            go_on.set()
            assert (await asked).status_code == 200
            await until(lambda: proxy.generations.ended == 2)
            up = proxy.metrics.registry.get_sample_value
            assert up("kvproxy_endpoint_up", {"cluster": "two", "endpoint": "b"}) == 1


async def test_changes_that_need_a_restart_are_reported() -> None:
    """Listeners and pools are not moved under running connections."""
    async with two_engines() as (a, _), Proxy(config_of({"a": a})) as proxy:
        changed = config_of({"a": a}, listen="127.0.0.1:9999", pool={"max_connections": 300})
        assert (await proxy.reload(changed)).after_restart == ("listen", "pool")


class Watched(os.PathLike[str]):
    """A path that counts how often it is looked at."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.looks = 0

    def __fspath__(self) -> str:
        self.looks += 1
        return str(self._path)

    __str__ = __fspath__


async def test_the_file_reloader_says_why_and_changes_nothing(tmp_path: Path) -> None:
    """Every problem of the file; then a good file is applied, by the watch alone."""
    file = tmp_path / "config.yaml"
    async with two_engines() as (a, b):
        file.write_text(f"endpoints: {{a: '{a}'}}\n")
        path = Watched(file)
        source = ConfigSource(path=path)  # type: ignore[arg-type]
        async with Proxy(source.load()[0]) as proxy, FileReloader(proxy, source, interval_s=0.01) as reload:
            assert proxy.reloader is reload
            file.write_text("endpoints: {a: nonsense}\npolcy: x\n")
            refused = await reload()
            assert {problem.path for problem in refused.errors} == {"endpoints.a.url", "polcy"}
            assert [endpoint.id for endpoint in proxy.clusters["default"].endpoints] == ["a"]
            file.unlink()
            away = path.looks
            await until(lambda: path.looks >= away + 3)  # in the middle of being replaced
            assert proxy.metrics.registry.get_sample_value("kvproxy_reloads_total", {"result": "refused"}) == 1
            file.write_text(f"endpoints: {{b: '{b}'}}\nlisten: ':1'\n")
            await until(lambda: [endpoint.id for endpoint in proxy.clusters["default"].endpoints] == ["b"])
        assert proxy.reloader is None


@pytest.mark.slow
async def test_sighup_and_the_admin_call(tmp_path: Path) -> None:
    """As an operator does it, with the watch off."""
    file = tmp_path / "config.yaml"
    async with two_engines() as (a, b):

        def write(endpoints: str) -> None:
            file.write_text(f"endpoints: {endpoints}\nlisten: ':0'\nadmin: '0'\nreload: {{watch: false}}\n")

        write(f"{{a: '{a}'}}")
        async with kvproxy_serve("-c", str(file)) as kvproxy, httpx.AsyncClient(base_url=kvproxy.url) as client:
            assert await served_by(client) == "a"
            write(f"{{b: '{b}'}}")
            kvproxy.process.send_signal(signal.SIGHUP)
            await until(lambda: any("configuration reloaded" in line for line in kvproxy.lines))
            assert await served_by(client) == "b"
            admin = next(
                line.split("admin listener on ")[1].split()[0] for line in kvproxy.lines if "admin list" in line
            )
            write(f"{{a: '{a}'}}")
            headers = {"content-type": "application/json"}
            answer = await client.post(f"{admin}/reload", headers=headers, content=b"{}")
            assert (answer.status_code, answer.json()["reloaded"]) == (200, True)
            assert await served_by(client) == "a"
            write("{a: nonsense}")
            refused = await client.post(f"{admin}/reload", headers=headers, content=b"{}")
            assert refused.status_code == 422
            assert await served_by(client) == "a"


class HangingSource(ConfigSource):
    """A configuration on a disk that does not answer."""

    def load(self) -> tuple[Config, list[Problem]]:
        raise TimeoutError


async def test_a_file_that_cannot_be_read_in_time_changes_nothing() -> None:
    """The reload is refused with its reason, and the thread is the reloader's own."""
    proxy = Proxy(config_of({"a": "http://127.0.0.1:1"}))
    reloader = FileReloader(proxy, HangingSource(), interval_s=0)
    (error,) = (await reloader()).errors
    assert error.message == "the file cannot be read: its disk hangs"
