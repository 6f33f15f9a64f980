"""Token ids from engines that refuse, fail, or cannot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvproxy.cache.overlap import tokens as token_source
from kvproxy.cache.overlap.facts import Result
from kvproxy.cache.overlap.tokens import MAX_ASKED_BYTES, MAX_TOKENIZING
from kvproxy.proxy.request.parse import MAX_PROMPT_BYTES
from tests.cache.support import (
    A,
    Fake,
    chat,
    completion,
    controller,
    engine,
    long_text,
    messages,
    nobody,
    served,
    tokenized,
    world,
)
from tests.support.until import until

TURN = long_text("w")


async def test_an_engine_that_cannot_tokenize_is_not_asked_again() -> None:
    """The others tokenize for all: an engine without `/tokenize` is no reason to know nothing."""
    cannot, can = Fake({}), engine()
    async with world({"a": cannot, "b": can}, controller(nobody), circuit_breaker={"failure_threshold": 9}) as service:
        for number in range(4):
            await service.ask(chat(long_text(f"w{number}-")))
        assert cannot.calls["/tokenize"] == 1
        assert can.calls["/tokenize"] == 3


async def test_nobody_can_tokenize() -> None:
    async with world({"a": Fake({})}, controller(nobody), circuit_breaker={"failure_threshold": 9}) as service:
        for number in range(2):
            assert (await service.ask(chat(long_text(f"w{number}-")))).tokens is None
        assert tokenized(service, "not_supported") == 1
        assert tokenized(service, "no_engine") == 1


async def test_a_configured_engine_tokenizes_for_all() -> None:
    tokenizer, other = engine(), engine()
    async with world({"t": tokenizer}, None) as place:
        url = str(place.cluster.endpoints[0].origin)
        async with world({"a": other}, controller(nobody), vllm_endpoint=url) as service:
            await service.ask(chat(TURN))
    assert (tokenizer.calls["/tokenize"], other.calls["/tokenize"]) == (1, 0)


async def test_a_refusal_is_no_failure_of_the_engine() -> None:
    """A prompt the engine does not take says nothing about the next one."""
    refusing = engine(tokenize=lambda _: (400, {"error": {"message": "no", "param": "messages"}}))
    async with world({"a": refusing}, controller(nobody), circuit_breaker={"failure_threshold": 1}) as service:
        for number in range(3):
            await service.ask(chat(long_text(f"w{number}-")))
        assert tokenized(service, "refused") == 3


async def test_a_broken_engine_opens_the_breaker_of_tokenize_alone() -> None:
    broken = engine(tokenize=lambda _: (500, {"detail": "broken"}))
    limits = {"failure_threshold": 2, "recovery_timeout": 60}
    async with world({"a": broken}, controller(nobody), circuit_breaker=limits) as service:
        for number in range(5):
            await service.serve(chat(long_text(f"w{number}-")), A)
            await service.settled()
        assert broken.calls["/tokenize"] == 2
        assert service.kv.overlap.store.possible


async def test_tokenizes_at_once_are_bounded() -> None:
    go = asyncio.Event()

    async def gated(_: dict[str, Any]) -> dict[str, Any]:
        await go.wait()
        return {"tokens": list(range(600)), "max_model_len": 9999}

    slow = engine(tokenize=gated)
    async with world({"a": slow}, controller(nobody), lookup_routing_timeout=0.001) as service:
        for number in range(MAX_TOKENIZING + 2):
            await service.ask(chat(long_text(f"w{number}-")))
        await until(lambda: slow.calls["/tokenize"] == MAX_TOKENIZING)
        assert service.metric("kvproxy_queue_depth", queue="kvcache_tokenize") == MAX_TOKENIZING
        assert service.metric("kvproxy_queue_limit", queue="kvcache_tokenize") == MAX_TOKENIZING
        go.set()
        await until(lambda: service.metric("kvproxy_queue_depth", queue="kvcache_tokenize") == 0)
    assert slow.calls["/tokenize"] == MAX_TOKENIZING


async def test_the_engines_render_is_exact_where_it_exists() -> None:
    """It is asked first, and never again where it does not exist."""
    rendering = Fake({"/v1/chat/completions/render": lambda _: {"token_ids": list(range(700))}})
    without = engine()
    async with world({"a": rendering}, controller(nobody)) as service:
        assert (await service.ask(chat(TURN))).overlaps.prompt_tokens == 700
    async with world({"a": without}, controller(nobody)) as service:
        for number in range(3):
            await service.ask(chat(long_text(f"w{number}-")))
    assert without.calls["/v1/chat/completions/render"] == 1
    assert without.calls["/tokenize"] == 3


async def test_without_token_memory_every_prompt_is_asked_for() -> None:
    tokenizer = engine()
    async with world({"a": tokenizer}, controller(nobody), token_cache={"enabled": False}) as service:
        for _ in range(3):
            assert (await service.ask(chat(TURN))).overlaps.prompt_tokens == 601
    assert tokenizer.calls["/tokenize"] == 3


async def test_token_memory_is_bounded_as_configured() -> None:
    async with world({"a": engine()}, controller(nobody), token_cache={"max_size": 2}) as service:
        for number in range(5):
            await service.ask(chat(long_text(f"w{number}-")))
        assert len(service.kv.overlap.tokens.memory) == 2
        assert service.metric("kvproxy_kvcache_token_recalls_total", result="missed") == 5


async def test_an_engine_that_is_down_is_passed_over() -> None:
    down, up = engine(), engine()
    async with world({"a": down, "b": up}, controller(nobody)) as service:
        health = service.cluster.endpoints[0].health
        for _ in range(3):
            health.record_probe(False, 0.0)
        await service.ask(chat(TURN))
    assert (down.calls["/tokenize"], up.calls["/tokenize"]) == (0, 1)


@pytest.mark.parametrize("answer", [b"not json", b'{"tokens": [-1]}', b'{"tokens": "x"}'])
async def test_an_answer_that_is_none(answer: bytes) -> None:
    async with world({"a": engine(tokenize=lambda _: answer)}, controller(nobody)) as service:
        assert (await service.ask(chat(TURN))).tokens is None
        assert tokenized(service, "bad_response") == 1


async def test_a_long_body_is_not_tokenized() -> None:
    """Neither encoding it again nor the answer's decoding may hold the event loop."""
    tokenizer = engine()
    padding = "x" * MAX_ASKED_BYTES
    async with world({"a": tokenizer}, controller(nobody)) as service:
        facts = await service.serve(chat(TURN, padding), A)
        await service.settled()
        assert facts.tokens is None
        assert not tokenizer.calls
        assert (await service.ask(chat(TURN, padding))).overlaps.by_endpoint[A].tokens > 0


