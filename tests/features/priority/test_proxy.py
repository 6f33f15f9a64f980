"""Engine priority through a whole proxy: what engines are sent, what is cut out, and what is found out about them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.features.priority.engine_priority import ClusterPriority
from kvproxy.lab.simulator.engine_io import EngineSettings, Scheduling
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_server import VllmApp
from kvproxy.proxy.listener.server import serve
from tests.features.priority.support import known_of
from tests.lab.simulator.support import TINY
from tests.support.fake_engine import Call, FakeEngine, answer_ok, event, reply, start_stream
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until

ON: dict[str, Any] = {"policy": "kv_aware", "engine_priority": "on"}
REQUESTS = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": "m", "prompt": "hello"},
    "/v1/messages": {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"model": "m", "input": "hello"},
}


@contextlib.asynccontextmanager
async def one_engine(engine: FakeEngine, **config: Any) -> AsyncIterator[RunningProxy]:
    """Yield a proxy in front of it."""
    async with serve(engine) as url, running_proxy({"a": url}, **config) as proxy:
        yield proxy


def sent(call: Call) -> dict[str, Any]:
    """Return the body an engine got, in which nothing may stand twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    body: dict[str, Any] = json.loads(call.body, object_pairs_hook=once)
    return body


def state(proxy: RunningProxy, name: str = "a") -> str:
    """Return the finding about an engine."""
    endpoints = {str(each.id): each for each in proxy.proxy.clusters["default"].endpoints}
    return known_of(endpoints[name]).state.value


@pytest.mark.parametrize("path", REQUESTS)
async def test_the_member_is_written_in_front_and_every_other_byte_stays(path: str) -> None:
    """In all the APIs that generate, whatever the spelling of the rest."""
    engine = FakeEngine("a")
    body = b' { "weird" : 1.50e0 , ' + json.dumps(REQUESTS[path]).encode()[1:]
    async with one_engine(engine, **ON) as proxy:
        answer = await proxy.client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    number = json.loads(engine.calls[0].body)["priority"]
    assert type(number) is int
    assert number > 0
    assert engine.calls[0].body == body.replace(b"{", b'{"priority":%d,' % number, 1)


async def test_without_the_setting_bodies_stay_as_they_are() -> None:
    """A client's own priority too."""
    engine = FakeEngine("a")
    async with one_engine(engine, policy="kv_aware") as proxy:
        await proxy.client.post("/v1/chat/completions", json=chat(priority=7))
    assert json.loads(engine.calls[0].body)["priority"] == 7


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
async def test_requests_without_generation_carry_none(path: str) -> None:
    """Nor does what is no inference request."""
    engine = FakeEngine("a")
    async with one_engine(engine, **ON) as proxy:
        await proxy.client.post(path, json={"model": "m", "input": "hello"})
    assert b"priority" not in engine.calls[0].body


async def test_a_long_prompt_comes_after_a_short_one_and_later_ones_after_earlier_ones() -> None:
    """Own work and arrival are what the number is made of."""
    engine = FakeEngine("a")
    async with one_engine(engine, **ON) as proxy:
        for content in ("word " * 30_000, "hello", "hello"):
            await proxy.client.post("/v1/chat/completions", json=chat(content))
    long, short, later = (sent(call)["priority"] for call in engine.calls)
    assert short < long
    assert short <= later


async def test_sglang_gets_the_larger_number_for_the_more_urgent() -> None:
    """Its order is the other way round; an endpoint may differ from its cluster in it."""
    engine = FakeEngine("a")
    async with serve(engine) as url:
        endpoints = [{"id": "a", "url": url, "engine_priority_order": "highest_first"}]
        async with running_proxy(endpoints, **ON) as proxy:
            for content in ("word " * 30_000, "hello"):
                await proxy.client.post("/v1/chat/completions", json=chat(content))
    long, short = (sent(call)["priority"] for call in engine.calls)
    assert long < short < 0


@pytest.mark.parametrize("spelling", ['"priority"', '"prior\\u0069ty"'])
async def test_an_untrusted_clients_own_priority_is_cut_out(spelling: str) -> None:
    """In every spelling; a duplicate would win."""
    engine = FakeEngine("a")
    body = f'{{"model":"m",{spelling}:-999,"prompt":"x",{spelling}:null}}'
    async with one_engine(engine, **ON) as proxy:
        answer = await proxy.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert sent(engine.calls[0])["priority"] > 0


async def test_a_trusted_clients_own_priority_counts_as_its_class() -> None:
    """As vLLM has it, the lower first: it moves the number by seconds, and is not what is sent."""
    engine = FakeEngine("a")
    trusting = ["inference_request", "kvcache", {"router": {"trust_clients": True}}]
    async with one_engine(engine, **ON, filters=trusting) as proxy:
        for own in (None, -2, "3", 100_000):
            fields = {} if own is None else {"priority": own}
            answer = await proxy.client.post("/v1/chat/completions", json=chat(**fields))
            assert answer.status_code == 200
        refused = await proxy.client.post("/v1/chat/completions", json=chat(priority=1.5))
    plain, ahead, behind, far = (sent(call)["priority"] for call in engine.calls)
    assert plain - 6_000 - 50 < ahead < plain - 4_000
    assert plain + 9_000 - 50 < behind < plain + 11_000
    assert plain + 300_000 - 50 < far < plain + 302_000
    assert refused.status_code == 400
    assert "no integer" in refused.json()["error"]["message"]


