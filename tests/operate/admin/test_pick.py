"""`POST /pick`: where a request should go, with and without a reservation."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from kvproxy.app import Proxy
from kvproxy.base.json_scan import MAX_DECODED_BYTES
from kvproxy.base.types import EndpointId
from kvproxy.operate.admin.pick import PickRoutes
from kvproxy.operate.admin.replies import RequestRefused, on_refused
from tests.operate.admin.support import admin_of, problems_of, proxy_of
from tests.support.until import until

ENDPOINTS = {"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:10/base"}
PROMPT = "a long shared question " * 100


def question(*contents: str, **fields: Any) -> dict[str, Any]:
    """About one chat request."""
    messages = [{"role": "user", "content": content} for content in contents or (PROMPT,)]
    return {"request": {"model": "m", "messages": messages}, **fields}


@contextlib.asynccontextmanager
async def picker(**config: Any) -> AsyncIterator[tuple[Proxy, httpx.AsyncClient]]:
    """Yield a proxy over two endpoints and a client of its admin listener."""
    proxy = proxy_of(**{"endpoints": ENDPOINTS, "policy": "kv_aware", **config})
    async with admin_of(proxy) as client:
        yield proxy, client


def in_flight(proxy: Proxy) -> dict[EndpointId, int]:
    """By endpoint."""
    return {endpoint.id: endpoint.load.in_flight for endpoint in proxy.clusters["default"].endpoints}


async def test_a_question_changes_no_load() -> None:
    """It says where, why, and what every endpoint holds and costs."""
    async with picker() as (proxy, client):
        shown = (await client.post("/pick", json=question())).json()
        assert in_flight(proxy) == {"a": 0, "b": 0}
    assert (shown["cluster"], shown["model"], shown["policy"], shown["reason"]) == (
        "default", "m", "kv_aware", "no_overlap",
    )  # fmt: skip
    assert shown["url"] == ENDPOINTS[shown["endpoint"]]
    assert shown["headers"] == {}
    assert shown["prompt_tokens"] > 400
    assert [one["endpoint"] for one in shown["candidates"]] == ["a", "b"]
    assert all(one["cost"] > 0 and one["matched_tokens"] == 0 for one in shown["candidates"])
    assert (shown["matched_tokens"], shown["reservation"]) == (0, None)


async def test_a_rank_is_named_by_the_header_it_takes() -> None:
    """By the number that its engine knows it by; the load is the rank's own."""
    endpoints = [{"id": "a", "url": "http://127.0.0.1:9", "data_parallel": {"ranks": [4, 5]}}]
    async with picker(endpoints=endpoints, policy="round_robin") as (proxy, client):
        engine = proxy.clusters["default"].engines[0]
        first = (await client.post("/pick", json=question(reserve=True))).json()
        engine.ranks.record_refusal(4, 4)
        second = (await client.post("/pick", json=question(reserve=True))).json()
        assert in_flight(proxy) == {"a@4": 1, "a@5": 1}
    assert (first["endpoint"], first["headers"]) == ("a@4", {"x-data-parallel-rank": "4"})
    assert (second["endpoint"], second["headers"]) == ("a@5", {"x-data-parallel-rank": "1"})
    assert first["url"] == second["url"]


async def test_a_reservation_is_load_until_it_is_done() -> None:
    """And afterwards the next request with this beginning is sent to the same place."""
    async with picker() as (proxy, client):
        answer = await client.post("/pick", json=question(reserve=True))
        assert answer.status_code == 201
        shown = answer.json()
        assert sum(in_flight(proxy).values()) == in_flight(proxy)[shown["endpoint"]] == 1
        busy = (await client.post("/pick", json=question("another question altogether"))).json()
        assert busy["endpoint"] != shown["endpoint"]
        report = {"status": 200, "prompt_tokens": 600, "cached_tokens": 0}
        done = await client.post(f"/pick/{shown['reservation']['id']}/done", json=report)
        assert done.json() == {"endpoint": shown["endpoint"], "outcome": "success"}
        assert sum(in_flight(proxy).values()) == 0
        again = (await client.post("/pick", json=question())).json()
        assert (again["endpoint"], again["reason"]) == (shown["endpoint"], "overlap")
        assert again["matched_tokens"] > 0.8 * again["prompt_tokens"]
        (holder,) = [one for one in again["candidates"] if one["matched_tokens"]]
        assert holder["source"] == "approximate"


