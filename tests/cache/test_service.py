"""Lessons of one request for the next."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.cache.metrics import KvCacheMetrics
from kvproxy.cache.overlap.facts import Result
from kvproxy.cache.overlap.lookup_service import PATIENCE_S
from tests.cache.support import (
    NOWHERE,
    A,
    B,
    chat,
    cluster_of,
    completion,
    controller,
    engine,
    long_text,
    running,
    settings,
    words,
    world,
)
from tests.support.clock import FakeClock

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
    async with world({"a": tokenizer, "b": tokenizer}, lmcache, tokenize={"inline": False}) as service:
        first = await service.ask(chat(TURN))
        assert first.preferred is None
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
    async with world({"a": tokenizer}, controller(nobody), tokenize={"inline_min": 0}) as service:
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
            facts = await service.ask(chat(long_text(f"w{number}-")))
            service.kv.finished(facts, Result(A, True, cached_tokens=512))
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
