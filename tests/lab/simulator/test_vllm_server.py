"""The simulated vLLM as a client, a router or an operator meets it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvproxy.cache.clients.engine_metrics import parse_engine_metrics
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.lab.simulator.vllm_state import Prefilled
from tests.lab.simulator.support import FAST, TINY, Running, engine, slow, sse_events
from tests.support.until import until
from tests.support.vllms.scale_out import add_scale_out

LONG = {"messages": [{"role": "user", "content": "word " * 150}], "max_tokens": 2}


async def chat(running: Running, **changes: Any) -> dict[str, Any]:
    """Return a chat answered whole."""
    reply = await running.client.post("/v1/chat/completions", json={**LONG, **changes})
    body: dict[str, Any] = reply.raise_for_status().json()
    return body


def text_of(events: list[Any]) -> str:
    """Return the words of a streamed chat."""
    chunks = [event["choices"][0]["delta"] for event in events if event != "[DONE]" and event.get("choices")]
    return "".join(delta.get("content", "") for delta in chunks)


async def settled(running: Running) -> dict[str, Any]:
    """Return the state once the engine has nothing to run."""
    while True:
        state = await running.state()
        if state["running"] == state["waiting"] == state["in_flight"] == 0:
            return state


async def test_usage_tells_what_the_cache_gave() -> None:
    """First time created, second time cached; both in whole blocks."""
    async with engine() as running:
        first, second = (await chat(running))["usage"], (await chat(running))["usage"]
    blocks = first["prompt_tokens"] // 32 * 32
    assert first["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "created_cache_tokens": blocks,
        "multimodal_tokens": None,
    }
    assert second["prompt_tokens_details"]["cached_tokens"] == blocks
    assert second["prompt_tokens_details"]["created_cache_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_message_that_is_no_object_is_the_clients_mistake(path: str) -> None:
    """400, which tells a router that no engine would answer otherwise."""
    async with engine() as running:
        reply = await running.client.post(
            path, json={"messages": [{"role": "user", "content": "x"}, 1], "max_tokens": 1}
        )
    assert reply.status_code == 400
    assert "messages.1" in reply.text


async def test_without_the_flag_usage_has_no_details() -> None:
    """`--enable-prompt-tokens-details` is off by default in vLLM: a router must live without."""
    async with engine(enable_prompt_tokens_details=False) as running:
        assert (await chat(running))["usage"]["prompt_tokens_details"] is None
        body = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
        events = sse_events((await running.client.post("/v1/chat/completions", json=body)).text)
    assert "prompt_tokens_details" not in events[-2]["usage"]


async def test_the_next_turn_finds_prompt_and_answer_in_the_cache() -> None:
    """The model's answer is cached too, and tokenizes back to the same ids."""
    async with engine() as running:
        first = await chat(running, max_tokens=100)
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        turns = [*LONG["messages"], answer, {"role": "user", "content": "and now?"}]
        second = await chat(running, messages=turns)
    said = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == said // 32 * 32


async def test_salt_and_lora_keep_prefixes_apart() -> None:
    """Same text under another tenant or adapter: nothing is shared."""
    async with engine(loras=("lora-a",)) as running:
        await chat(running)
        salted = await chat(running, cache_salt="tenant-a")
        adapted = await chat(running, model="lora-a")
        again = await chat(running, cache_salt="tenant-a")
        rows = (await running.client.get("/v1/models")).json()["data"]
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert adapted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert [(row["id"], row["parent"], row["max_model_len"]) for row in rows] == [
        ("tiny", None, 8192),
        ("lora-a", "tiny", None),
    ]


async def test_streamed_and_whole_answers_are_the_same_words() -> None:
    """The answer depends on the prompt alone."""
    async with engine() as running:
        whole = await chat(running, max_tokens=20)
        reply = await running.client.post("/v1/chat/completions", json={**LONG, "max_tokens": 20, "stream": True})
    assert text_of(sse_events(reply.text)) == whole["choices"][0]["message"]["content"]