@pytest.mark.parametrize(
    ("report", "outcome", "held"),
    [({}, "success", True), ({"status": 404}, "client_error", False), ({"status": 503}, "busy", False),
     ({"status": 500}, "failure", False), ({"status": 0}, "failure", False), ({"cancelled": True}, "cancelled", False)],
)  # fmt: skip
async def test_the_callers_report_of_the_end_counts(report: dict[str, Any], outcome: str, held: bool) -> None:
    """Only a good answer leaves its prompt in the engine's cache."""
    async with picker() as (proxy, client):
        shown = (await client.post("/pick", json=question(reserve=True))).json()
        path = f"/pick/{shown['reservation']['id']}/done"
        assert (await client.post(path, json=report)).json()["outcome"] == outcome
        assert sum(in_flight(proxy).values()) == 0
        assert bool((await client.post("/pick", json=question())).json()["matched_tokens"]) == held
        counted = {"made": 1.0, outcome: 1.0}
        registry = proxy.metrics.registry
        for result, value in counted.items():
            assert registry.get_sample_value("kvproxy_pick_reservations_total", {"result": result}) == value
        endpoint = proxy.clusters["default"].find_endpoint(EndpointId(shown["endpoint"]))
        assert endpoint is not None
        assert endpoint.health.failures == (outcome == "failure")


async def test_a_contradiction_leaves_the_index() -> None:
    """The engine had nothing where much was predicted: of the long prompt it holds no more than of the short one."""
    async with picker() as (_, client):
        for messages in ([PROMPT, "an answer", "more " * 600], [PROMPT]):
            shown = (await client.post("/pick", json=question(*messages, reserve=True))).json()
            path = f"/pick/{shown['reservation']['id']}/done"
            await client.post(path, json={"prompt_tokens": 600, "cached_tokens": 0})
        assert shown["matched_tokens"] > 0
        long = (await client.post("/pick", json=question(PROMPT, "an answer", "more " * 600))).json()
        assert 0 < long["matched_tokens"] < 0.5 * long["prompt_tokens"]


async def test_a_first_token_that_is_told_of_ends_the_pending_prefill() -> None:
    """Callers that stream may say so, and speeds are learned from it."""
    async with picker() as (proxy, client):
        shown = (await client.post("/pick", json=question(reserve=True, first_token=True))).json()
        endpoint = proxy.clusters["default"].find_endpoint(EndpointId(shown["endpoint"]))
        assert endpoint is not None
        assert endpoint.load.pending_requests == 1
        path = f"/pick/{shown['reservation']['id']}"
        assert (await client.post(f"{path}/first_token")).status_code == 200
        assert (endpoint.load.pending_requests, endpoint.load.in_flight) == (0, 1)
        await client.post(f"{path}/done")
        assert endpoint.load.in_flight == 0


async def test_a_lapsed_reservation_leaves_no_prompt_behind() -> None:
    """No engine is known to have computed the prompt; the caller's word comes too late."""
    async with picker() as (proxy, client):
        shown = (await client.post("/pick", json=question(reserve=True, lease_s=0.01))).json()
        await until(lambda: sum(in_flight(proxy).values()) == 0)
        assert (await client.post(f"/pick/{shown['reservation']['id']}/done")).status_code == 404
        assert (await client.post("/pick", json=question())).json()["matched_tokens"] == 0


async def test_a_reservation_is_settled_once() -> None:
    """And one that is unknown cannot be."""
    async with picker() as (_, client):
        shown = (await client.post("/pick", json=question(reserve=True))).json()
        path = f"/pick/{shown['reservation']['id']}"
        assert (await client.post(f"{path}/done")).status_code == 200
        for late in (f"{path}/done", f"{path}/first_token", "/pick/x/done"):
            answer = await client.post(late)
            assert (answer.status_code, list(problems_of(answer))) == (404, ["id"])


