"""Requests that wait for the first byte of an engine which its probes declare unhealthy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.proxy.forward.request_body import START_BYTES
from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, answer_ok, event, start_stream
from tests.support.proxy import RunningProxy, ask_in_process, chat, running_proxy
from tests.support.until import until

#: Files stream to the engine as they come.
FORM = {"content-type": "multipart/form-data; boundary=b"}
#: Probes as fast as they come; one failed is enough.
PROBES = {"active": True, "interval": "5ms", "unhealthy_threshold": 1}


async def hang(engine: FakeEngine, call: Call, send: Send) -> None:
    await call.gone.wait()


async def hang_after_the_head(engine: FakeEngine, call: Call, send: Send) -> None:
    await start_stream(send)
    await call.gone.wait()


def endpoint(proxy: RunningProxy, name: str) -> Endpoint:
    found = proxy.proxy.clusters["default"].find_endpoint(EndpointId(name))
    assert found is not None
    return found


@contextlib.asynccontextmanager
async def beside_a_good_one(engine: FakeEngine, **config: Any) -> AsyncIterator[RunningProxy]:
    """Yield a proxy in front of this engine, a, and of b, that answers; probed as fast as they come."""
    async with (
        serve(engine) as a,
        serve(FakeEngine("good")) as b,
        running_proxy({"a": a, "b": b}, health=PROBES, **config) as proxy,
    ):
        yield proxy


async def become(proxy: RunningProxy, name: str, condition: Condition) -> None:
    await until(lambda: endpoint(proxy, name).condition(asyncio.get_running_loop().time()) is condition)


def probes_failed(proxy: RunningProxy) -> float:
    return proxy.metric("kvproxy_health_probes_total", cluster="default", endpoint="a", outcome="failed")


def post(proxy: RunningProxy, **fields: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(proxy.client.post("/v1/chat/completions", json=chat(**fields)))


async def both_ask(proxy: RunningProxy, hung: FakeEngine) -> list[asyncio.Task[httpx.Response]]:
    """Two requests at once, one of which hangs."""
    answers = [post(proxy), post(proxy)]
    await until(lambda: hung.calls)
    return answers


@pytest.mark.parametrize("behave", [hang, hang_after_the_head])
async def test_an_unhealthy_engine_gives_back_what_it_has_not_begun_to_answer(behave: Any) -> None:
    """Another engine answers instead of the first-byte timeout; the hung one is told at once."""
    hung = FakeEngine("hung", behave)
    async with beside_a_good_one(hung) as proxy:
        answers = await both_ask(proxy, hung)
        hung.healthy = False
        assert [(await answer).json()["served_by"] for answer in answers] == ["good", "good"]
        await hung.calls[0].gone.wait()
        assert proxy.metric("kvproxy_retries_total", reason="unhealthy") == 1
        assert endpoint(proxy, "a").health.failures == 0
        assert (endpoint(proxy, "a").load.in_flight, endpoint(proxy, "a").waiting) == (0, {})


async def test_an_answer_that_has_begun_is_not_given_back() -> None:
    """From the first byte on the client has it; the stream ends as the engine ends it."""
    go_on = asyncio.Event()

    async def slowly(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b'{"choices":[]}')
        await go_on.wait()
        await event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    slow = FakeEngine("slow", slowly)
    async with beside_a_good_one(slow) as proxy:
        streams = [post(proxy, stream=True), post(proxy, stream=True)]
        await until(lambda: endpoint(proxy, "a").load.in_flight == 1 and not endpoint(proxy, "a").waiting)
        slow.healthy = False
        await become(proxy, "a", Condition.UNHEALTHY)
        go_on.set()
        contents = [(await stream).content for stream in streams]
        assert [b"[DONE]" in content for content in contents].count(True) == 1
        assert proxy.metric("kvproxy_retries_total", reason="unhealthy") == 0


async def test_with_every_endpoint_out_it_waits_until_one_is_back() -> None:
    """Verdicts on all engines are often wrong, and there is nowhere to go."""
    hung, other = FakeEngine("hung", hang), FakeEngine("other")
    async with serve(hung) as a, serve(other) as b, running_proxy({"a": a, "b": b}, health=PROBES) as proxy:
        other.healthy = False
        await become(proxy, "b", Condition.UNHEALTHY)
        answer = post(proxy)
        await until(lambda: hung.calls)
        hung.healthy = False
        await become(proxy, "a", Condition.UNHEALTHY)
        failed = probes_failed(proxy)
        await until(lambda: probes_failed(proxy) > failed + 2)
        assert not answer.done()
        other.healthy = True
        assert (await answer).json()["served_by"] == "other"


async def test_without_budget_it_waits_on() -> None:
    """Failing it would help no client: the engine may yet answer."""
    go_on = asyncio.Event()

    async def late(engine: FakeEngine, call: Call, send: Send) -> None:
        await go_on.wait()
        await answer_ok(engine, call, send)

    slow = FakeEngine("slow", late)
    retry = {"budget": 0, "min_per_second": 0}
    async with beside_a_good_one(slow, retry=retry) as proxy:
        answers = await both_ask(proxy, slow)
        slow.healthy = False
        await become(proxy, "a", Condition.UNHEALTHY)
        go_on.set()
        assert sorted([(await answer).json()["served_by"] for answer in answers]) == ["good", "slow"]


async def test_the_rest_goes_when_the_budget_has_grown() -> None:
    """Each failed probe asks again."""
    hung = FakeEngine("hung", hang)
    retry = {"budget": 0.5, "min_per_second": 0}
    async with beside_a_good_one(hung, retry=retry) as proxy:
        answers = [post(proxy) for _ in range(2)]
        await until(lambda: hung.calls)
        answers += [post(proxy) for _ in range(2)]
        await until(lambda: len(hung.calls) == 2)
        hung.healthy = False
        await until(lambda: proxy.metric("kvproxy_retries_total", reason="unhealthy") == 2)
        assert {(await answer).json()["served_by"] for answer in answers} == {"good"}


@pytest.mark.parametrize(
    ("path", "retry", "refusal"),
    [("/v1/audio/transcriptions", {}, "not_replayable"), ("/v1/chat/completions", {"attempts": 1}, "attempts")],
)
async def test_an_unrepeatable_request_ends_at_once(path: str, retry: dict[str, Any], refusal: str) -> None:
    """With a 504 that says why, and not after ten minutes."""
    hung = FakeEngine("hung", hang)
    async with beside_a_good_one(hung, retry=retry) as proxy:
        asked = [asyncio.create_task(proxy.client.post(path, json=chat())) for _ in range(2)]
        await until(lambda: hung.calls)
        hung.healthy = False
        answers = [await answer for answer in asked]
        assert sorted(answer.status_code for answer in answers) == [200, 504]
        late = next(answer for answer in answers if answer.status_code == 504)
        assert late.json()["error"]["code"] == "unhealthy"
        assert proxy.metric("kvproxy_retries_refused_total", reason=refusal) == 1


async def test_an_upload_that_is_still_on_its_way_ends_too() -> None:
    """The engine hangs while the client sends; what was read of its body is gone, so that is a 504 for it."""
    hung = FakeEngine("hung", hang)
    never = asyncio.Event()

    async def upload() -> AsyncIterator[bytes]:
        yield b"x" * START_BYTES
        await never.wait()

    async with beside_a_good_one(hung) as proxy:
        asked = asyncio.create_task(proxy.client.post("/v1/audio/transcriptions", content=upload(), headers=FORM))
        await until(lambda: endpoint(proxy, "a").waiting)
        hung.healthy = False
        await until(lambda: not endpoint(proxy, "a").waiting)
        await until(lambda: proxy.metric("kvproxy_retries_refused_total", reason="not_replayable") == 1)
        never.set()
        assert (await asked).status_code == 504


async def test_a_drained_engine_that_hangs_gives_back_too() -> None:
    """Draining lets it finish what it has, and it will not finish this."""
    hung = FakeEngine("hung", hang)
    async with beside_a_good_one(hung) as proxy:
        answers = await both_ask(proxy, hung)
        proxy.proxy.clusters["default"].operator.drain_endpoint(EndpointId("a"))
        hung.healthy = False
        assert [(await answer).status_code for answer in answers] == [200, 200]


async def test_an_unhealthy_engine_that_is_removed_gives_back_too() -> None:
    """Requests that had nowhere to go when it became unhealthy go when there is somewhere, though nothing probes it."""
    hung, other = FakeEngine("hung", hang), FakeEngine("other")
    async with serve(hung) as a, serve(other) as b, running_proxy({"a": a, "b": b}, health=PROBES) as proxy:
        other.healthy = False
        await become(proxy, "b", Condition.UNHEALTHY)
        answer = post(proxy)
        await until(lambda: hung.calls)
        hung.healthy = False
        await become(proxy, "a", Condition.UNHEALTHY)
        proxy.proxy.clusters["default"].operator.remove_endpoint(EndpointId("a"))
        assert not answer.done()
        other.healthy = True
        assert (await answer).json()["served_by"] == "other"


async def test_a_removed_engine_that_is_well_finishes_what_it_has() -> None:
    """Removal is no verdict."""
    go_on = asyncio.Event()

    async def late(engine: FakeEngine, call: Call, send: Send) -> None:
        await go_on.wait()
        await answer_ok(engine, call, send)

    slow = FakeEngine("slow", late)
    async with beside_a_good_one(slow) as proxy:
        answers = await both_ask(proxy, slow)
        proxy.proxy.clusters["default"].operator.remove_endpoint(EndpointId("a"))
        go_on.set()
        assert sorted([(await answer).json()["served_by"] for answer in answers]) == ["good", "slow"]


async def test_without_probes_an_ejection_is_the_verdict() -> None:
    """Nothing else will say that it hangs."""

    async def hang_then_die(engine: FakeEngine, call: Call, send: Send) -> None:
        if len(engine.calls) == 1:
            await call.gone.wait()
        raise ConnectionAbortedError

    hung, good = FakeEngine("hung", hang_then_die), FakeEngine("good")
    health = {"active": False, "eject_after": 1}
    async with serve(hung) as a, serve(good) as b, running_proxy({"a": a, "b": b}, health=health) as proxy:
        answers = await both_ask(proxy, hung)
        answers += [post(proxy), post(proxy)]
        assert {(await answer).json()["served_by"] for answer in answers} == {"good"}
        assert proxy.metric("kvproxy_retries_total", reason="unhealthy") == 1


async def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    """Whether the engine becomes unhealthy before or after."""
    hung = FakeEngine("hung", hang)
    async with beside_a_good_one(hung) as proxy:
        answers = await both_ask(proxy, hung)
        for answer in answers:
            answer.cancel()
        await hung.calls[0].gone.wait()
        await until(lambda: endpoint(proxy, "a").load.in_flight == 0)
        assert endpoint(proxy, "a").waiting == {}
        hung.healthy = False
        await become(proxy, "a", Condition.UNHEALTHY)
        assert proxy.metric("kvproxy_retries_total", reason="unhealthy") == 0


async def test_a_client_that_leaves_in_the_moment_of_the_verdict_is_gone() -> None:
    """Two cancellations of one task in the same turn of the loop: no retry for a client that has left."""
    hung, good = FakeEngine("hung", hang), FakeEngine("good")
    async with serve(hung) as a, serve(good) as b, running_proxy({"a": a, "b": b}) as proxy:
        app = asyncio.create_task(ask_in_process(proxy))
        second = asyncio.create_task(ask_in_process(proxy))
        await until(lambda: hung.calls)
        (give_back,) = endpoint(proxy, "a").waiting.values()
        endpoint(proxy, "a").health.record_probe(False, 0.0)
        proxy.proxy.clusters["default"].operator.drain_endpoint(EndpointId("a"))  # the verdict is looked at again
        waiting = app if not app.done() else second
        waiting.cancel()
        give_back()
        assert (await asyncio.gather(app, second, return_exceptions=True)).count(None) == 1
        assert len(good.calls) == 1
        assert (endpoint(proxy, "a").load.in_flight, endpoint(proxy, "a").waiting) == (0, {})
