"""The simulated SGLang over HTTP; what it must answer is from SGLang's sources and its documentation's captures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.sglang_server import SglangApp
from kvproxy.lab.simulator.sglang_settings import EventForm, EventSettings, SglangSettings
from kvproxy.lab.simulator.timing import EngineTiming
from tests.lab.simulator.support import sse_events
from tests.support.loopback import serve
from tests.support.until import until

FAST = EngineSettings(64, 16, token_outputs=True, timing=EngineTiming(time_scale=0.001))
TINY = SglangSettings(model="tiny", context_length=1000, engine=FAST, health_step_s=0.01)
RANK = "x-data-parallel-rank"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 60}], "max_tokens": 3}


@dataclass(frozen=True, slots=True)
class Running:
    app: SglangApp
    client: httpx.AsyncClient

    async def ask(self, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        return await self.client.post(path, json={**CHAT, **fields})


@contextlib.asynccontextmanager
async def sglang(**changes: Any) -> AsyncIterator[Running]:
    app = SglangApp(replace(TINY, **changes), wall_clock=lambda: 1795252968.5, rng=random.Random(1))
    async with app, serve(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield Running(app, client)


async def test_a_chat_and_what_it_reuses_the_second_time() -> None:
    """Usage names the cached tokens where the server was told to report them, and only there."""
    async with sglang() as engine:
        cold, warm = (await engine.ask()).json(), (await engine.ask()).json()
    assert cold["choices"][0]["message"] == warm["choices"][0]["message"]
    assert set(cold["choices"][0]) == {"index", "message", "logprobs", "finish_reason", "matched_stop"}
    assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    async with sglang(enable_cache_report=False) as engine:
        assert (await engine.ask()).json()["usage"]["prompt_tokens_details"] is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_ends_with_usage_where_asked(path: str) -> None:
    """Every other event has none; the role comes first in a chat."""
    async with sglang() as engine:
        answer = await engine.ask(path, prompt="hello", stream=True, stream_options={"include_usage": True})
    *events, done = sse_events(answer.text)
    assert done == "[DONE]"
    assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]
    assert events[-1]["choices"] == []
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    if path.endswith("chat/completions"):
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    async with sglang() as engine:
        plain = sse_events((await engine.ask(stream=True)).text)
    assert all(event["usage"] is None for event in plain[:-1])


async def test_its_own_api_streams_the_whole_text_again_and_again() -> None:
    """And says what was cached in every answer."""
    async with sglang() as engine:
        whole = (await engine.ask("/generate", text="hello", sampling_params={"max_new_tokens": 2})).json()
        by_ids = (await engine.ask("/generate", input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 2})).json()
        events = sse_events((await engine.ask("/generate", text="hello", stream=True)).text)
    assert (whole["meta_info"]["completion_tokens"], whole["meta_info"]["cached_tokens"]) == (3, 0)
    assert by_ids["meta_info"]["prompt_tokens"] == 3
    assert events[-2]["text"].startswith(events[0]["text"])


async def test_errors_are_flat() -> None:
    """Whatever is wrong."""
    async with sglang() as engine:
        for fields, text in (
            ({"messages": [{"role": "user", "content": "word " * 2000}]}, "longer than the model's context length"),
            ({"max_tokens": 990}, "Requested token count exceeds"),
            ({"max_tokens": 0}, "at least 1"),
            ({"messages": []}, "empty conversation"),
        ):
            answer = await engine.ask(**fields)
            body = answer.json()
            assert answer.status_code == body["code"] == 400
            assert body["object"] == "error"
            assert text in body["message"]
        assert (await engine.client.post("/v1/completions", json={"prompt": []})).status_code == 400
        assert (await engine.client.post("/v1/chat/completions", content=b"{")).json()["type"] == "Bad Request"
        assert (await engine.client.post("/v1/chat/completions", content=b"[]")).status_code == 400
        wrong = await engine.client.post("/v1/chat/completions", json=CHAT, headers={"x-data-parallel-rank": "x"})
        assert wrong.status_code == 400
        right = await engine.client.post("/v1/chat/completions", json=CHAT, headers={"x-data-parallel-rank": "0"})
        assert right.status_code == 200
        assert (await engine.client.get("/kv_event_sources")).json() == {"detail": "Not Found"}
        assert (await engine.client.get("/v1/chat/completions")).status_code == 405


async def test_health_runs_a_request_and_ready_does_not() -> None:
    """A dead scheduler is told by all of them."""
    async with sglang() as engine:
        assert [(await engine.client.get(path)).status_code for path in ("/health", "/health_generate", "/ready")] == [
            200, 200, 200,
        ]  # fmt: skip
        assert (await engine.client.get("/sim/state")).json()["running"] == 0
        await engine.client.post("/sim/faults", json={"engine_dead": True})
        for path in ("/health", "/ready"):
            assert (await engine.client.get(path)).status_code == 503
        assert (await engine.ask()).status_code == 500
        assert (await engine.client.post("/sim/faults", json={"no_such": 1})).status_code == 400
    async with sglang(has_ready=False) as engine:
        assert (await engine.client.get("/ready")).status_code == 404


async def test_server_info_under_either_name() -> None:
    """Its arguments twice, and what it made of them."""
    async with sglang() as engine:
        info = (await engine.client.get("/server_info")).json()
        assert (info["page_size"], info["max_total_num_tokens"], info["kv_events"]) == (16, 1024, None)
        assert info["internal_states"][0]["page_size"] == 16
        assert (await engine.client.get("/model_info")).json()["is_generation"] is True
        assert (await engine.client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
    async with sglang(old_names=True, kv_events=EventSettings(described=False, replay=False)) as engine:
        assert (await engine.client.get("/server_info")).status_code == 404
        info = (await engine.client.get("/get_server_info")).json()
    assert "kv_events" not in info
    assert set(json.loads(info["kv_events_config"])) == {"publisher", "endpoint", "topic"}


async def test_tokenize_takes_chats_in_later_releases() -> None:
    """As many as the engine counts."""
    async with sglang() as engine:
        counted = (await engine.ask()).json()["usage"]["prompt_tokens"]
        for path in ("/tokenize", "/v1/tokenize"):
            answer = (await engine.client.post(path, json=CHAT)).json()
            assert answer["count"] == len(answer["tokens"]) == counted
        assert (await engine.client.post("/tokenize", json={"prompt": "hello"})).json()["count"] == 1
        await engine.client.post("/sim/faults", json={"no_tokenize": True})
        assert (await engine.client.post("/tokenize", json=CHAT)).status_code == 404
    async with sglang(tokenizes_chats=False) as engine:
        assert (await engine.client.post("/tokenize", json=CHAT)).status_code == 400


async def test_metrics_have_sglangs_names() -> None:
    """Requests count when they end, a kind of hit from its first one on, and health checks never."""
    async with sglang() as engine:
        await engine.client.get("/health")
        cold = (await engine.client.get("/metrics")).text
        await engine.ask()
        await engine.ask()
        text = (await engine.client.get("/metrics")).text
    assert "cached_tokens_total{" not in cold
    assert 'sglang:max_total_num_tokens{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"} 1024.0' in text
    assert 'sglang:num_requests_total{model_name="tiny"} 2.0' in text
    assert 'cached_tokens_total{cache_source="device",model_name="tiny"}' in text
    assert "process_start_time_seconds" not in text
    async with sglang(enable_metrics=False) as engine:
        assert (await engine.client.get("/metrics")).status_code == 404


@pytest.mark.parametrize(("low_first", "first"), [(False, "urgent"), (True, "idle")])
async def test_the_largest_priority_goes_first(low_first: bool, first: str) -> None:
    """Unless told otherwise, and only with the flag."""
    one = replace(FAST, max_sequences=1, timing=EngineTiming(decode_step_s=1.0))
    order = {"enable_priority_scheduling": True, "schedule_low_priority_values_first": low_first}
    async with sglang(engine=one, **order) as engine:
        ended: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await engine.ask(messages=[{"role": "user", "content": name}], priority=priority, max_tokens=1)
            ended.append(name)

        running = asyncio.create_task(engine.ask(max_tokens=900))
        await until(lambda: engine.app.load.running == 1)
        waiting = [asyncio.create_task(ask("idle", 1)), asyncio.create_task(ask("urgent", 9))]
        await until(lambda: engine.app.load.waiting == 2)
        running.cancel()
        await asyncio.gather(*waiting)
        assert (await engine.ask(priority=True)).status_code == 400
    assert ended[0] == first


async def test_faults_strike_as_in_the_other_engine() -> None:
    """An error before anything was sent, one in mid-stream, a cut, a full queue."""
    async with sglang() as engine:
        await engine.client.post("/sim/faults", json={"fail_next": 1, "fail_status": 502})
        assert (await engine.ask()).status_code == 502
        await engine.client.post("/sim/faults", json={"busy_next": 1})
        assert (await engine.ask()).json()["message"] == "The request queue is full."
        await engine.client.post("/sim/faults", json={"cut_next": 1})
        with pytest.raises(httpx.RemoteProtocolError):
            await engine.ask(stream=True)
    async with sglang(max_queued_requests=0) as engine:
        assert (await engine.ask()).status_code == 503


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_a_scheduler_that_dies_ends_a_stream_with_an_error(path: str) -> None:
    """Status 200 went out long before."""
    slow = replace(FAST, timing=EngineTiming(decode_step_s=0.1))
    async with sglang(engine=slow) as engine:
        body = {**CHAT, "text": "hello", "stream": True, "max_tokens": 900}
        async with engine.client.stream("POST", path, json=body) as answer:
            lines = answer.aiter_lines()
            assert "data" in await anext(lines)
            await engine.client.post("/sim/faults", json={"engine_dead": True})
            rest = "".join([line async for line in lines])
        whole = asyncio.create_task(engine.ask())
        assert '"error":{"object":"error"' in rest.replace(" ", "")
        assert (await whole).status_code == 500


async def test_a_client_that_leaves_frees_the_engine() -> None:
    """At once, whatever it asked for."""
    slow = replace(FAST, timing=EngineTiming(time_scale=50.0))
    async with sglang(engine=slow) as engine:
        leaving = asyncio.create_task(engine.ask())
        await until(lambda: engine.app.load.running == 1)
        leaving.cancel()
        await asyncio.wait([leaving])
        await until(lambda: engine.app.requests[-1]["outcome"] == "disconnected")
        assert (await engine.client.get("/sim/state")).json()["running"] == 0


@pytest.mark.parametrize("form", list(EventForm))
@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
async def test_events_come_one_a_page(form: EventForm, algorithm: str | None) -> None:
    """Signed hashes chained by parents; with EAGLE pairs, each page's last one with the next page's first token."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        async with sglang(kv_events=EventSettings(form=form), speculative_algorithm=algorithm) as engine:
            assert engine.app.publisher is not None
            socket.connect(engine.app.publisher.endpoint)
            socket.subscribe(b"")
            events: list[Any] = []
            while not events:
                assert (await engine.client.post("/flush_cache")).status_code == 200
                await engine.ask(cache_salt="s")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        topic, _, payload = await socket.recv_multipart()
                        events = msgspec.msgpack.decode(payload)[1]
            tokens = (await engine.client.post("/tokenize", json=CHAT)).json()["tokens"]
    finally:
        context.destroy(linger=0)
    assert topic == b""
    kind = (lambda event: event["type"]) if form is EventForm.MAP else (lambda event: event[0])
    pages = [event for event in events if kind(event) == "BlockStored"]
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    fields = [dict(zip(names, page, strict=True)) if isinstance(page, list) else page for page in pages]
    assert [page["parent_block_hash"] for page in fields[1:]] == [page["block_hashes"][0] for page in fields[:-1]]
    assert all(len(page["block_hashes"]) == 1 and len(page["token_ids"]) == page["block_size"] for page in fields)
    if algorithm is None:
        assert [token for page in fields for token in page["token_ids"]] == tokens[: 16 * len(fields)]
    else:
        pairs = [pair for page in fields for pair in page["token_ids"]]
        assert pairs[: len(tokens) - 1] == [list(pair) for pair in pairwise(tokens)][: len(pairs)]
    assert ("cache_salt" in fields[0]) is (form is EventForm.MAP)