@pytest.mark.parametrize(
    ("body", "status", "where"),
    [("nonsense", 400, "(body)"), ("{}", 400, "(body)"), (question(colour="red"), 400, "(body)"),
     (question(path="/v1/nothing"), 422, "path"), ({"request": 7}, 422, "request"),
     (question(lease_s=0), 422, "lease_s"), (question(lease_s=1e9), 422, "lease_s"),
     (question(policy="random"), 422, "policy"), ("[" * 2000, 400, "(body)")],
)  # fmt: skip
async def test_unanswerable_queries_are_reported(body: Any, status: int, where: str) -> None:
    """Before anything is reserved."""
    async with picker() as (proxy, client):
        text = body if isinstance(body, str) else json.dumps({**body, "reserve": True})
        answer = await client.post("/pick", content=text)
        assert (answer.status_code, list(problems_of(answer))) == (status, [where])
        assert sum(in_flight(proxy).values()) == 0


async def test_too_many_open_reservations_are_refused() -> None:
    """Questions are still answered."""
    proxy = proxy_of(endpoints=ENDPOINTS, policy="kv_aware")
    routes = PickRoutes(proxy, limit=1).list_routes()
    app = Starlette(routes=routes, exception_handlers={RequestRefused: on_refused})
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        asked = question(reserve=True)
        answers = [await client.post("/pick", json=asked) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 429]
        assert (await client.post("/pick", json=question())).status_code == 200
        await client.post(f"/pick/{answers[0].json()['reservation']['id']}/done")
        assert (await client.post("/pick", json=asked)).status_code == 201


@pytest.mark.parametrize(
    "report",
    [
        "nonsense",
        '{"cached": 3}',
        '{"cached_tokens": "many"}',
        '{"prompt_tokens": -1}',
        '{"prompt_tokens": 1000000000000}',
    ],
)
async def test_a_report_that_cannot_be_read_settles_nothing(report: str) -> None:
    """The caller may try again."""
    async with picker() as (proxy, client):
        shown = (await client.post("/pick", json=question(reserve=True))).json()
        answer = await client.post(f"/pick/{shown['reservation']['id']}/done", content=report)
        assert answer.status_code in (400, 422)
        assert sum(in_flight(proxy).values()) == 1


@pytest.mark.parametrize("reserve", [False, True])
async def test_when_nobody_can_take_it_the_reason_is_said(reserve: bool) -> None:
    """As the proxy itself would refuse."""
    async with picker() as (proxy, client):
        for name in ("a", "b"):
            proxy.clusters["default"].operator.drain_endpoint(EndpointId(name))
        answer = await client.post("/pick", json=question(reserve=reserve))
        assert answer.status_code == 503
        assert "draining" in problems_of(answer)["endpoint"][0]
        labels = {"cluster": "default", "policy": "kv_aware", "reason": "draining"}
        counted = proxy.metrics.registry.get_sample_value("kvproxy_picks_total", labels)
        assert bool(counted) == reserve  # a question alone counts nothing
    endpoints = [{"id": "a", "url": "http://127.0.0.1:9", "models": ["other"]}]
    async with picker(endpoints=endpoints) as (_, client):
        assert (await client.post("/pick", json=question(reserve=reserve))).status_code == 404


async def test_without_a_route_there_is_no_answer() -> None:
    """The alias names no cluster."""
    routes = [{"model": "known", "cluster": "default"}]
    async with picker(routes=routes) as (_, client):
        answer = await client.post("/pick", json=question())
        assert (answer.status_code, list(problems_of(answer))) == (404, ["request.model"])


async def test_an_alias_is_answered_with_the_engines_name_for_it() -> None:
    """So that the caller can write it into the body."""
    routes = [{"model": "m", "cluster": "default", "upstream_model": "meta/m"}]
    async with picker(routes=routes) as (_, client):
        assert (await client.post("/pick", json=question())).json()["model"] == "meta/m"


