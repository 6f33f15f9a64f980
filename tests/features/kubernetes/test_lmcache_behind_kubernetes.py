"""LMCache behind discovery: engines call themselves by pod address and port, and lookups find their endpoints."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerSettings
from tests.cache.support import long_text
from tests.operate.doctor.setup import BUDGET, ENGINE
from tests.support.fake_kubernetes import PODS, FakeKubernetes, pod
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

SAID = long_text("w", 900)


@contextlib.asynccontextmanager
async def two_pods(**annotations: str) -> AsyncIterator[tuple[RunningProxy, str]]:
    """Pods vllm-0 and vllm-1 with the id `ADDRESS:PORT` at the controller, and the URL of the second."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [one.getsockname()[1] for one in sockets]
    names = [f"127.0.0.1:{port}" for port in ports]
    fleet = Fleet(FleetSettings(dict.fromkeys(names, ENGINE), ControllerSettings()), rng=random.Random(1))
    api = FakeKubernetes()
    for number, port in enumerate(ports):
        api.put(PODS, pod(f"vllm-{number}", "127.0.0.1", ports=(("http", port),), annotations=annotations))
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(fleet)
        for name, one in zip(names, sockets, strict=True):
            await stack.enter_async_context(serve(fleet.engines[name], sockets=[one]))
        controller = await stack.enter_async_context(serve(fleet.controller))
        url = await stack.enter_async_context(serve(api))
        discovery = {"kubernetes": {"selector": "app=vllm", "namespace": "models", "api": {"url": url}}}
        filters = ["inference_request", {"kvcache": {"lmcache_endpoint": controller, **BUDGET}}, "router"]
        proxy = running_proxy({}, policy="kv_aware", filters=filters, discovery=discovery)
        yield await stack.enter_async_context(proxy), f"http://{names[1]}"


async def chat(client: httpx.AsyncClient, *, url: str = "") -> httpx.Response:
    body = {"model": "sim", "messages": [{"role": "user", "content": SAID}], "max_tokens": 1}
    answer = await client.post(f"{url}/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer


async def test_a_lookup_finds_the_pod_that_holds_the_prefix() -> None:
    """The proxy routed nothing there: only LMCache can have said it."""
    async with two_pods() as (proxy, second):
        await chat(proxy.client, url=second)
        answer = await chat(proxy.client)
        assert answer.headers["x-kvproxy-endpoint"] == "vllm-1"
        assert proxy.metric("kvproxy_kvcache_lookups_total", outcome="hit") == 1
        assert proxy.metric("kvproxy_kvcache_unknown_instances_total") == 0


@pytest.mark.parametrize("annotations", [{"kvproxy.io/instance-id": "elsewhere"}])
async def test_another_id_is_counted_as_unknown(annotations: dict[str, str]) -> None:
    """Faults where the names differ, and where they show."""
    async with two_pods(**annotations) as (proxy, second):
        await chat(proxy.client, url=second)
        await chat(proxy.client)
        await until(lambda: proxy.metric("kvproxy_kvcache_unknown_instances_total") == 1)