async def test_a_running_request_keeps_the_cache() -> None:
    """400, and nothing is dropped; removed pages are announced, too."""
    slow = replace(FAST, timing=EngineTiming(decode_step_s=1.0))
    async with sglang(engine=slow, kv_events=EventSettings()) as engine:
        asked = asyncio.create_task(engine.ask(max_tokens=900))
        await until(lambda: engine.app.load.running == 1)
        assert (await engine.client.get("/flush_cache")).status_code == 400
        asked.cancel()
        await asyncio.wait([asked])


MESSAGES = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hello " * 60}]}


async def test_messages_count_what_was_not_cached() -> None:
    """As the chat it is; cached tokens stand beside it only where there are some, and never without the flag."""
    async with sglang() as engine:
        cold, warm = [(await engine.ask("/v1/messages", **MESSAGES)).json() for _ in range(2)]
        counted = (await engine.client.post("/v1/messages/count_tokens", json=MESSAGES)).json()["input_tokens"]
        chat = (await engine.ask()).json()["usage"]["prompt_tokens"]
    assert (cold["type"], cold["role"], cold["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert cold["usage"] == {"input_tokens": counted, "output_tokens": 3}
    assert counted == chat
    assert warm["usage"]["cache_read_input_tokens"] >= 48
    assert warm["usage"]["input_tokens"] + warm["usage"]["cache_read_input_tokens"] == counted
    async with sglang(enable_cache_report=False) as engine:
        for _ in range(2):
            usage = (await engine.ask("/v1/messages", **MESSAGES)).json()["usage"]
        assert usage == {"input_tokens": counted, "output_tokens": 3}


async def test_messages_as_a_stream() -> None:
    """Anthropic's events; the prompt is counted in the first, and no `[DONE]` comes."""
    async with sglang() as engine:
        await engine.ask("/v1/messages", **MESSAGES)
        events = sse_events((await engine.ask("/v1/messages", **MESSAGES, stream=True)).text)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] >= 48
    assert events[-2]["usage"] == {"output_tokens": 3}


async def test_a_billing_header_stays_in_the_prompt() -> None:
    """In a block of `system`, and in a chat's system message: another one is another prompt from there on."""
    header = "x-anthropic-billing-header: cch={:05x};"
    async with sglang() as engine:
        read = []
        for number in range(2):
            system = [
                {"type": "text", "text": header.format(number * 7919)},
                {"type": "text", "text": "You are. " * 60},
            ]
            usage = (await engine.ask("/v1/messages", **{**MESSAGES, "system": system})).json()["usage"]
            said = [{"role": "system", "content": header.format(number * 7919 + 1) + "\n" + "I am. " * 60}]
            chat = (await engine.ask(messages=said)).json()["usage"]["prompt_tokens_details"]
            read.append((usage.get("cache_read_input_tokens", 0), chat["cached_tokens"]))
    assert all(tokens <= 32 for tokens in read[1])


async def test_errors_of_messages_are_anthropics() -> None:
    """Whatever is wrong, and without what is inside; in mid-stream too."""
    async with sglang() as engine:
        long = [{"role": "user", "content": "word " * 2000}]
        for fields, status, text in (
            ({"messages": long}, 400, "longer than the model's context length"),
            ({"messages": "x"}, 400, "valid list"),
            ({"messages": [{"role": "user"}]}, 400, "content"),
            ({"messages": []}, 400, "empty conversation"),
        ):
            answer = await engine.ask("/v1/messages", **{**MESSAGES, **fields})
            assert answer.status_code == status
            assert answer.json()["type"] == "error"
            assert text in answer.json()["error"]["message"]
        await engine.client.post("/sim/faults", json={"engine_dead": True})
        answer = await engine.ask("/v1/messages", **MESSAGES)
        assert answer.status_code == 500
        assert answer.json()["error"] == {"type": "api_error", "message": "Internal server error"}


async def test_ranks_take_turns_unless_one_is_asked_for() -> None:
    """By the header before the body, under either name of it; `/generate` reads the body, Messages the header."""
    async with sglang(dp_size=2) as engine:

        async def ask(path: str = "/v1/completions", *, header: str | None = None, **fields: Any) -> httpx.Response:
            body = {"model": "tiny", "max_tokens": 1, "prompt": "hello", "text": "hello", **fields}
            return await engine.client.post(path, json=body, headers={} if header is None else {RANK: header})

        def served() -> int:
            return int(engine.app.requests[-1]["rank"])

        ranks = []
        for fields in ({}, {}, {"header": "1"}, {"header": "1"}, {"routed_dp_rank": 0}, {"data_parallel_rank": 1},
                       {"header": "0", "routed_dp_rank": 1}, {"path": "/generate", "routed_dp_rank": 1}):  # fmt: skip
            assert (await ask(**fields)).status_code == 200
            ranks.append(served())
        assert ranks == [0, 1, 1, 1, 0, 1, 0, 1]
        await ask("/generate", header="1")
        assert served() == 0
        for fields, text in (
            ({"header": "2"}, "routed_dp_rank=2 out of range [0, 2)"),
            ({"header": "-1"}, "routed_dp_rank=-1 out of range [0, 2)"),
            ({"header": "x"}, "must be an integer"),
            ({"routed_dp_rank": "x"}, "valid integer"),
        ):
            refused = await ask(**fields)
            assert refused.status_code == 400
            assert text in refused.json()["message"]
        one = {"messages": MESSAGES["messages"], "routed_dp_rank": 7}
        assert (await ask("/v1/messages", header="1", **one)).status_code == 200
        assert served() == 1
        wrong = await ask("/v1/messages", header="5", **one)
        assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
        assert "out of range" in wrong.json()["error"]["message"]


async def test_each_rank_has_a_cache_and_figures_of_its_own() -> None:
    """Schedulers are told apart by a label, the tokenizer counts for both; a rank's events have its port and number."""
    async with sglang(dp_size=2, kv_events=EventSettings()) as engine:
        for _ in range(2):
            cached = [
                (await engine.client.post("/v1/chat/completions", json=CHAT, headers={RANK: "1"})).json()["usage"]
            ]
        other = (await engine.client.post("/v1/chat/completions", json=CHAT, headers={RANK: "0"})).json()["usage"]
        text = (await engine.client.get("/metrics")).text
        info = (await engine.client.get("/server_info")).json()
        first, second = [rank.publisher for rank in engine.app.ranks]
        assert first is not None
        assert second is not None
        ports = [int(one.endpoint.rpartition(":")[2]) for one in (first, second)]
        assert (await engine.client.post("/flush_cache")).status_code == 200
    assert cached[0]["prompt_tokens_details"]["cached_tokens"] > other["prompt_tokens_details"]["cached_tokens"] == 0
    assert text.count("sglang:num_pages{dp_rank=") == 2
    assert 'sglang:num_requests_total{model_name="tiny"} 3.0' in text
    assert 'sglang:realtime_tokens_total{dp_rank="1"' in text
    assert (info["dp_size"], len(info["internal_states"]), info["kv_events"]["dp_size"]) == (2, 2, 2)
    assert ports == [info["kv_events"]["endpoint_port_base"], info["kv_events"]["endpoint_port_base"] + 1]
    assert (first.settings.rank, second.settings.rank) == (0, 1)
    assert second.published > 0


async def test_a_fleet_may_have_both_kinds() -> None:
    """Each by its settings."""
    async with Fleet(FleetSettings({"s": TINY}, controller=None)) as fleet:
        assert isinstance(fleet.engines["s"], SglangApp)


def test_a_server_needs_every_token_reported() -> None:
    """Streams are made of them."""
    with pytest.raises(ValueError, match="token_outputs"):
        SglangSettings(engine=EngineSettings())