async def test_the_priority_header_moves_the_number() -> None:
    """The same scale as in the router queue, which need not be on for it."""
    engine = FakeEngine("a")
    queue = {"enabled": False, "priority_header": "x-priority"}
    async with one_engine(engine, **ON, queue=queue) as proxy:
        for level in ("0", "10"):
            await proxy.client.post("/v1/chat/completions", json=chat(), headers={"x-priority": level})
    plain, urgent = (sent(call)["priority"] for call in engine.calls)
    assert plain - 30_000 - 50 < urgent < plain - 28_000


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_trusted_agents_priority_counts_as_its_class(trusted: bool) -> None:
    """By the hints of vLLM's router and of Dynamo, the larger first."""
    engine = FakeEngine("a")
    filters = ["inference_request", "kvcache", {"router": {"trust_clients": trusted}}]
    programs = [{"program_id": "p"}, {"program_id": "p", "priority": 10}, {"program_id": "p", "priority": -1000}]
    async with one_engine(engine, **ON, filters=filters) as proxy:
        for program in programs:
            body = chat(vllm_xargs={"agentic_context": program})
            assert (await proxy.client.post("/v1/chat/completions", json=body)).status_code == 200
        body = chat(nvext={"agent_hints": {"priority": 10}})
        assert (await proxy.client.post("/v1/chat/completions", json=body)).status_code == 200
    plain, ahead, behind, dynamo = (sent(call)["priority"] for call in engine.calls)
    seconds = 1000 if trusted else 0
    for number, levels in ((ahead, 10), (dynamo, 10), (behind, -100)):
        assert abs(plain - 3 * levels * seconds - number) < 2_000


async def test_a_greedy_tenant_comes_later() -> None:
    """Its grants beyond the others' count as seconds."""
    engine = FakeEngine("a")
    keys = [{"key": f"key-of-{name}", "name": name} for name in ("greedy", "polite")]
    filters = [{"auth": {"keys": keys}}, "inference_request", {"kvcache": {}}, "router"]
    async with one_engine(engine, **ON, filters=filters) as proxy:

        async def ask(tenant: str, content: str) -> int:
            headers = {"authorization": f"Bearer key-of-{tenant}"}
            answer = await proxy.client.post("/v1/chat/completions", json=chat(content), headers=headers)
            assert answer.status_code == 200
            return int(sent(engine.calls[-1])["priority"])

        await ask("polite", "hello")
        for number in range(3):
            await ask("greedy", f"{number}" + "word " * 20_000)
        told = proxy.proxy.clusters["default"].addition
        assert isinstance(told, ClusterPriority)
        told._scale._turns._refresh(proxy.proxy.clock() + 1.0)  # what a second later any request would do
        greedy, polite = await ask("greedy", "hello"), await ask("polite", "hello")
    assert polite < greedy - 500


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"message": "Got priority 17 but Priority scheduling is not enabled.", "code": 400}),
        (422, {"detail": [{"loc": ["body", "priority"], "msg": "Extra inputs are not permitted"}]}),
        (503, {"message": "Using priority is disabled for this server. Please send a new request without a priority."}),
    ],
)
async def test_an_engine_that_refuses_the_field_is_asked_again_without(status: int, error: dict[str, Any]) -> None:
    """At once, on the same engine, unseen by the client; from then on it is sent none."""

    async def refuse(engine: FakeEngine, call: Call, send: Send) -> None:
        if b'"priority"' in call.body:
            await reply(send, status, json.dumps({"error": error}).encode())
        else:
            await answer_ok(engine, call, send)

    engine = FakeEngine("a", refuse)
    async with one_engine(engine, **ON) as proxy:
        for _ in range(2):
            answer = await proxy.client.post("/v1/chat/completions", json=chat())
            assert answer.status_code == 200
        assert state(proxy) == "refused"
        assert proxy.proxy.clusters["default"].endpoints[0].health.failures == 0
        # another process may know the field
        known_of(proxy.proxy.clusters["default"].endpoints[0]).process_replaced()
        await proxy.client.post("/v1/chat/completions", json=chat())
    assert [b'"priority"' in call.body for call in engine.calls] == [True, False, False, True, False]


