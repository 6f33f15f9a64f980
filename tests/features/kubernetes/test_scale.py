"""A workload without pods is scaled to one for the request that needs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvproxy.proxy.listener.server import serve
from tests.features.kubernetes.test_scale_from_zero import ask, start_pod
from tests.support.fake_engine import FakeEngine
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

WORKLOAD = "models/deployments/vllm"


@asynccontextmanager
async def scaled(*, within: str = "100s", **cluster: Any) -> AsyncIterator[tuple[FakeKubernetes, RunningProxy]]:
    """Yield a proxy that scales a deployment, which has no pods."""
    fake = FakeKubernetes()
    fake.replicas[WORKLOAD] = 0
    async with serve(fake) as api:
        section = {"service": "vllm", "namespace": "models", "api": {"url": api}, "scale": "deployments/vllm"}
        discovery = {"kubernetes": section}
        filters = {"kvcache": {"engine_metrics_interval": "1h"}}
        settings = {"policy": "kv_aware", "wake_within": within, "discovery": discovery, **cluster}
        async with running_proxy({}, filters=filters, **settings) as proxy:
            await until(lambda: fake.watching)
            yield fake, proxy


def wakes(proxy: RunningProxy, result: str) -> float:
    """Return the calls that ended so."""
    return proxy.metric("kvproxy_engine_wakes_total", cluster="default", result=result)


async def test_one_call_serves_all_requests_that_come_meanwhile() -> None:
    """Each is held until the pod is ready. Of the scale that was read the number alone is changed."""
    async with scaled() as (fake, proxy), serve(FakeEngine("vllm-0")) as url:
        waiting = [ask(proxy) for _ in range(5)]
        await until(lambda: proxy.metric("kvproxy_requests_held_for_wake") == 5)
        await until(lambda: fake.puts)
        start_pod(fake, url)
        answers = await asyncio.gather(*waiting)
        assert [answer.status_code for answer in answers] == [200] * 5
        assert [put["spec"] for put in fake.puts] == [{"replicas": 1}]
        assert fake.puts[0]["metadata"] == {"name": "vllm", "resourceVersion": "100"}
        assert wakes(proxy, "done") == 1


async def test_pods_that_are_on_their_way_are_left_as_many() -> None:
    """Others may have scaled it up."""
    async with scaled() as (fake, proxy), serve(FakeEngine("vllm-0")) as url:
        fake.replicas[WORKLOAD] = 3
        waiting = ask(proxy)
        await until(lambda: proxy.metric("kvproxy_requests_held_for_wake") == 1)
        start_pod(fake, url)
        assert (await waiting).status_code == 200
        assert (fake.puts, fake.replicas) == ([], {WORKLOAD: 3})


async def test_a_pod_that_does_not_come_in_time() -> None:
    """503 with a time to come back."""
    async with scaled(within="100ms") as (fake, proxy):
        answer = await ask(proxy)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "asleep")
        assert answer.headers["retry-after"] == "1"
        assert len(fake.puts) == 1
        await until(lambda: wakes(proxy, "failed"))


async def test_a_change_by_another_at_the_same_time_stands() -> None:
    """It is no failure: the pod comes by that one."""
    async with scaled() as (fake, proxy), serve(FakeEngine("vllm-0")) as url:
        fake.conflict = True
        waiting = ask(proxy)
        await until(lambda: proxy.metric("kvproxy_requests_held_for_wake") == 1)
        start_pod(fake, url)
        assert (await waiting).status_code == 200
        assert wakes(proxy, "failed") == 0


@pytest.mark.parametrize("missing", [True, False])
async def test_a_workload_that_cannot_be_scaled(missing: bool) -> None:
    """The request is refused; further ones make no call of their own for a while."""
    async with scaled() as (fake, proxy):
        if missing:
            fake.replicas.clear()
        else:
            fake.forbid = frozenset({"list"})
        answers = [await ask(proxy), await ask(proxy)]
        assert [one.status_code for one in answers] == [503] * 2
        assert wakes(proxy, "failed") == 1
