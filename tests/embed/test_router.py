"""Placement for apps that carry requests themselves."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from kvproxy import NoEndpoint, PlacedRequest, Router
from kvproxy.base.types import EndpointId
from kvproxy.testing import simulated_engines
from tests.support.until import until

BODY = {"model": "sim", "messages": [{"role": "user", "content": "a long beginning " * 100}], "max_tokens": 4}
NOWHERE = {"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:10"}


async def carry(http: httpx.AsyncClient, placed: PlacedRequest) -> dict[str, object]:
    answer = await http.post(placed.url, content=placed.body, headers=placed.headers)
    found: dict[str, object] = answer.json()
    placed.first_token()
    placed.finish(found["usage"])
    return found


def in_flight(router: Router) -> dict[str, int]:
    return {each.id: each.load.in_flight for each in router.proxy.clusters["default"].endpoints}


async def test_a_prompt_goes_where_it_was_and_what_is_cached_is_predicted() -> None:
    async with simulated_engines(3) as endpoints, Router(endpoints=endpoints) as router, httpx.AsyncClient() as http:
        async with router.place(BODY) as first:
            assert in_flight(router)[first.endpoint] == 1
            assert first.predicted_cached_tokens == 0
            await carry(http, first)
        async with router.place(BODY) as second:
            answer = await carry(http, second)
        assert second.endpoint == first.endpoint
        assert second.predicted_cached_tokens > 0
        usage = answer["usage"]
        assert isinstance(usage, dict)
        assert usage["prompt_tokens_details"]["cached_tokens"] * 0.8 < second.predicted_cached_tokens
        assert not any(in_flight(router).values())


async def test_requests_at_once_spread_out() -> None:
    """Each counts where it was placed as long as it is held, so later placements avoid it."""
    async with Router(endpoints=NOWHERE) as router:
        async with router.place(BODY) as one, router.place({**BODY, "messages": []}) as two:
            assert {one.endpoint, two.endpoint} == {"a", "b"}
        assert in_flight(router) == {"a": 0, "b": 0}


async def test_a_failure_moves_the_request_to_another_endpoint() -> None:
    async with Router(endpoints=NOWHERE) as router, router.place(BODY) as placed:
        first = placed.endpoint
        placed.failed(ConnectionError("refused"))
        assert in_flight(router)[first] == 0
        assert {first, await placed.again()} == {"a", "b"}
        with pytest.raises(NoEndpoint) as raised:
            await placed.again()
    assert (raised.value.status, raised.value.retry_after_s) == (503, 1.0)
    assert placed._carried.exchange.outcome.end == "upstream_died"  # not a client that left


async def test_an_endpoint_that_keeps_failing_is_ejected() -> None:
    config = {"endpoints": NOWHERE, "policy": "round_robin", "health": {"active": False}}
    async with Router(config) as router:
        for _ in range(6):
            async with router.place(BODY) as placed:
                if placed.endpoint == "a":
                    placed.failed()
                else:
                    placed.finish()
        for _ in range(2):
            async with router.place(BODY) as placed:
                assert placed.endpoint == "b"


async def test_a_request_that_was_not_entered_has_no_place() -> None:
    async with Router(endpoints=NOWHERE) as router:
        placed = router.place(BODY)
        with pytest.raises(RuntimeError, match=r"async with router\.place"):
            _ = placed.endpoint
        with pytest.raises(RuntimeError, match=r"async with router\.place"):
            placed.finish()


async def test_leaving_without_a_word_gives_the_place_back() -> None:
    async with Router(endpoints=NOWHERE) as router:
        with pytest.raises(LookupError):
            async with router.place(BODY):
                raise LookupError("the app's own")
        assert in_flight(router) == {"a": 0, "b": 0}


@pytest.mark.parametrize("reported", [True, False])
async def test_a_first_token_that_is_not_reported_teaches_no_speed(reported: bool) -> None:
    """The end of a stream is no time to first token."""
    async with Router(endpoints=NOWHERE) as router:
        async with router.place({**BODY, "stream": True}) as placed:
            assert placed._carried.held is not None
            reservation = placed._carried.held.pick.reservation
            if reported:
                placed.first_token()
            placed.finish()
        assert (reservation.first_token_at is not None) == reported
        families = {one.name: one for one in router.proxy.metrics.registry.collect()}
        counts = [one for one in families["kvproxy_ttft_seconds"].samples if one.name.endswith("_count") and one.value]
        assert [one.labels["stream"] for one in counts] == ["true" if reported else "false"]


async def test_a_request_that_is_over_holds_no_place_again() -> None:
    """Neither by `again`, nor by a second entry: nothing would give that place back."""
    async with Router(endpoints=NOWHERE) as router:
        async with router.place(BODY) as placed:
            placed.finish(status=500)
            with pytest.raises(RuntimeError, match="is over"):
                await placed.again()
        with pytest.raises(RuntimeError, match="placed once"):
            await placed.__aenter__()
        assert not any(in_flight(router).values())


async def test_a_refused_request_may_be_entered_once_more() -> None:
    async with Router(endpoints=NOWHERE) as router:
        placed = router.place(BODY)
        for name in NOWHERE:
            router.proxy.clusters["default"].operator.drain_endpoint(EndpointId(name))
        with pytest.raises(NoEndpoint):
            await placed.__aenter__()
        router.proxy.clusters["default"].operator.drain_endpoint(EndpointId("a"), draining=False)
        async with placed:
            assert placed.endpoint == "a"


async def test_an_endpoint_may_be_excluded_by_its_id_alone() -> None:
    async with Router(endpoints=NOWHERE) as router:
        for _ in range(3):
            async with router.place(BODY, exclude="a") as placed:
                assert placed.endpoint == "b"


async def test_sessions_in_any_script_are_apart() -> None:
    """By the bytes that a client of the proxy would send."""
    async with Router({"endpoints": {**NOWHERE, "c": "http://127.0.0.1:11"}, "policy": "session"}) as router:
        keys = set()
        for session in ("\u4f1a\u8bdd", "\u5bf9\u8bdd", "s\u00e9ance", "session"):
            async with router.place(BODY, session=session, headers={"x-user": session}) as placed:
                inference = placed._carried.exchange.inference
                assert inference is not None
                keys.add(inference.session_key)
        assert len(keys) == 4


async def test_a_body_that_is_no_data_is_refused_at_once() -> None:
    """Text would be sent to the engine in quotes."""
    async with Router(endpoints=NOWHERE) as router:
        with pytest.raises(TypeError):
            router.place(json.dumps(BODY))  # type: ignore[arg-type]
        async with router.place(memoryview(json.dumps(BODY).encode())) as placed:  # type: ignore[arg-type]
            assert json.loads(placed.body) == BODY


async def test_usage_of_the_openai_package_is_read() -> None:
    from openai.types import CompletionUsage  # takes a second
    from openai.types.completion_usage import PromptTokensDetails

    details = PromptTokensDetails(cached_tokens=7)
    usage = CompletionUsage(prompt_tokens=9, completion_tokens=2, total_tokens=11, prompt_tokens_details=details)
    async with Router(endpoints=NOWHERE) as router, router.place(json.dumps(BODY).encode(), session="s") as placed:
        placed.finish(usage)
        placed.finish(usage)  # once is enough
        outcome = placed._carried.exchange.outcome
        assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (9, 2, 7)


async def test_a_model_that_nobody_serves() -> None:
    config = {"endpoints": [{"id": "a", "url": "http://127.0.0.1:9", "models": ["other"]}]}
    async with Router(config) as router:
        with pytest.raises(NoEndpoint) as raised:
            async with router.place(BODY):
                pass
    assert (raised.value.status, raised.value.retry_after_s) == (404, None)


async def test_the_app_names_the_priority_in_the_queue() -> None:
    """The last one asked for goes first, though its prompt is the longest."""
    order: list[int] = []
    config = {"endpoints": {"a": NOWHERE["a"]}, "policy": "kv_aware", "queue": {"max_wait": "600s"}}
    async with Router(config) as router:
        cluster = router.proxy.clusters["default"]
        assert cluster.queue is not None

        async def wait(priority: int, words: int) -> None:
            body = {**BODY, "messages": [{"role": "user", "content": f"word{priority} " * words}]}
            async with router.place(body, priority=priority):
                order.append(priority)

        async with router.place({**BODY, "messages": [{"role": "user", "content": "word " * 40_000}]}):
            waiting = []
            for count, (priority, words) in enumerate([(-50, 1_000), (0, 2_000), (50, 4_000)], 1):
                waiting.append(asyncio.create_task(wait(priority, words)))
                await until(lambda count=count: len(cluster.queue or ()) == count)
        await asyncio.gather(*waiting)
    assert order == [50, 0, -50]


async def test_a_request_given_up_in_the_queue_holds_no_place() -> None:
    """Nor does it hold up those behind it."""
    config = {"endpoints": {"a": NOWHERE["a"]}, "policy": "kv_aware", "queue": {"max_wait": "600s"}}
    long = {**BODY, "messages": [{"role": "user", "content": "word " * 40_000}]}
    async with Router(config) as router:
        cluster = router.proxy.clusters["default"]
        assert cluster.queue is not None
        async with router.place(long):
            waiting = asyncio.create_task(router.place(BODY).__aenter__())
            await until(lambda: len(cluster.queue or ()) == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert len(cluster.queue) == 0
            assert in_flight(router) == {"a": 1}
        assert in_flight(router) == {"a": 0}


async def test_a_first_request_starts_it_and_endpoints_come_and_go() -> None:
    """Those that left keep the requests they have."""
    router = Router(endpoints={"a": NOWHERE["a"]})
    async with router.place(BODY) as placed:
        assert router.proxy.status()["running"]
        router.add_endpoint("b", NOWHERE["b"])
        router.remove_endpoint("a")
        assert placed.endpoint == "a"
        async with router.place(BODY) as later:
            assert later.endpoint == "b"
        with pytest.raises(LookupError):
            router.remove_endpoint("b", cluster="other")
    await router.__aexit__()


async def test_a_request_may_be_moved_to_where_it_went() -> None:
    """Only to an endpoint that may take it; the one before no longer counts it."""
    async with Router(endpoints=NOWHERE) as router, router.place(BODY) as placed:
        other = "b" if placed.endpoint == "a" else "a"
        placed.move_to(other)
        assert placed.endpoint == other
        assert in_flight(router)[other] == 1
        assert sum(in_flight(router).values()) == 1
        placed.move_to(other)
        assert sum(in_flight(router).values()) == 1
        placed.move_to("unknown")
        assert sum(in_flight(router).values()) == 0