async def test_headers_come_before_the_prefill_and_data_after_it() -> None:
    """A router may still change its mind between the two."""
    async with (
        engine(engine=slow(prefill_step_s=30.0)) as running,
        running.client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as reply,
    ):
        assert reply.status_code == 200
        state = await running.state()
        assert (state["running"], state["requests"][-1]["outcome"]) == (1, "running")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(stream: bool) -> None:
    """Closing the socket ends the sequence, streamed or not."""
    async with engine(engine=slow(decode_step_s=5.0)) as running:
        body = {**LONG, "max_tokens": 1000, "stream": stream}
        async with httpx.AsyncClient(base_url=running.url, trust_env=False) as leaver:
            task = asyncio.create_task(leaver.post("/v1/chat/completions", json=body))
            while (await running.state())["running"] == 0:
                continue
            task.cancel()
            await asyncio.wait([task])
        state = await settled(running)
    assert state["requests"][-1]["outcome"] == "disconnected"
    assert state["kv_usage"] == 0.0


async def test_choices_and_prompts_multiply() -> None:
    """n choices of each of several prompts; indexes count through all of them."""
    body = {"prompt": ["Hello world", "The sea"], "n": 2, "max_tokens": 3}
    async with engine(engine=slow()) as running:
        reply = (await running.client.post("/v1/completions", json=body)).json()
        streamed = await running.client.post("/v1/completions", json={**body, "stream": True})
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in reply["choices"]}) == 4
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["prompt_tokens"] == 4
    texts = dict.fromkeys(range(4), "")
    for event in sse_events(streamed.text)[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(texts.values()) == [choice["text"] for choice in reply["choices"]]


async def test_token_ids_on_request() -> None:
    """`return_token_ids` gives exactly what /tokenize gives."""
    async with engine() as running:
        ids = (await running.client.post("/tokenize", json={"messages": LONG["messages"]})).json()["tokens"]
        whole = await chat(running, return_token_ids=True)
        body = {**LONG, "stream": True, "return_token_ids": True}
        events = sse_events((await running.client.post("/v1/chat/completions", json=body)).text)
        prompt = {"prompt": ids, "max_tokens": 2, "return_token_ids": True, "stream": True}
        done = await running.client.post("/v1/completions", json=prompt)
    assert whole["prompt_token_ids"] == events[0]["prompt_token_ids"] == ids
    streamed = [token for event in events[1:-1] for token in event["choices"][0]["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]
    assert sse_events(done.text)[0]["choices"][0]["prompt_token_ids"] == ids


async def test_request_id_header_wins_over_the_body() -> None:
    """`X-Request-Id: abc` becomes chatcmpl-abc."""
    async with engine() as running:
        reply = await running.client.post(
            "/v1/chat/completions", json={**LONG, "request_id": "body"}, headers={"X-Request-Id": "head"}
        )
        assert reply.json()["id"] == "chatcmpl-head"
        assert (await chat(running, request_id="body"))["id"] == "chatcmpl-body"


async def test_two_live_requests_may_share_an_id() -> None:
    """A client's retry under the same X-Request-Id is a request of its own."""
    async with engine(engine=slow(prefill_step_s=30.0)) as running:
        body, headers = {**LONG, "stream": True}, {"X-Request-Id": "same"}
        async with (
            running.client.stream("POST", "/v1/chat/completions", json=body, headers=headers),
            running.client.stream("POST", "/v1/chat/completions", json=body, headers=headers),
        ):
            state = await running.state()
    assert state["running"] + state["waiting"] == 2
    assert [request["id"] for request in state["requests"]] == ["same", "same"]


async def test_a_full_queue_says_busy() -> None:
    """`--max-num-queued-reqs`: 503 in vLLM's words, without Retry-After, and counted."""
    settings = replace(slow(prefill_step_s=30.0), max_sequences=1)
    async with engine(engine=settings, max_num_queued_reqs=1) as running:
        body = {**LONG, "stream": True}
        async with (
            running.client.stream("POST", "/v1/chat/completions", json=body),
            running.client.stream("POST", "/v1/chat/completions", json=body),
        ):
            reply = await running.client.post("/v1/chat/completions", json=LONG)
            text = (await running.client.get("/metrics")).text
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "Service Unavailable"
    assert "retry-after" not in reply.headers
    assert 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 1.0' in text
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0' in text


async def test_metrics_count_what_happened() -> None:
    """Tokens asked and hit, first tokens, finishes."""
    async with engine() as running:
        first, second = await chat(running, max_tokens=5), await chat(running, max_tokens=1)
        text = (await running.client.get("/metrics")).text
    labels = '{engine="0",model_name="tiny"}'
    prompt = first["usage"]["prompt_tokens"]
    hits = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert f"vllm:prefix_cache_queries_total{labels} {2.0 * prompt}" in text
    assert f"vllm:prefix_cache_hits_total{labels} {float(hits)}" in text
    assert f"vllm:generation_tokens_total{labels} 6.0" in text
    assert f"vllm:time_to_first_token_seconds_count{labels} 2.0" in text
    assert f"vllm:inter_token_latency_seconds_count{labels} 4.0" in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 2.0' in text


async def test_a_prefill_counts_when_its_request_has_ended() -> None:
    """As in vLLM, where only the first token itself counts at once."""
    async with engine(engine=slow(decode_step_s=60.0)) as running:
        await chat(running, max_tokens=1)
        body = {"prompt": "Hi", "stream": True, "max_tokens": 2}
        async with running.client.stream("POST", "/v1/completions", json=body) as reply:
            await anext(aiter(reply.aiter_lines()))
            text = (await running.client.get("/metrics")).text
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:time_to_first_token_seconds_count{labels} 2.0" in text
    assert f"vllm:request_prefill_time_seconds_count{labels} 1.0" in text


async def test_an_answer_of_open_length_stops() -> None:
    """Without max_tokens the model ends by itself."""
    async with engine(default_output_tokens=7) as running:
        reply = (await running.client.post("/v1/completions", json={"prompt": "Hello"})).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 8192}, "8192 output tokens"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n must be at least 1"),
        ("/v1/completions", {"prompt": ""}, "cannot be empty"),
        ("/v1/completions", {"prompt": []}, "must be provided"),
        ("/v1/completions", {"prompt": [1, "a"]}, "non-negative integers"),
        ("/v1/completions", {"prompt": [[1], [-1]]}, "non-negative integers"),
        ("/v1/completions", {}, "body.prompt"),
        ("/v1/responses", {}, "body.input"),
        ("/v1/messages", {}, "body.messages"),
        ("/detokenize", {}, "body.tokens"),
        ("/detokenize", {"tokens": [10**9]}, "out of range"),
        ("/detokenize", {"tokens": [-1]}, "out of range"),
        ("/tokenize", {"prompt": 5}, "valid string"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "valid string"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "no cached item",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,?"}]}
                ]
            },
            "base64",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "only text parts"),
        ("/sim/faults", {"nonsense": 1}, "unknown fault"),
        ("/sim/faults", {"fail_next": "x"}, "takes int"),
        ("/sim/faults", {"fail_next": True}, "takes int"),
    ],
)
async def test_bad_requests_are_told_why(path: str, body: dict[str, Any], message: str) -> None:
    """400 with what is wrong."""
    async with engine() as running:
        reply = await running.client.post(path, json=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize("content", ["[1]", b'{"prompt": "\xff"}'])
async def test_bodies_that_are_no_object(content: str | bytes) -> None:
    """JSON of another kind, or no text at all, is a 400 as well."""
    async with engine() as running:
        reply = await running.client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
    assert reply.status_code == 400


async def test_tools_and_template_arguments_change_the_ids() -> None:
    """Everything the template sees is part of the prompt; what it does not know is not."""
    message = {"messages": [{"role": "user", "content": "Hello"}]}
    variants: list[dict[str, Any]] = [
        {},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"reasoning_effort": "high"}},
        {"chat_template_kwargs": {"documents": [{"text": "d"}]}},
        {"add_generation_prompt": False},
    ]
    async with engine() as running:
        prompts = [
            tuple((await running.client.post("/tokenize", json={**message, **variant})).json()["tokens"])
            for variant in [*variants, {"chat_template_kwargs": {"unknown": 1}, "temperature": 0}]
        ]
    assert len(set(prompts)) == len(variants)
    assert prompts[-1] == prompts[0]


