"""Speeds that no policy learns are said to be so."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.routing.work import features_of
from kvproxy.operate.admin.findings import NOTABLE_REQUESTS, find_unlearned
from kvproxy.operate.commands.status import render_page
from tests.operate.admin.support import admin_of, proxy_of
from tests.support.picks import pick_endpoint

UNARY = PickRequest(streams=False)


def placed(proxy: Any, requests: int) -> None:
    """Place requests without a visible first token."""
    for _ in range(requests):
        pick_endpoint(proxy.clusters["default"], UNARY, now=proxy.clock())


@pytest.mark.parametrize("policy", ["kv_aware", "least_ttft"])
def test_many_requests_without_a_sample_are_a_finding(policy: str) -> None:
    """Defaults that look like knowledge are worse than none."""
    proxy = proxy_of(policy=policy)
    placed(proxy, NOTABLE_REQUESTS - 1)
    assert list(find_unlearned(proxy.clusters)) == []
    placed(proxy, 1)
    (finding,) = find_unlearned(proxy.clusters)
    assert (finding.severity, finding.where) == ("warning", "clusters.default")
    assert "no sample of the engines' speeds in 500 requests: all speeds are the defaults" in finding.what
    assert "engine_metrics_interval" in finding.fix


def test_a_sample_ends_it_until_there_are_none_again() -> None:
    """Learned values expire."""
    proxy = proxy_of(policy="kv_aware")
    placed(proxy, NOTABLE_REQUESTS)
    policy = proxy.clusters["default"].policies.own.policy
    policy.observe_sample(EndpointId("a"), features_of(1000, 0), 0.1, proxy.clock())
    assert list(find_unlearned(proxy.clusters)) == []
    placed(proxy, NOTABLE_REQUESTS)
    (finding,) = find_unlearned(proxy.clusters)
    assert "fade" in finding.what


def test_a_policy_without_speeds_has_none_to_learn() -> None:
    """round_robin does not care."""
    proxy = proxy_of(policy="round_robin")
    placed(proxy, NOTABLE_REQUESTS)
    assert list(find_unlearned(proxy.clusters)) == []


async def test_page_and_status_say_it() -> None:
    """In the findings, and in place of invented numbers."""
    proxy = proxy_of(policy="kv_aware")
    placed(proxy, NOTABLE_REQUESTS)
    async with admin_of(proxy) as client:
        live = (await client.get("/live")).json()
    assert "no sample of the engines' speeds in 500 requests" in live["findings"][-1]["what"]
    assert live["routing"]["default"]["learned"]["learning"] is True
    text = render_page(live)
    assert "learning: no sample in 500 requests yet" in text
    assert "tokens/s" not in text
