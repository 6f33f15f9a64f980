"""Messages and Responses whose engine fails: one stream, with numbers and names that go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.features.resume.gateway import BEST_EFFORT, gateway, try_model

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
QUESTION = "Tell me about the sea and the wind."
MESSAGES_BODY = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}
RESPONSES_BODY = {"model": "tiny", "input": QUESTION, "max_output_tokens": 60}
STREAMED = {"stream": True, "temperature": 0}


def typed_events(text: str) -> list[dict[str, Any]]:
    """Return the events' data; the name of each is its type."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = event.partition("\n")
        if event == "data: [DONE]":
            continue
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def count_prompt(events: list[dict[str, Any]]) -> int:
    """Return the prompt's tokens, as a message's first event has them."""
    count: int = events[0]["message"]["usage"]["input_tokens"]
    return count


def words_of(events: list[dict[str, Any]]) -> str:
    """Return the text of all deltas."""
    deltas = [
        event["delta"] for event in events if event["type"] in ("content_block_delta", "response.output_text.delta")
    ]
    return "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)


def end_of(events: list[dict[str, Any]]) -> tuple[object, ...]:
    """Return how a message or response ended, and its tokens."""
    if "response" in events[-1]:
        response = events[-1]["response"]
        return events[-1]["type"], response["status"], response["usage"]["output_tokens"]
    return events[-1]["type"], events[-2]["delta"]["stop_reason"], events[-2]["usage"]["output_tokens"]


@pytest.mark.parametrize("chunks", [3, 20])
@pytest.mark.parametrize("input_", [QUESTION, [{"role": "user", "content": QUESTION}]])
async def test_a_response_goes_on_by_text(chunks: int, input_: Any) -> None:
    """Its last item is half an answer. The client sees one response: numbers without a gap, one id, and in its last
    events the whole text and the counts of one request."""
    body = {**RESPONSES_BODY, **STREAMED, "input": input_}
    async with gateway("text", route=BEST_EFFORT) as both:
        expected = typed_events((await both.engines[1].client.post(RESPONSES, json=body)).text)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=chunks)
        events = typed_events((await both.proxy.client.post(RESPONSES, json=body)).text)
        assert words_of(events) == words_of(expected)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        response, other = events[-1]["response"], expected[-1]["response"]
        assert response["id"] == events[0]["response"]["id"]
        assert response["max_output_tokens"] == 60
        assert response["output"][0]["content"][0]["text"] == words_of(expected)
        assert {event["item_id"] for event in events if "item_id" in event} == {response["output"][0]["id"]}
        counts = ("input_tokens", "output_tokens", "total_tokens")
        assert [response["usage"][name] for name in counts] == [other["usage"][name] for name in counts]
        assert [event["type"] for event in events].count("response.created") == 1
        assert both.resumed("text" if chunks > 4 else "restart") == 1


async def test_a_message_without_text_begins_again() -> None:
    """The client has its beginning already."""
    body = {**MESSAGES_BODY, **STREAMED}
    async with gateway("exact") as both:
        expected = typed_events((await both.engines[1].client.post(MESSAGES, json=body)).text)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=2)
        events = typed_events((await both.proxy.client.post(MESSAGES, json=body)).text)
        assert words_of(events) == words_of(expected)
        assert [event["type"] for event in events].count("message_start") == 1
        assert events[-2]["usage"] == expected[-2]["usage"]
        assert both.resumed("restart") == 1


async def test_a_message_goes_on_as_a_chat() -> None:
    """Engines begin a new turn behind half a message. The client sees one message, which ends as the engine's own."""
    body = {**MESSAGES_BODY, **STREAMED, "system": "Be short.", "tools": [{"name": "look", "input_schema": {}}]}
    async with gateway("text", route=BEST_EFFORT) as both:
        await try_model(both.proxy, *both.engines)
        expected = typed_events((await both.engines[1].client.post(MESSAGES, json=body)).text)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=20)
        events = typed_events((await both.proxy.client.post(MESSAGES, json=body)).text)
        assert words_of(events) == words_of(expected)
        shown, whole = ([event["type"] for event in one if "text" not in str(event)] for one in (events, expected))
        assert shown == whole
        assert events[-2]["delta"]["stop_reason"] == expected[-2]["delta"]["stop_reason"] == "max_tokens"
        assert events[-2]["usage"] == {"input_tokens": count_prompt(expected), "output_tokens": 60}
        assert both.resumed("text") == 1