async def test_reasoning_effort_reaches_a_chat_but_not_tokenize() -> None:
    """vLLM's own disagreement: /tokenize needs it in chat_template_kwargs."""
    message = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "reasoning_effort": "none"}
    async with engine() as running:
        used = (await chat(running, **message))["usage"]["prompt_tokens"]
        counts = [
            (await running.client.post("/tokenize", json={**message, **kwargs})).json()["count"]
            for kwargs in ({}, {"chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": False}})
        ]
    assert counts[0] < used == counts[1]


async def test_assistant_tool_calls_are_part_of_the_prompt() -> None:
    """Two calls with different arguments are two prompts."""
    counts = []
    async with engine() as running:
        for arguments in ("{}", '{"city": "Paris"}'):
            call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": arguments}}]}
            reply = await running.client.post("/tokenize", json={"messages": [call]})
            counts.append(tuple(reply.json()["tokens"]))
    assert counts[0] != counts[1]


async def test_anthropic_messages_stream() -> None:
    """Anthropic's events in order, system prompt and blocks counted."""
    blocks = [{"type": "text", "text": "Hello"}, {"type": "tool_result", "id": 1}]
    body = {
        "model": "tiny",
        "max_tokens": 3,
        "stream": True,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": blocks}],
    }
    async with engine() as running:
        reply = await running.client.post("/v1/messages", json=body)
        counted = (await running.client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    events = sse_events(reply.text)
    kinds = list(dict.fromkeys(event["type"] for event in events[:-1]))
    assert kinds == [
        *("message_start", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[-3]["usage"]["output_tokens"] == 3
    assert events[0]["message"]["usage"]["input_tokens"] == counted


async def test_responses_take_items_and_instructions() -> None:
    """A list of items, one of them no message; open length ends as completed."""
    body = {
        "input": [{"role": "user", "content": "Hello"}, {"type": "function_call_output", "output": "5"}],
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "f"}],
    }
    async with engine() as running:
        reply = (await running.client.post("/v1/responses", json=body)).json()
    assert (reply["status"], reply["incomplete_details"], reply["tool_choice"]) == ("completed", None, "auto")
    assert reply["usage"]["output_tokens"] == TINY.default_output_tokens


MESSAGES = {
    "model": "sim",
    "max_tokens": 1,
    "system": "You are.",
    "messages": [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "rain"}]},
    ],
}