async def test_so_many_tokens_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent with every lookup."""
    monkeypatch.setattr(token_source, "MAX_TOKENS", 600)
    async with world({"a": engine()}, controller(nobody)) as service:
        assert (await service.ask(chat(TURN))).tokens is None
        assert tokenized(service, "unusable") == 1
        assert len(service.kv.overlap.tokens.memory) == 0


async def test_of_very_many_given_ids_the_first_are_read() -> None:
    """They say which endpoint holds the beginning."""
    ids = [index % 1000 for index in range(200_000)]
    lmcache = controller(nobody)
    async with world({"a": engine()}, lmcache) as service:
        facts = await service.ask(completion(ids))
        assert facts.tokens is not None
        count = len(facts.tokens)
        assert list(facts.tokens) == ids[:count]
        assert 50_000 < count < 200_000
        assert not facts.tokens_exact
        assert facts.overlaps.prompt_tokens == pytest.approx(200_000, rel=0.01)
    assert len(lmcache.bodies["/lookup"][0]["tokens"]) == count


async def test_a_prompt_beyond_what_is_kept_counts_whole() -> None:
    """Its size is that of the whole, also where tokens of its beginning are remembered."""
    tail = "y" * (2 * MAX_PROMPT_BYTES)
    async with world({"a": engine()}, controller(nobody)) as service:
        known = await service.ask(chat(TURN))
        facts = await service.ask(chat(TURN, tail))
        assert facts.prompt_bytes == pytest.approx(len(tail), rel=0.01)
        assert facts.tokens is not None
        assert not facts.tokens_exact
        assert facts.tokens_bytes == known.tokens_bytes
        assert facts.overlaps.prompt_tokens > 1_000_000


async def test_tokens_of_before_the_answer_are_held_against_its_count() -> None:
    """The lookup's own tokens were no part of the answer yet."""
    async with world({"a": engine()}, controller(nobody)) as service:
        facts = await service.serve(chat(TURN), A)
        assert facts.tokens_exact
        service.kv.finished(facts, Result(A, True, prompt_tokens=601))
        assert len(service.kv.overlap.tokens.memory) == 1
        service.kv.finished(facts, Result(A, True, prompt_tokens=602))
        assert facts.tokens is None
        assert len(service.kv.overlap.tokens.memory) == 0


async def test_a_body_of_very_many_objects_is_not_looked_into() -> None:
    able = engine()
    blocks = [{"type": "text", "text": ""}] * 20_000
    async with world({"a": able}) as service:
        service.kv.overlap.indexes["default"].followed.any = True  # so that tokens are of use
        await served(service, messages(blocks))
        assert tokenized(service, "unusable") == 1
    assert not able.calls["/tokenize"]