async def test_long_prompts_are_taken_and_the_bound_is_the_proxys_own() -> None:
    """`limits.body`, not the 64 KiB of an operator's changes."""
    async with picker(limits={"body": "300KiB"}) as (_, client):
        assert (await client.post("/pick", json=question("x" * 200_000))).status_code == 200
        assert (await client.post("/pick", json=question("x" * 400_000))).status_code == 413


async def test_a_very_long_question_is_answered_like_a_short_one() -> None:
    """It is cut up in steps, and as strict about its other fields."""
    filling = "x" * MAX_DECODED_BYTES
    async with picker() as (_, client):

        async def asked(body: dict[str, Any]) -> tuple[int, list[str]]:
            answer = await client.post("/pick", json=body)
            return answer.status_code, list(problems_of(answer)) if answer.status_code != 200 else []

        assert await asked(question(filling, path="/v1/chat/completions")) == (200, [])
        assert await asked(question(filling, path="/v1/nothing")) == (422, ["path"])
        assert await asked(question(filling, colour="red")) == (400, ["(body)"])
        assert await asked({"request": {}, "session": filling}) == (413, ["(body)"])
        assert await asked({"question": [filling]}) == (413, ["(body)"])
        cut_off = await client.post("/pick", content=json.dumps(question(filling))[:-1])
        assert (cut_off.status_code, list(problems_of(cut_off))) == (400, ["(body)"])


async def test_a_policy_on_offer_may_be_asked_for() -> None:
    """And where the filter would prefer the best holder, a named policy still decides."""
    async with picker(policy="round_robin", client_policies=["session"]) as (_, client):
        asked = question(policy="session", session="s", reserve=True)
        answers = [(await client.post("/pick", json=asked)).json() for _ in range(3)]
        assert {one["policy"] for one in answers} == {"session"}
        assert len({one["endpoint"] for one in answers}) == 1
        listed = problems_of(await client.post("/pick", json=question(policy="random")))["policy"]
        assert "session" in listed[1]
        assert (await client.post("/pick", json=question(policy="session"))).json()["policy"] == "session"


async def test_a_policy_asked_for_goes_before_what_the_filter_prefers() -> None:
    """The holder would be preferred; the session's endpoint is what was asked for."""
    filters = ["inference_request", {"kvcache": {"prefer": True, "min_matched_tokens": 1}}, "router"]
    async with picker(policy="round_robin", client_policies=["session"], filters=filters) as (_, client):
        first = (await client.post("/pick", json=question(reserve=True))).json()
        await client.post(f"/pick/{first['reservation']['id']}/done")
        assert (await client.post("/pick", json=question())).json()["reason"] == "preferred"
        asked = question(policy="session", session="s")
        assert (await client.post("/pick", json=asked)).json()["reason"] == "session"


async def test_without_the_kvcache_filter_there_are_no_facts() -> None:
    """Loads alone decide. The length of the prompt is estimated all the same."""
    async with picker(policy="least_request", filters=["request_id", "inference_request", "router"]) as (proxy, client):
        first = (await client.post("/pick", json=question(reserve=True))).json()
        second = (await client.post("/pick", json=question())).json()
        assert second["endpoint"] != first["endpoint"]
        assert first["prompt_tokens"] > 0
        assert first["matched_tokens"] is None
        assert second["candidates"][0]["cost"] is None
        await client.post(f"/pick/{first['reservation']['id']}/done")
        assert sum(in_flight(proxy).values()) == 0


async def test_a_preferred_endpoint_goes_first() -> None:
    """Where the kvcache filter prefers, so does the picker."""
    filters = ["inference_request", {"kvcache": {"prefer": True, "min_matched_tokens": 1}}, "router"]
    async with picker(policy="round_robin", filters=filters) as (_, client):
        shown = (await client.post("/pick", json=question(reserve=True))).json()
        await client.post(f"/pick/{shown['reservation']['id']}/done")
        for _ in range(3):
            again = (await client.post("/pick", json=question())).json()
            assert (again["endpoint"], again["reason"]) == (shown["endpoint"], "preferred")