async def test_a_rest_that_an_engine_ends_with_an_error_has_no_other_end() -> None:
    """Behind its error chats have `[DONE]`, of which no end of a whole message is made."""
    async with gateway("text", route=BEST_EFFORT) as both:
        await try_model(both.proxy, *both.engines)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=20)
        await both.engines[1].faults(error_next=1, error_after_chunks=20)
        text = (await both.proxy.client.post(MESSAGES, json={**MESSAGES_BODY, **STREAMED})).text
        events = typed_events(text)
        assert [event["type"] for event in events].count("message_stop") == 0
        assert [event["type"] for event in events[-2:]] == ["content_block_delta", "error"]
        assert "[DONE]" not in text


async def test_a_sampled_message_goes_on_where_the_model_was_proven() -> None:
    """No word is computed again; a simulated engine draws the same ones behind the same text."""
    body = {**MESSAGES_BODY, "stream": True, "temperature": 0.7}
    async with gateway("text", route=BEST_EFFORT) as both:
        await try_model(both.proxy, *both.engines)
        expected = typed_events((await both.engines[1].client.post(MESSAGES, json=body)).text)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=20)
        events = typed_events((await both.proxy.client.post(MESSAGES, json=body)).text)
        assert words_of(events) == words_of(expected)
        assert events[-1]["type"] == "message_stop"
        assert both.resumed("text") == 1


@pytest.mark.parametrize(("path", "came"), [(MESSAGES, 62), (RESPONSES, 64)])
async def test_a_sampled_answer_that_breaks_behind_its_last_token_ends_as_its_limit_says(path: str, came: int) -> None:
    """With no token more, as an undisturbed one."""
    body = {**(MESSAGES_BODY if path == MESSAGES else RESPONSES_BODY), "stream": True, "temperature": 0.7}
    async with gateway("text", route=BEST_EFFORT) as both:
        await try_model(both.proxy, *both.engines)
        expected = typed_events((await both.engines[1].client.post(path, json=body)).text)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=came)
        events = typed_events((await both.proxy.client.post(path, json=body)).text)
        assert words_of(events) == words_of(expected)
        assert end_of(events) == end_of(expected)
        assert both.resumed("text") == 1


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (MESSAGES, {}, "max_tokens"),
        (RESPONSES, {}, "max_tokens"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "guided"),
        (MESSAGES, {"stop_sequences": ["END"], "temperature": 1}, "stop"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "guided"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "unusual"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "guided"),
    ],
)
async def test_others_are_refused(path: str, fields: dict[str, Any], reason: str) -> None:
    """With the error event of their API."""
    body = {**(MESSAGES_BODY if path == MESSAGES else RESPONSES_BODY), **STREAMED, **fields}
    async with gateway("text") as both:
        await both.engines[0].faults(cut_next=1, cut_after_chunks=20)
        events = typed_events((await both.proxy.client.post(path, json=body)).text)
        assert events[-1]["type"] == "error"
        assert both.refused(reason) == 1


@pytest.mark.parametrize(("path", "chunks"), [(MESSAGES, 63), (MESSAGES, 64), (RESPONSES, 65), (RESPONSES, 67)])
async def test_a_finished_answer_has_no_rest(path: str, chunks: int) -> None:
    """Behind the end of its text comes the error alone."""
    body = {**(MESSAGES_BODY if path == MESSAGES else RESPONSES_BODY), **STREAMED}
    async with gateway("text") as both:
        expected = typed_events((await both.engines[1].client.post(path, json=body)).text)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=chunks)
        events = typed_events((await both.proxy.client.post(path, json=body)).text)
        types, all_types = ([event["type"] for event in one if "delta" not in event] for one in (events[:-1], expected))
        assert types == all_types[: len(types)]
        assert words_of(events[:-1]) == words_of(expected)
        assert events[-1]["type"] == "error"
        assert both.refused("finished") == 1


@pytest.mark.parametrize(("path", "body"), [(MESSAGES, MESSAGES_BODY), (RESPONSES, RESPONSES_BODY)])
async def test_an_undisturbed_stream_is_left_as_it_is(path: str, body: dict[str, Any]) -> None:
    """Byte by byte."""
    async with gateway("text") as both:
        answer = await both.proxy.client.post(path, json={**body, **STREAMED})
        assert answer.text.startswith("event: ")
        assert typed_events(answer.text)[-1]["type"] in ("message_stop", "response.completed")
