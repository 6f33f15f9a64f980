"""Lessons of one request for the next."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.cache.overlap.facts import Result
from tests.cache.support import (
    NOWHERE,
    A,
    B,
    chat,
    cluster_of,
    long_text,
    running,
    settings,
)

TURN = long_text("w")
ROUTED_TO_A = {"cluster": "default", "endpoint": "a", "source": "approximate"}


def nobody(_: list[int]) -> dict[str, Any]:
    return {}


async def test_a_chats_next_turn_is_known_without_any_tokenizer() -> None:
    """Text blocks need no tokens: where the first turn went is where the second one finds its beginning."""
    async with running(settings(), cluster_of({"a": NOWHERE, "b": NOWHERE})) as service:
        first = await service.serve(chat(TURN), B)
        assert first.preferred is None
        second = await service.ask(chat(TURN, "an answer", "and now?"))
        assert second.preferred == B
        assert second.overlaps.matched_tokens(B) > 0.9 * first.overlaps.prompt_tokens
        assert second.overlaps.matched_tokens(A) == 0


async def test_a_request_under_way_counts_as_cached_soon() -> None:
    """A burst of one prompt follows the first of them, before any answer came."""
    async with running(settings(), cluster_of({"a": NOWHERE, "b": NOWHERE})) as service:
        first = await service.ask(chat(TURN))
        service.kv.placed(first, A)
        assert (await service.ask(chat(TURN))).preferred == A


async def test_a_failed_request_leaves_nothing_behind() -> None:
    """The engine never prefilled it."""
    async with running(settings(), cluster_of({"a": NOWHERE, "b": NOWHERE})) as service:
        failed = await service.ask(chat(TURN))
        service.kv.placed(failed, A)
        service.kv.finished(failed, Result(A, False))
        assert (await service.ask(chat(TURN))).preferred is None


async def test_a_retry_moves_the_promise_to_the_endpoint_that_served() -> None:
    async with running(settings(), cluster_of({"a": NOWHERE, "b": NOWHERE})) as service:
        retried = await service.ask(chat(TURN))
        service.kv.placed(retried, A)
        service.kv.placed(retried, B)
        service.kv.finished(retried, Result(B, True))
        after = await service.ask(chat(TURN))
        assert after.preferred == B
        assert after.overlaps.matched_tokens(A) == 0


async def test_a_contradiction_removes_the_prefix_at_once() -> None:
    """Predicted cached, the engine says no: the next request is not sent astray for the same reason."""
    async with running(settings(), cluster_of({"a": NOWHERE, "b": NOWHERE})) as service:
        await service.serve(chat(TURN, "an answer", long_text("w")), A)
        longer = chat(TURN, "an answer", long_text("x"))
        astray = await service.ask(longer)
        assert astray.preferred == A
        service.kv.placed(astray, B)  # another endpoint was chosen in the end
        service.kv.finished(astray, Result(B, True, cached_tokens=0))
        wrong = await service.ask(chat(TURN, "another answer", "y"))
        service.kv.placed(wrong, A)
        service.kv.finished(wrong, Result(A, True, cached_tokens=0))
        assert service.metric("kvproxy_kvcache_predictions_total", **ROUTED_TO_A, result="miss") == 1
        # It holds what it has just prefilled, and nothing else of what was believed: not the rest of the first prompt.
        local = service.kv.overlap.indexes["default"].approximate
        assert local.counts.held_blocks(A) == len(wrong.hashes)


async def test_a_good_prediction_is_scored() -> None:
    async with running(settings(), cluster_of({"a": NOWHERE})) as service:
        await service.serve(chat(TURN), A)
        predicted = (await service.ask(chat(TURN))).overlaps.matched_tokens(A)
        await service.serve(chat(TURN), A, cached=predicted - 10)
        assert service.metric("kvproxy_kvcache_predictions_total", **ROUTED_TO_A, result="hit") == 1
        assert service.metric("kvproxy_kvcache_predicted_tokens_total", **ROUTED_TO_A) == predicted
        assert service.metric("kvproxy_kvcache_reused_tokens_total", **ROUTED_TO_A) == predicted - 10


async def test_the_length_of_prompts_is_learned() -> None:
    """Bytes become tokens by the engine's own count of the model."""
    async with running(settings(), cluster_of({"a": NOWHERE})) as service:
        first = await service.serve(chat(TURN), A)
        guessed = first.overlaps.prompt_tokens
        service.kv.finished(await service.ask(chat(TURN)), Result(A, True, prompt_tokens=guessed * 2))
        assert (await service.ask(chat(TURN))).overlaps.prompt_tokens == pytest.approx(guessed * 2, rel=0.01)
        service.kv.finished(await service.ask(chat(TURN)), Result(A, False, prompt_tokens=guessed * 40))  # it failed
        assert (await service.ask(chat(TURN))).overlaps.prompt_tokens == pytest.approx(guessed * 2, rel=0.01)


async def test_a_prefix_many_ask_for_is_hot() -> None:
    """Worth replicating: the policy discounts it."""
    async with running(settings(), cluster_of({"a": NOWHERE, "b": NOWHERE})) as service:
        for number in range(20):
            facts = await service.serve(chat(TURN, "x", f"question {number}"), A)
        assert facts.overlaps.hot_tokens > 0.9 * facts.overlaps.matched_tokens(A) > 0


async def test_a_prompt_routed_by_somebody_else_is_learned_all_the_same() -> None:
    """As middleware in another app hears nothing of picks, only of answers."""
    async with running(settings(), cluster_of({"a": NOWHERE})) as service:
        service.kv.finished(await service.ask(chat(TURN)), Result(A, True))
        assert (await service.ask(chat(TURN))).preferred == A


async def test_index_sizes_are_exposed() -> None:
    async with running(settings(), cluster_of({"a": NOWHERE})) as service:
        facts = await service.serve(chat(TURN), A)
        for index in ("approximate", "hot"):
            assert service.metric("kvproxy_kvcache_index_blocks", index=index) == len(facts.hashes)
        assert service.metric("kvproxy_kvcache_index_blocks", index="precise") == 0


async def test_facts_are_refreshed_for_a_request_that_had_to_wait() -> None:
    """Endpoints that were routed to, failed and left meanwhile; its own wait leaves nothing behind."""
    async with running(settings(), cluster_of({"a": NOWHERE, "b": NOWHERE})) as service:
        waits = await service.ask(chat(TURN, "an answer", "and now?"))
        assert (waits.preferred, waits.overlaps.by_endpoint) == (None, {})
        other = await service.ask(chat(TURN))
        service.kv.placed(other, B)
        service.kv.refresh(waits)
        assert waits.preferred == B
        assert waits.overlaps.matched_tokens(B) > 0.9 * other.overlaps.prompt_tokens
        service.kv.finished(other, Result(B, False))
        service.kv.refresh(waits)
        assert (waits.preferred, waits.overlaps.matched_tokens(B)) == (None, 0)


async def test_a_refresh_makes_a_prompt_no_hotter() -> None:
    """Only requests that are routed count."""
    async with running(settings(), cluster_of({"a": NOWHERE})) as service:
        hot = [await service.serve(chat(TURN), A) for _ in range(5)][-1]
        assert hot.overlaps.hot_tokens > 0
        cold = await service.ask(chat(long_text("z")))
        for _ in range(5):
            service.kv.refresh(cold)
        assert cold.overlaps.hot_tokens == 0