async def test_an_engine_that_refuses_it_in_a_stream_is_asked_again_too() -> None:
    """SGLang's stream has begun with 200 when its scheduler aborts the request."""

    async def refuse(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        if b'"priority"' in call.body:
            message = "Using priority is disabled for this server."
            await event(send, json.dumps({"error": {"message": message, "code": 503}}).encode())
        else:
            await event(send, b'{"choices":[{"delta":{"content":"x"}}]}')
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    engine = FakeEngine("a", refuse)
    async with one_engine(engine, **ON) as proxy:
        answer = await proxy.client.post("/v1/chat/completions", json=chat(stream=True))
        assert state(proxy) == "refused"
    assert answer.status_code == 200
    assert "disabled" not in answer.text
    assert '"content":"x"' in answer.text


async def test_a_request_that_is_wrong_anyway_turns_nothing_off() -> None:
    """A client could make an engine's error name the field: only an engine that takes the same request without it has
    refused it."""

    async def refuse(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 400, b'{"error":{"message":"no such tool: priority","code":400}}')

    engine = FakeEngine("a", refuse)
    async with one_engine(engine, **ON) as proxy:
        answer = await proxy.client.post("/v1/chat/completions", json=chat())
        assert state(proxy) == "accepted"
    assert answer.status_code == 400
    assert len(engine.calls) == 2


@pytest.mark.parametrize("size", [100, 20_000, 200_000, 3_000_000])
async def test_a_body_of_any_size_arrives_whole(size: int) -> None:
    """Small ones are copied, longer ones go in two buffers, the longest in slices behind their head."""
    engine = FakeEngine("a")
    async with one_engine(engine, **ON) as proxy:
        answer = await proxy.client.post("/v1/chat/completions", json=chat("x" * size))
    assert answer.status_code == 200
    body = sent(engine.calls[0])
    assert body.pop("priority") > 0
    assert body == chat("x" * size)


async def test_the_next_attempt_has_a_number_of_its_own() -> None:
    """And an engine that is told nothing gets the body as it was."""

    async def die(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 503, b'{"error":{"message":"busy","code":503}}')

    engines = {"a": FakeEngine("a", die), "b": FakeEngine("b")}
    async with serve(engines["a"]) as a, serve(engines["b"]) as b:
        endpoints = [{"id": "a", "url": a, "weight": 1000}, {"id": "b", "url": b, "engine_priority": "off"}]
        async with running_proxy(endpoints, **ON) as proxy:
            for _ in range(3):
                answer = await proxy.client.post("/v1/chat/completions", json=chat())
                assert answer.status_code == 200
    assert engines["a"].calls
    assert all(sent(call)["priority"] > 0 for call in engines["a"].calls)
    assert all("priority" not in sent(call) for call in engines["b"].calls)


@pytest.mark.parametrize("scheduling", list(Scheduling))
async def test_the_simulated_server_schedules_by_it(scheduling: Scheduling) -> None:
    """As real vLLM started for it; under fcfs the field is taken and has no effect."""
    timing = EngineTiming(decode_step_s=1.0)
    engine = EngineSettings(4096, 16, max_sequences=1, timing=timing, token_outputs=True, scheduling=scheduling)
    body = {"model": "tiny", "prompt": "word " * 20, "max_tokens": 1}
    ended: list[int] = []

    async def ask(client: httpx.AsyncClient, priority: int) -> None:
        answer = await client.post("/v1/completions", json=body | {"priority": priority})
        assert answer.status_code == 200
        ended.append(priority)

    async with (
        VllmApp(replace(TINY, engine=engine)) as app,
        serve(app) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        simulated = app.state.runner.engine
        running = asyncio.create_task(client.post("/v1/completions", json=body | {"max_tokens": 900}))
        await until(lambda: simulated.load.running == 1)
        asking = []
        for waiting, number in enumerate((3, 1, 2), start=1):
            asking.append(asyncio.create_task(ask(client, number)))
            await until(lambda most=waiting: simulated.load.waiting == most)
        running.cancel()
        await asyncio.gather(*asking)
    assert ended == ([1, 2, 3] if scheduling is Scheduling.PRIORITY else [3, 1, 2])


@pytest.mark.parametrize("priority", [1.5, None, "high"])
async def test_the_simulated_server_wants_an_integer(priority: object) -> None:
    """400, as real vLLM answers."""
    async with (
        VllmApp(TINY) as app,
        serve(app) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "priority": priority})
    assert answer.status_code == 400
    assert "Input should be a valid integer" in answer.json()["error"]["message"]


async def test_an_older_server_refuses_it_and_the_client_does_not_notice() -> None:
    """Under fcfs with a version that takes the field only where it schedules by it."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    async with (
        VllmApp(replace(TINY, refuse_priority=True)) as app,
        serve(app) as url,
        running_proxy({"a": url}, **ON) as proxy,
    ):
        answer = await proxy.client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert state(proxy) == "refused"


async def test_an_engine_that_came_back_is_another_one() -> None:
    """Its probes failed and pass again: what was known of it is void."""
    engine = FakeEngine("a")
    probing = {"interval": "20ms", "unhealthy_threshold": 1}
    async with one_engine(engine, **ON, health=probing) as proxy:
        endpoint = proxy.proxy.clusters["default"].endpoints[0]
        await until(lambda: endpoint.health.is_healthy)
        known_of(endpoint).record_refusal()
        engine.healthy = False
        await until(lambda: not endpoint.health.is_healthy)
        assert state(proxy) == "refused"
        engine.healthy = True
        await until(lambda: endpoint.health.is_healthy)
        assert state(proxy) == "accepted"
