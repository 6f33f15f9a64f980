"""Streams that are not resumed end as without the feature; those that are leave a note."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvproxy.features.resume.note import ResumeNote, describe_leg
from tests.features.resume.gateway import (
    CHAT,
    COMPLETION,
    FILTERS,
    chat_body,
    completion_body,
    gateway,
    read_events,
    text_of,
)
from tests.lab.simulator.support import TINY, engine
from tests.support.proxy import running_proxy
from tests.support.scripted import answer, scripted

CUT = {"cut_next": 1, "cut_after_chunks": 15}


async def test_another_models_answer_is_not_joined() -> None:
    """The overlap does not come out the same: the client gets an error event instead of wrong words."""
    async with (
        engine(TINY) as first,
        engine(replace(TINY, word_pieces=False)) as second,
        running_proxy({"a": first.url, "b": second.url}, filters=FILTERS, routes=[{"resume": "text"}]) as proxy,
    ):
        whole = read_events((await first.client.post(CHAT, json=chat_body())).text)
        await first.faults(**CUT)
        events = read_events((await proxy.client.post(CHAT, json=chat_body())).text)
        assert events[-1]["error"]["code"] == "resume_mismatch"
        assert text_of(whole).startswith(text_of(events[:-1]))
        assert proxy.metric("kvproxy_streams_not_resumed_total", cluster="default", reason="overlap") == 1
        endpoint = proxy.proxy.clusters["default"].endpoints[1]
        assert endpoint.health.is_healthy


@pytest.mark.parametrize("fault", [CUT, {"error_next": 1, "error_after_chunks": 15}])
async def test_a_refused_stream_ends_with_an_error(fault: dict[str, Any]) -> None:
    """The engine's own, if it sent one."""
    async with gateway("exact") as both:
        await both.engines[0].faults(**fault)
        events = await both.ask(CHAT, chat_body(response_format={"type": "json_object"}))
        assert both.refused("guided") == 1
        assert "error" in events[-1]
        assert both.proxy.metric("kvproxy_streams_resumed_total", cluster="default", grade="exact") == 0


async def test_no_third_engine_gets_a_prompt_that_two_died_of() -> None:
    """It may be the prompt."""
    async with gateway("exact", engines=3, retry={"attempts": 5, "min_per_second": 1000}) as three:
        for one in three.engines[:2]:
            await one.faults(**CUT)
        events = await three.ask(CHAT, chat_body())
        assert "error" in events[-1]
        assert three.refused("engines_lost") == 1
        assert (await three.engines[2].state())["calls"].get("POST /v1/completions") is None


async def test_a_client_that_wants_token_ids_gets_them() -> None:
    """Its own request for them is left as it is, and so are the chunks."""
    body = chat_body(return_token_ids=True)
    async with gateway("exact") as both:
        events = await both.ask(CHAT, body)
        assert sum(len(choice["token_ids"] or ()) for event in events[1:] for choice in event["choices"]) == 60


async def test_streams_of_other_routes_are_left_alone() -> None:
    """No continuation is made, and nothing is added to their requests."""
    async with gateway("off") as both:
        await both.engines[0].faults(**CUT)
        events = await both.ask(CHAT, chat_body())
        assert "error" in events[-1]


async def test_a_resumed_stream_is_noted() -> None:
    """In its receipt, and for a client that asks how it was served."""
    async with gateway("exact") as both:
        await both.engines[0].faults(**CUT)
        events = await both.ask(CHAT, chat_body(), **{"x-kvproxy-debug": "1"})
        (leg,) = events[-2]["kvproxy"]["resumed"]
        assert (leg["broke_at"], leg["error"], leg["grade"]) == ("a", "upstream_disconnected", "exact")
        recent = next(iter(both.proxy.proxy.recent.latest()))
        note = recent.outcome.notes["resume"]
        assert isinstance(note, ResumeNote)
        assert "went on elsewhere" in describe_leg(note.legs[0])
        assert recent.outcome.endpoint == "b"
        assert (recent.outcome.prompt_tokens, recent.outcome.completion_tokens) == (30, 60)
        assert recent.outcome.cached_tokens is None


@pytest.mark.parametrize(
    ("path", "body", "chunks"), [(CHAT, chat_body(max_tokens=20), 21), (COMPLETION, completion_body(max_tokens=20), 20)]
)
@pytest.mark.parametrize("grade", ["exact", "text"])
async def test_a_finished_answer_has_no_rest(path: str, body: dict[str, Any], chunks: int, grade: str) -> None:
    """Its counts alone are missing: nothing comes behind its finish reason but the error."""
    async with gateway(grade) as both:
        await both.engines[0].faults(cut_next=1, cut_after_chunks=chunks)
        events = await both.ask(path, body)
        finishes = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
        assert finishes[-1] == "length"
        assert not any(finishes[:-1])
        assert "error" in events[-1]
        assert both.refused("finished") == 1


def _stream(*events: bytes, head: bytes = b"transfer-encoding: chunked") -> bytes:
    body = b"".join(b"data: " + event + b"\n\n" for event in (*events, b"[DONE]"))
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if b"chunked" in head else body
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + head + b"\r\n\r\n" + framed


async def test_an_answer_of_fixed_length_is_left_as_it_is() -> None:
    """Less bytes than announced would hang the client."""
    event = b'{"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[1]}]}'
    whole = b"data: " + event + b"\n\ndata: [DONE]\n\n"
    fixed = _stream(event, head=b"content-length: %d" % len(whole))
    async with scripted(answer(fixed)) as one:
        url = f"http://127.0.0.1:{one.origin.port}"
        async with running_proxy({"a": url}, filters=FILTERS, routes=[{"resume": "exact"}]) as proxy:
            got = await proxy.client.post(CHAT, json=chat_body())
            assert got.content == whole


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHAT, b"[1]"),
        (CHAT, b'{"choices":[{"index":"x"}]}'),
        ("/v1/messages", b"[1]"),
        ("/v1/messages", b'{"type":"message_start","message":null}'),
        ("/v1/messages", b'{"type":"content_block_start","content_block":1}'),
        ("/v1/messages", b'{"type":["content_block_start"]}'),
        ("/v1/responses", b'{"type":"response.output_item.added","item":1}'),
        ("/v1/responses", b'{"type":"response.output_text.delta","delta":1}'),
        ("/v1/responses", b'{"type":"response.created","sequence_number":"x"}'),
    ],
)
async def test_events_of_an_unknown_shape_pass_as_they_came(path: str, event: bytes) -> None:
    """An engine's oddities are no reason to end its stream."""
    async with scripted(answer(_stream(event))) as one:
        url = f"http://127.0.0.1:{one.origin.port}"
        async with running_proxy({"a": url}, filters=FILTERS, routes=[{"resume": "text"}]) as proxy:
            got = await proxy.client.post(path, json=chat_body())
            assert got.content == b"data: " + event + b"\n\ndata: [DONE]\n\n"