async def test_messages_and_responses_are_rendered_as_they_are_computed() -> None:
    """Where scale-out is enabled; of a history that only the server has, nothing."""
    body = {key: value for key, value in MESSAGES.items() if key != "model"}
    async with engine(add_scale_out(TINY)) as running:
        rendered = (await running.client.post("/v1/messages/render", json=body)).json()["token_ids"]
        counted = (await running.client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
        asked = {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief."}
        response = (await running.client.post("/v1/responses/render", json=asked)).json()["token_ids"]
        used = (await running.client.post("/v1/responses", json={**asked, "max_output_tokens": 1})).json()["usage"]
        unknown = await running.client.post("/v1/responses/render", json={**asked, "previous_response_id": "resp_1"})
    assert len(rendered) == counted
    assert len(response) == used["input_tokens"]
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "previous_response_id")


async def test_nothing_is_rendered_without_scale_out() -> None:
    async with engine() as running:
        for api in ("chat/completions", "messages", "responses", "completions"):
            assert (await running.client.post(f"/v1/{api}/render", json={})).status_code == 403


async def test_reset_is_refused_while_something_runs() -> None:
    """Blocks in use cannot be forgotten; afterwards nothing is cached."""
    async with (
        engine(engine=slow(prefill_step_s=30.0)) as running,
        running.client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}),
    ):
        assert (await running.client.post("/reset_prefix_cache")).json() == {"success": False}


