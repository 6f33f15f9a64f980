"""Routing parameters, shown and changed while requests are routed."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.work import features_of
from tests.operate.admin.support import admin_of, audited, problems_of, proxy_of


async def test_learned_values_are_shown() -> None:
    """Speeds with their units, each endpoint's slowness, utilisation and what follows from it."""
    proxy = proxy_of(policy="kv_aware")
    policy: Any = proxy.clusters["default"].policy
    policy.observe_sample(EndpointId("a"), features_of(4000, 0), 2.0, proxy.clock())
    async with admin_of(proxy) as client:
        shown = (await client.get("/routing")).json()["clusters"]["default"]
    assert shown["policy"] == "kv_aware"
    learned = shown["learned"]
    assert (learned["samples"], learned["samples_by_kind"]) == (1, {"streamed": 1, "scraped": 0})
    assert (learned["learning"], learned["requests_without_sample"]) == (False, 0)
    assert learned["slowness"]["a"] > 1.0
    assert (learned["rho"], learned["arrivals_per_s"]) == (0.0, 0.0)
    assert learned["tokens_per_s"] > 0


@pytest.mark.parametrize(("policy", "learns"), [("least_ttft", True), ("round_robin", False)])
async def test_policies_without_parameters(policy: str, learns: bool) -> None:
    """Nothing to change is said so, and what was learned is shown all the same."""
    async with admin_of(proxy_of(policy=policy)) as client:
        shown = (await client.get("/routing")).json()["clusters"]["default"]
        answer = await client.patch("/routing", json={"clusters": {"default": {"parameters": {"x": 1}}}})
    assert (shown["parameters"], bool(shown["learned"])) == ({}, learns)
    assert answer.status_code == 422
    assert "no parameters" in problems_of(answer)["clusters.default.parameters"][0]


async def test_a_change_takes_effect_and_is_written_down() -> None:
    """Only what differs, from which value to which."""
    proxy = proxy_of(policy="prefix_affinity")
    changes = {"cache_threshold": 0.5, "balance_rel_threshold": 1.5}
    with audited() as lines:
        async with admin_of(proxy) as client:
            answer = await client.patch("/routing", json={"clusters": {"default": {"parameters": changes}}})
    policy: Any = proxy.clusters["default"].policy
    assert policy.settings.cache_threshold == 0.5
    assert answer.json()["clusters"]["default"]["parameters"]["cache_threshold"] == 0.5
    assert lines[0]["parameters"] == {"cache_threshold": {"before": 0.3, "after": 0.5}}


@pytest.mark.parametrize(
    ("body", "where", "fix"),
    [
        ({}, "clusters", "parameters"),
        ({"cluster": {}}, "cluster", "did you mean 'clusters'?"),
        (
            {"clusters": {"defualt": {"parameters": {"cache_threshold": 0}}}},
            "clusters.defualt",
            "did you mean 'default'?",
        ),
        ({"clusters": {"default": {}}}, "clusters.default.parameters", "an object"),
        (
            {"clusters": {"default": {"parameters": {"cache_threshold": 7}}}},
            "clusters.default.parameters.cache_threshold",
            "0 to 1",
        ),
        (
            {"clusters": {"default": {"parameters": {"cache_treshold": 0}}}},
            "clusters.default.parameters.cache_treshold",
            "'cache_threshold'",
        ),
        (
            {"clusters": {"default": {"parameters": {"cache_threshold": 0}, "policy": "x"}}},
            "clusters.default.policy",
            "`param",
        ),
    ],
)
async def test_mistakes_change_nothing(body: dict[str, Any], where: str, fix: str) -> None:
    """Path and range of each; what was right beside a mistake is not applied either."""
    proxy = proxy_of(policy="prefix_affinity")
    policy: Any = proxy.clusters["default"].policy
    before = policy.settings
    if "default" in body.get("clusters", {}) and "parameters" in body["clusters"]["default"]:
        body["clusters"]["default"]["parameters"]["balance_abs_threshold"] = 1
    with audited() as lines:
        async with admin_of(proxy) as client:
            answer = await client.patch("/routing", json=body)
    assert answer.status_code == 422
    assert fix in problems_of(answer)[where][1]
    assert policy.settings is before
    assert lines == []


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
