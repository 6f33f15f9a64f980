"""Streams of engines that fail: the client gets the answer of an undisturbed run, as one stream."""

from __future__ import annotations

from typing import Any

import pytest

from tests.features.resume.gateway import (
    BEST_EFFORT,
    CHAT,
    COMPLETION,
    Gateway,
    chat_body,
    completion_body,
    gateway,
    read_events,
    text_of,
    usage_of,
)

BODIES = {CHAT: chat_body, COMPLETION: completion_body}
FAULTS = [
    {"cut_next": 1, "cut_after_chunks": 15},
    {"error_next": 1, "error_after_chunks": 15},
    {"cut_next": 1, "cut_after_chunks": 3},
]


async def undisturbed(both: Gateway, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer of the second engine, which the proxy asks next but one."""
    answer = await both.engines[1].client.post(path, json=body)
    return read_events(answer.text)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("grade", ["exact", "text"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_the_answer_is_that_of_an_undisturbed_run(path: str, grade: str, fault: dict[str, Any]) -> None:
    """Text, counts and the shape of every chunk, wherever the stream breaks and however."""
    body = BODIES[path]()
    async with gateway(grade) as both:
        expected = await undisturbed(both, path, body)
        await both.engines[0].faults(**fault)
        events = await both.ask(path, body)
        assert text_of(events) == text_of(expected)
        assert usage_of(events) == usage_of(expected)
        assert both.resumed("exact") == 1
        identity = {(event["id"], event["created"], event["object"], event["model"]) for event in events}
        assert len(identity) == 1
        assert "token_ids" not in str(events)
        finishes = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert finishes[-1] == "length"
        assert not any(finishes[:-1])
        assert set(events[2]) == set(events[-3])
        assert set(events[2]["choices"][0]) <= set(events[-3]["choices"][0]) | {"stop_reason"}
        roles = [choice["delta"].get("role") for event in events for choice in event["choices"] if "delta" in choice]
        assert sum(role is not None for role in roles) == (path == CHAT)


async def test_a_chat_with_tools_goes_on_by_text() -> None:
    """The engine reads its answer for tool calls, which token ids would pass by. The words behind the cut come once."""
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    body = chat_body(tools=[tool])
    async with gateway("text") as both:
        expected = await undisturbed(both, CHAT, body)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=20)
        events = await both.ask(CHAT, body)
        assert text_of(events) == text_of(expected)
        assert usage_of(events) == usage_of(expected)
        assert both.resumed("text") == 1


@pytest.mark.parametrize("path", list(BODIES))
async def test_answers_without_token_ids_go_on_by_text(path: str) -> None:
    """Each chunk counts as one token then, so that a limit is met by best effort only."""
    body = BODIES[path](return_token_ids=False)
    async with gateway("text", route=BEST_EFFORT) as both:
        expected = await undisturbed(both, path, body)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=15)
        events = await both.ask(path, body)
        assert text_of(events) == text_of(expected)
        assert usage_of(events) == usage_of(expected)
        assert both.resumed("text") == 1


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("chunks", [1, 15])
async def test_a_client_that_asks_for_token_ids_gets_all_of_them(path: str, chunks: int) -> None:
    """Of both engines, none twice."""
    body = BODIES[path](return_token_ids=True)
    async with gateway("exact") as both:
        expected = await undisturbed(both, path, body)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=chunks)
        events = await both.ask(path, body)
        assert ids_of(events) == ids_of(expected)
        assert text_of(events) == text_of(expected)


def ids_of(events: list[dict[str, Any]]) -> list[int]:
    """Return the answer's token ids."""
    choices = [choice for event in events for choice in event["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or ()]
