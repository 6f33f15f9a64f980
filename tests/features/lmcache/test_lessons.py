"""Lessons of lookups and tokens of one request for the next."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.cache.metrics import KvCacheMetrics
from kvproxy.cache.overlap.facts import Result
from kvproxy.features.lmcache.connection import PATIENCE_S
from tests.cache.support import (
    A,
    B,
    chat,
    completion,
    controller,
    engine,
    long_text,
    words,
    world,
)
from tests.cache.test_service import TURN
from tests.support.clock import FakeClock


def nobody(_: list[int]) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "system", "content": TURN}]},
        {"messages": [{"role": "user", "content": TURN}], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "user", "content": TURN}], "cache_salt": "tenant"},
        {"messages": [{"role": "user", "content": TURN}], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "user", "content": TURN}], "model": "other"},
    ],
    ids=["role", "tools", "salt", "template", "model"],
)
async def test_the_same_text_in_another_shape_is_another_prompt(other: dict[str, Any]) -> None:
    """Roles, tools, salt, template and model all shape the tokens: nothing of it may be mixed up."""
    tokenizer = engine()
    async with world({"a": tokenizer}, controller(nobody)) as service:
        await service.serve(chat(TURN), A)
        changed = chat(**{"model": "m", **other})
        facts = service.kv.gather(*changed, cluster=service.cluster)
        assert facts.tokens is None
        assert facts.overlaps.matched_tokens(A) == 0
        await service.serve(changed, A)
        await service.settled()
        assert tokenizer.calls["/tokenize"] == 2


async def test_a_chats_second_turn_needs_no_tokenize_before_routing() -> None:
    """The first turn's tokens are a prefix of the second's: enough for the lookup, whatever was added."""
    tokenizer = engine()
    lmcache = controller(lambda tokens: {"b": ["LocalCPUBackend", len(tokens)]})
    async with world({"a": tokenizer, "b": tokenizer}, lmcache) as service:
        first = await service.ask(chat(TURN))
        service.kv.finished(first, Result(None, True))  # an engine answered, which is not known
        await service.settled()
        asked = tokenizer.calls["/tokenize"]
        second = await service.ask(chat(TURN, "an answer", "and now?"))
        assert second.preferred == B
        assert tokenizer.calls["/tokenize"] == asked
        looked_up = lmcache.bodies["/lookup"][-1]["tokens"]
        assert looked_up == words(f"<user> {TURN}")[: len(looked_up)]
        assert len(looked_up) > 500
        assert abs(second.overlaps.prompt_tokens - 607) < 10  # what is new is estimated by what is known


async def test_token_ids_given_by_the_client_need_no_tokenizer() -> None:
    tokenizer = engine()
    lmcache = controller(lambda tokens: {"a": ["LocalCPUBackend", len(tokens)]})
    async with world({"a": tokenizer}, lmcache) as service:
        ids = list(range(1000))
        for prompt in (ids, [ids]):
            facts = await service.ask(completion(prompt))
            assert facts.overlaps.prompt_tokens == 1000
            assert facts.preferred == A
        assert lmcache.bodies["/lookup"][0]["tokens"] == ids
        assert tokenizer.calls["/tokenize"] == 0


@pytest.mark.parametrize("prompt", [["one", "two"], [[1, 2], [3]], [], [-1, 5], [1, "x"], 7, None])
async def test_prompts_that_are_not_one_prompt_are_left_alone(prompt: Any) -> None:
    """Batches and nonsense are the engine's business."""
    tokenizer = engine()
    async with world({"a": tokenizer}, controller(nobody), lookup_min_tokens=0) as service:
        await service.serve(completion(prompt), A)
        await service.settled()
        assert tokenizer.calls["/tokenize"] == 0


async def test_a_completions_text_is_tokenized() -> None:
    lmcache = controller(lambda tokens: {"a": ["LocalCPUBackend", len(tokens)]})
    async with world({"a": engine()}, lmcache) as service:
        facts = await service.ask(completion(TURN))
        assert facts.overlaps.prompt_tokens == 600
        assert facts.preferred == A


async def test_reuse_that_no_lookup_ever_named_is_said(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """The run-time check of hash seeds and chunk sizes, once it has been so for a while."""
    async with world({"a": engine()}, controller(nobody), clock=clock) as service:
        for number in range(4):
            clock.advance(PATIENCE_S / 2)
            await service.serve(chat(long_text(f"w{number}-")), A, cached=512)
    assert caplog.text.count("that LMCache's lookup has never named") == 1


async def test_a_lookup_that_keeps_being_wrong_is_believed_less_about_that_endpoint() -> None:
    """Half after two wrong claims; about others it is believed as before, and it is shown."""
    lmcache = controller(lambda tokens: {name: ["LocalCPUBackend", len(tokens)] for name in "ab"})
    async with world({"a": engine(), "b": engine()}, lmcache) as service:
        counted = [
            (await service.serve(chat(long_text(f"{n}w")), A, cached=0)).overlaps.matched_tokens(A) for n in "12"
        ]
        facts = (await service.ask(chat(long_text("3w")))).overlaps
        assert counted == [601, 400]
        assert facts.matched_tokens(A) == pytest.approx(facts.matched_tokens(B) / 2, abs=1)
        at = {"cluster": "default", "source": "lmcache_controller"}
        assert service.metric("kvproxy_kvcache_trust_ratio", **at, endpoint="a") == pytest.approx(0.5, abs=0.01)
        shown = {
            labels["endpoint"]
            for one in service.metrics.group(KvCacheMetrics).trust.collect()
            for _, labels, *_ in one.samples
        }
        assert shown == {"a"}


async def test_a_refresh_keeps_what_a_lookup_said() -> None:
    """No lookup is sent again: what LMCache answered before the wait is as good as anything known of it."""
    lmcache = controller(lambda tokens: {"b": ["LocalCPUBackend", len(tokens)]})
    async with world({"a": engine(), "b": engine()}, lmcache) as service:
        waits = await service.ask(chat(TURN))
        claimed = waits.overlaps.matched_tokens(B)
        asked = lmcache.calls["/lookup"]
        assert claimed > 0
        service.kv.refresh(waits)
        assert waits.overlaps.matched_tokens(B) == claimed
        assert lmcache.calls["/lookup"] == asked == 1
