"""Requests that go on from a response by its id: only the engine that gave it knows the history."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.cluster.endpoint import Condition
from tests.support.fake_engine import Call, FakeEngine, event, reply, start_stream
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy

PATH = "/v1/responses"
NOT_FOUND = {"error": {"message": "Response with id 'x' not found.", "type": "NotFoundError", "code": 404}}


class Storing:
    """An engine's responses API with its store, in vLLM's words."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.stored: set[str] = set()

    async def __call__(self, engine: FakeEngine, call: Call, send: Send) -> None:
        body = json.loads(call.body)
        before = body.get("previous_response_id")
        if before is not None and before not in self.stored:
            await reply(send, 404, json.dumps(NOT_FOUND).encode())
            return
        identity = f"resp_{engine.name}{next(self._numbers)}"
        self.stored.add(identity)
        cached = {"cached_tokens": 3984 if before else 0}
        usage = {"input_tokens": 4000, "input_tokens_details": cached, "output_tokens": 20}
        response = {"id": identity, "created_at": 1, "object": "response", "usage": None}
        if not body.get("stream"):
            await reply(send, 200, json.dumps({**response, "usage": usage}).encode())
            return
        await start_stream(send)
        await event(send, json.dumps({"response": response, "type": "response.created"}).encode())
        done = {"response": {**response, "usage": usage}, "type": "response.completed"}
        await send({"type": "http.response.body", "body": b"data: " + json.dumps(done).encode() + b"\n\n"})


@contextlib.asynccontextmanager
async def gateway(**config: Any) -> AsyncIterator[tuple[RunningProxy, list[FakeEngine]]]:
    """Three engines that keep their responses to themselves."""
    engines = [FakeEngine(name, Storing()) for name in "abc"]
    async with contextlib.AsyncExitStack() as stack:
        urls = {engine.name: await stack.enter_async_context(serve(engine)) for engine in engines}
        filters = [{"inference_request": {}}, {"kvcache": {"engine_metrics_interval": 0}}, {"router": {}}]
        yield await stack.enter_async_context(running_proxy(urls, filters=filters, **config)), engines


async def ask(proxy: RunningProxy, *, stream: bool = False, **fields: Any) -> tuple[httpx.Response, str]:
    """Send a request and return the answer and its id."""
    answer = await proxy.client.post(PATH, json={"model": "m", "input": "hi", "stream": stream, **fields})
    return answer, answer.text.partition('"id": "')[2].partition('"')[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_aware_goes_where_the_response_is(stream: bool) -> None:
    """Turn by turn, and for a fork from an earlier turn."""
    async with gateway(policy="kv_aware") as (proxy, _):
        first, identity = await ask(proxy, stream=stream)
        home, root = first.headers["x-kvproxy-endpoint"], identity
        for _ in range(6):
            answer, identity = await ask(proxy, stream=stream, previous_response_id=identity)
            assert (answer.status_code, answer.headers["x-kvproxy-endpoint"]) == (200, home)
        fork, _ = await ask(proxy, stream=stream, previous_response_id=root)
        assert (fork.status_code, fork.headers["x-kvproxy-endpoint"]) == (200, home)
        labels = {"cluster": "default", "endpoint": home, "source": "session"}
        assert proxy.metric("kvproxy_kvcache_predicted_tokens_total", **labels) == 7 * 4000


async def test_an_engine_that_does_not_know_it_is_not_the_last_one_asked() -> None:
    """Wherever a policy sends it: the answer is that of the engine that has the history, and no engine is blamed."""
    async with gateway(policy="random", client_policies=["kv_aware"]) as (proxy, _):
        _, identity = await ask(proxy)
        answers = [(await ask(proxy, previous_response_id=identity))[0] for _ in range(12)]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.headers["x-kvproxy-endpoint"] for answer in answers}) == 1
        assert proxy.metric("kvproxy_retries_total", reason="history_elsewhere") > 0
        now = time.monotonic()
        conditions = {endpoint.condition(now) for endpoint in proxy.proxy.clusters["default"].endpoints}
        assert conditions == {Condition.UP}


async def test_engines_that_hold_the_beginning_alone_are_not_asked_for_the_rest() -> None:
    """Three histories begin alike, each on an engine of its own: every one is found where it is."""
    beginning = "what all of them begin with " * 200
    async with gateway(policy="round_robin", client_policies=["kv_aware"]) as (proxy, _):
        begun = [await ask(proxy, input=beginning) for _ in range(3)]
        homes = [answer.headers["x-kvproxy-endpoint"] for answer, _ in begun]
        assert len({*homes}) == 3
        for _ in range(2):
            for home, (_, identity) in zip(homes, begun, strict=True):
                answer, _ = await ask(proxy, previous_response_id=identity)
                assert (answer.status_code, answer.headers["x-kvproxy-endpoint"]) == (200, home)


async def test_a_response_of_none_of_them_is_the_engine_s_404() -> None:
    """Once: where no endpoint is known to have it, none is tried after another."""
    async with gateway(policy="kv_aware") as (proxy, engines):
        answer, _ = await ask(proxy, previous_response_id="resp_of_another_proxy")
        assert answer.status_code == 404
        assert answer.json() == NOT_FOUND
        assert sum(len(engine.calls) for engine in engines) == 1


async def test_without_retries_the_404_is_the_answer() -> None:
    """`retry: {attempts: 1}` holds here too."""
    async with gateway(policy="random", client_policies=["kv_aware"], retry={"attempts": 1}) as (proxy, _):
        _, identity = await ask(proxy)
        answers = [(await ask(proxy, previous_response_id=identity))[0] for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200, 404}
        assert proxy.metric("kvproxy_retries_refused_total", reason="attempts") > 0


async def test_a_response_that_is_not_stored_is_not_remembered() -> None:
    """Codex sends its whole history each time, with `store: false`."""
    async with gateway(policy="kv_aware") as (proxy, _):
        await ask(proxy, store=False)
        assert proxy.metric("kvproxy_kvcache_last_served", what="responses") == 0
        await ask(proxy)
        assert proxy.metric("kvproxy_kvcache_last_served", what="responses") == 1
