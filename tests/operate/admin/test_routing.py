"""Routing, shown while requests are routed."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.work import features_of
from tests.operate.admin.support import admin_of, proxy_of


async def test_learned_values_are_shown() -> None:
    """Speeds with their units, each endpoint's slowness, utilisation and what follows from it."""
    proxy = proxy_of(policy="kv_aware")
    policy: Any = proxy.clusters["default"].policies.own.policy
    policy.observe_sample(EndpointId("a"), features_of(4000, 0), 2.0, proxy.clock())
    async with admin_of(proxy) as client:
        shown = (await client.get("/routing")).json()["clusters"]["default"]
    assert shown["policy"] == "kv_aware"
    learned = shown["learned"]
    assert (learned["samples"], learned["samples_by_kind"]) == (1, {"streamed": 1, "scraped": 0})
    assert (learned["learning"], learned["requests_without_sample"]) == (False, 0)
    assert learned["slowness"]["a"] > 1.0
    assert (learned["rho"], learned["arrivals_per_s"]) == (0.5, 0.0)
    assert learned["tokens_per_s"] > 0


@pytest.mark.parametrize(("policy", "learns"), [("least_ttft", True), ("round_robin", False)])
async def test_a_policy_that_learns_shows_it(policy: str, learns: bool) -> None:
    """The others have nothing to show."""
    async with admin_of(proxy_of(policy=policy)) as client:
        shown = (await client.get("/routing")).json()["clusters"]["default"]
    assert bool(shown["learned"]) is learns


async def test_waiting_requests_are_shown() -> None:
    """Depth against its bound, how long the first has waited, and what became of the others; None without a queue."""
    async with admin_of(proxy_of(policy="kv_aware", queue={"limit": 5, "max_wait": "9s"})) as client:
        shown = (await client.get("/routing")).json()["clusters"]["default"]["queue"]
    released = dict.fromkeys(("turn", "room", "max_wait", "no_endpoint", "arrived", "queue_off", "client_left"), 0)
    assert shown == {
        "depth": 0, "limit": 5, "waiting_for_room": 0, "without_endpoint": 0, "oldest_wait_s": 0.0, "max_wait_s": 9.0,
        "released": released, "refused": 0,
    }  # fmt: skip
    async with admin_of(proxy_of(policy="kv_aware", queue={"enabled": False})) as client:
        assert (await client.get("/routing")).json()["clusters"]["default"]["queue"] is None
