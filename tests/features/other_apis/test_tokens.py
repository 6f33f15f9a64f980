"""Prompts of /v1/messages and /v1/responses are known by their tokens."""

from __future__ import annotations

import pytest

from kvproxy.base.types import RequestKind
from tests.cache.support import (
    Fake,
    chat,
    controller,
    engine,
    long_text,
    messages,
    nobody,
    parsed,
    served,
    tokenized,
    world,
)

TURN = long_text("w")
RESPONSE = {"model": "m", "input": [{"role": "user", "content": TURN}]}
PICTURE = [{"type": "text", "text": "what is this"}, {"type": "image", "source": {"type": "url", "url": "http://x"}}]


@pytest.mark.parametrize("path", ["/v1/messages/render", "/v1/responses/render", "/tokenize"])
async def test_messages_and_responses_are_known_by_their_tokens(path: str) -> None:
    """By the engine's own renderer where it has one, else as the chat that they are."""
    request = messages(TURN) if "messages" in path else parsed(RequestKind.RESPONSES, RESPONSE)
    fake = Fake({path: lambda _: {"token_ids": list(range(601)), "tokens": list(range(601))}})
    async with world({"a": fake}, kv_events=True) as service:
        await served(service, request, prompt_tokens=601)
        facts = await service.ask(request)
        assert facts.tokens_exact
        assert facts.overlaps.prompt_tokens == 601


async def test_tokens_that_the_engine_did_not_count_are_not_kept() -> None:
    """Its template or its settings made another prompt of it; after some of these in a row none are asked for."""
    wrong = engine()
    async with world({"a": wrong}, kv_events=True, circuit_breaker={"failure_threshold": 2}) as service:
        for number in range(4):
            facts = await served(service, messages(long_text(f"w{number}-")), prompt_tokens=600)
            assert facts.tokens is None
        assert tokenized(service, "wrong_tokens") == 2
        assert wrong.calls["/tokenize"] == 2
        assert len(service.kv.overlap.tokens.memory) == 0
        (outage,) = service.kv.breakers.outages
        assert (outage.operation, "601 tokens" in outage.last_error) == ("tokenize_messages", True)
        await served(service, chat(TURN), prompt_tokens=601)  # chats go their own way
        assert tokenized(service, "ok") == 1


@pytest.mark.parametrize("lmcache", [True, False])
async def test_a_prompt_is_known_up_to_its_first_image(lmcache: bool) -> None:
    """All placeholders of images are alike, so tokens are asked for the messages before it, and once."""
    able = engine()
    directory = controller(nobody) if lmcache else None
    async with world({"a": able}, directory, kv_events=not lmcache) as service:
        for number in range(3):
            facts = await served(service, messages(TURN, "I see", PICTURE, long_text("w", number)), prompt_tokens=900)
        assert able.calls["/tokenize"] == 1
        assert [message["role"] for message in able.bodies["/tokenize"][0]["messages"]] == ["user", "assistant"]
        assert facts.tokens is not None
        assert len(facts.tokens) == (604 - 8) // 16 * 16
        assert not facts.tokens_exact
        assert facts.tokens_bytes < facts.prompt_bytes
        if lmcache:
            assert directory is not None
            assert {len(asked["tokens"]) for asked in directory.bodies["/lookup"]} == {len(facts.tokens)}


async def test_a_prompt_that_begins_with_an_image_is_not_asked_for() -> None:
    able = engine()
    async with world({"a": able}, kv_events=True) as service:
        await served(service, messages(PICTURE))
        assert tokenized(service, "unusable") == 1
    assert not able.calls["/tokenize"]


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
async def test_a_history_that_only_the_engine_has_is_not_asked_for(field: str) -> None:
    """Its prompt is not what the body says."""
    able = engine()
    async with world({"a": able}, kv_events=True) as service:
        await served(service, parsed(RequestKind.RESPONSES, {"instructions": "Be brief.", field: "x", **RESPONSE}))
        await served(service, parsed(RequestKind.RESPONSES, {field: "x", **RESPONSE}))
    assert not able.calls["/tokenize"]