async def test_offloading_hears_of_every_prefilled_prompt() -> None:
    """A connector learns the prompt's ids, the model's root name and the salt."""
    heard: list[Prefilled] = []
    async with engine(on_prefilled=heard.append) as running:
        ids = (await running.client.post("/tokenize", json={"messages": LONG["messages"]})).json()["tokens"]
        await chat(running, cache_salt="t")
    assert heard == [Prefilled(tuple(ids), "models/tiny-qwen", "t")]


async def _nowhere(_message: Any) -> None:
    raise AssertionError("not called")


async def test_a_client_that_leaves_before_its_body_is_read() -> None:
    """Nothing is answered and nothing breaks."""

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async with engine() as running:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await running.app(scope, gone, _nowhere)
        assert (await running.state())["running"] == 0


def test_a_server_needs_token_outputs() -> None:
    """An engine that jumps over tokens cannot stream."""
    with pytest.raises(ValueError, match="token_outputs"):
        VllmSettings(engine=EngineSettings())
    assert VllmSettings(engine=FAST, max_model_len=10**6).context_tokens == 512 * 32


async def test_state_counts_calls_by_route() -> None:
    """Tests ask which route was called how often."""
    async with engine() as running:
        await chat(running)
        await running.client.get("/nope")
        await running.client.get("/tokenize")
        calls = (await running.state())["calls"]
    assert calls == {
        "POST /v1/chat/completions": 1,
        "GET /nope": 1,
        "GET /tokenize": 1,
        "GET /sim/state": 1,
    }


async def test_json_round_trips_unicode() -> None:
    """Text beyond ASCII goes through as it is."""
    async with engine() as running:
        body = json.dumps({"prompt": "日本 naïve"})
        tokens = (
            await running.client.post("/tokenize", content=body, headers={"content-type": "application/json"})
        ).json()["tokens"]
        assert (await running.client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "日本 naïve"}


async def test_caching_that_is_off_shows_in_metrics() -> None:
    """`cache_config_info` has the flag, and an answer reuses nothing."""
    async with engine(engine=replace(FAST, prefix_caching=False)) as running:
        body = {"model": "tiny", "prompt": "word " * 200, "max_tokens": 1}
        for _ in range(2):
            usage = (await running.client.post("/v1/completions", json=body)).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert 'enable_prefix_caching="False"' in (await running.client.get("/metrics")).text


async def test_a_sleeping_engine_answers_once_it_is_woken() -> None:
    """Its metrics show the level, its cache is gone, and a request that came meanwhile waits."""
    async with engine() as running:
        await running.client.post("/v1/completions", json={"model": "tiny", "prompt": "word " * 100, "max_tokens": 1})
        assert (await running.client.post("/sleep?level=1")).json() == {"status": "sleeping", "level": 1}
        assert (await running.client.get("/is_sleeping")).json() == {"is_sleeping": True}
        metrics = parse_engine_metrics((await running.client.get("/metrics")).content)
        assert (metrics.asleep, metrics.gave_up_cache) == (True, True)
        body = {"model": "tiny", "prompt": "word " * 100, "max_tokens": 1}
        asked = asyncio.create_task(running.client.post("/v1/completions", json=body))
        await until(lambda: running.app.state.calls["POST /v1/completions"] == 2)
        assert not asked.done()
        assert (await running.client.post("/wake_up")).json()["status"] == "awake"
        assert (await asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert not parse_engine_metrics((await running.client.get("/metrics")).content).asleep


async def test_a_request_under_way_ends_before_its_engine_sleeps() -> None:
    """As with `mode=wait`."""
    async with engine() as running:
        await running.faults(stall_first_byte_s=1000.0)
        body = {"model": "tiny", "prompt": "word", "max_tokens": 1}
        asked = asyncio.create_task(running.client.post("/v1/completions", json=body))
        await until(lambda: running.app.state.in_flight)
        slept = asyncio.create_task(running.client.post("/sleep"))
        await until(lambda: not running.app.state.awake.is_set())
        assert not slept.done()
        await running.faults(reset=True)
        assert (await asked).status_code == 200
        assert (await slept).status_code == 200
