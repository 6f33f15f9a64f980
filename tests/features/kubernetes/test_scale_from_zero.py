"""Scale from zero: with no endpoint requests wait, the metrics say that one is wanted, and Kubernetes brings it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvproxy.operate.admin.process import check_readiness
from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import FakeEngine
from tests.support.fake_kubernetes import SLICES, FakeKubernetes, member, slice_of
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until


@asynccontextmanager
async def behind_kubernetes(queue: Mapping[str, Any]) -> AsyncIterator[tuple[FakeKubernetes, RunningProxy]]:
    """Yield a proxy whose only source is a service without pods."""
    fake = FakeKubernetes()
    async with serve(fake) as api:
        kubernetes = {"service": "vllm", "namespace": "models", "api": {"url": api}}
        async with running_proxy({}, policy="kv_aware", queue=queue, discovery={"kubernetes": kubernetes}) as proxy:
            await until(lambda: fake.watching)
            yield fake, proxy


def ask(proxy: RunningProxy, words: int = 20_000) -> asyncio.Task[httpx.Response]:
    body = chat("word " * words)
    return asyncio.create_task(proxy.client.post("/v1/chat/completions", json=body))


def start_pod(fake: FakeKubernetes, url: str) -> None:
    """Add a scaler's new pod that is ready."""
    parts = urlsplit(url)
    ports = (("http", parts.port or 0),)
    fake.put(SLICES, slice_of("s1", member("vllm-0", parts.hostname or ""), ports=ports))


async def test_requests_wait_until_a_pod_is_there() -> None:
    """Wanted is none; then requests come, more than none is wanted, a pod gets ready, and all of them are served. When
    it is gone again, the next one waits again."""
    async with behind_kubernetes({"max_wait": "100s"}) as (fake, proxy), serve(FakeEngine("vllm-0")) as url:
        cluster = proxy.proxy.clusters["default"]
        queue = cluster.queue
        assert queue is not None
        assert proxy.metric("kvproxy_wanted_endpoints", cluster="default") == 0
        waiting = [ask(proxy) for _ in range(3)]
        await until(lambda: len(queue) == 3)
        assert proxy.metric("kvproxy_wanted_endpoints", cluster="default") > 0
        assert proxy.metric("kvproxy_saturation", cluster="default") > 1
        assert proxy.metric("kvproxy_queue_depth", queue="router/default") == 3
        start_pod(fake, url)
        answers = await asyncio.gather(*waiting)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert {answer.headers["x-kvproxy-endpoint"] for answer in answers} == {"vllm-0"}
        assert proxy.metric("kvproxy_router_queue_exits_total", cluster="default", reason="arrived") == 3
        fake.put(SLICES, slice_of("s1"))
        await until(lambda: not cluster.endpoints)
        late = ask(proxy)
        await until(lambda: len(queue) == 1)
        start_pod(fake, url)
        assert (await late).status_code == 200


async def test_a_pod_that_is_not_ready_serves_nothing_until_it_is() -> None:
    """Its requests wait as if there were none."""
    async with behind_kubernetes({}) as (fake, proxy), serve(FakeEngine("vllm-0")) as url:
        cluster = proxy.proxy.clusters["default"]
        queue = cluster.queue
        assert queue is not None
        start_pod(fake, url)
        await until(lambda: cluster.endpoints)
        assert (await ask(proxy)).status_code == 200
        parts = urlsplit(url)
        lost = member("vllm-0", parts.hostname or "", ready=False, serving=False)
        fake.put(SLICES, slice_of("s1", lost, ports=(("http", parts.port or 0),)))
        await until(lambda: cluster.endpoints[0].condition(0) == "not_ready")
        waiting = ask(proxy)
        await until(lambda: len(queue) == 1)
        start_pod(fake, url)
        assert (await waiting).status_code == 200


async def test_in_vain() -> None:
    """503 with a time to come back, after as long as requests may wait."""
    async with behind_kubernetes({"max_wait": "50ms"}) as (_, proxy):
        answer = await ask(proxy)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_endpoints")
        assert int(answer.headers["retry-after"]) >= 1
        assert proxy.metric("kvproxy_router_queue_exits_total", cluster="default", reason="no_endpoint") == 1


async def test_more_than_may_wait() -> None:
    """429, with a time when a place is free for sure."""
    async with behind_kubernetes({"max_wait": "100s", "limit": 1}) as (_, proxy):
        queue = proxy.proxy.clusters["default"].queue
        assert queue is not None
        first = ask(proxy)
        await until(lambda: len(queue) == 1)
        second = await ask(proxy)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(second.headers["retry-after"]) <= 100
        assert proxy.metric("kvproxy_router_queue_exits_total", cluster="default", reason="refused") == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_without_a_queue_the_answer_is_at_once() -> None:
    """As ever."""
    async with behind_kubernetes({"enabled": False}) as (_, proxy):
        assert (await ask(proxy)).status_code == 503


async def test_a_client_that_leaves_gives_its_place_back() -> None:
    """And a proxy without endpoints is ready as long as it holds requests for them."""
    async with behind_kubernetes({"limit": 1}) as (_, proxy):
        queue = proxy.proxy.clusters["default"].queue
        assert queue is not None
        async with httpx.AsyncClient(base_url=proxy.url) as leaving:
            asked = asyncio.create_task(leaving.post("/v1/chat/completions", json=chat("hello")))
            await until(lambda: len(queue) == 1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: len(queue) == 0)
        assert proxy.metric("kvproxy_router_queue_exits_total", cluster="default", reason="client_left") == 1
        assert check_readiness(proxy.proxy) == (True, "ready")


async def test_a_reload_that_turns_the_queue_off_answers_those_that_wait() -> None:
    """They are told 503, and not left waiting."""
    async with behind_kubernetes({}) as (_, proxy):
        cluster = proxy.proxy.clusters["default"]
        queue = cluster.queue
        assert queue is not None
        waiting = ask(proxy)
        await until(lambda: len(queue) == 1)
        settings = cluster.settings.model_copy(
            update={"queue": cluster.settings.queue.model_copy(update={"enabled": False})}
        )
        cluster.reconfigure(settings, probe=None)
        assert (await waiting).status_code == 503
