"""LookupClient before routing: within their deadline, without harm, and never in vain."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvproxy.base.types import RequestKind
from kvproxy.cache.store import Holder
from kvproxy.cluster.routing.policy import NO_FACTS
from kvproxy.features.lmcache.lookup_task import MAX_HELD_BYTES, MAX_LOOKUPS
from kvproxy.features.lmcache.provider import CONTROLLER
from kvproxy.proxy.listener.server import serve
from tests.cache.support import (
    A,
    B,
    Fake,
    chat,
    cluster_of,
    completion,
    controller,
    engine,
    long_text,
    parsed,
    running,
    settings,
    world,
)
from tests.support.clock import FakeClock
from tests.support.until import until

PROMPT = chat(long_text("w"))


def both(asked: list[int]) -> dict[str, Any]:
    """b holds everything, a half."""
    return {"a": ["LocalCPUBackend", len(asked) // 2], "b": ["LocalCPUBackend", len(asked)]}


def whole_at_a(asked: list[int]) -> dict[str, Any]:
    """Answer that a holds everything."""
    return {"a": ["LocalCPUBackend", len(asked)]}


def as_objects(asked: list[int]) -> dict[str, Any]:
    """Return the same in Pixiu's shape."""
    return {"a": {"0": "ram", "1": len(asked) // 2}, "b": {"0": "ram", "1": len(asked)}}


@pytest.mark.parametrize("layout", [both, as_objects], ids=["array", "object"])
async def test_both_layout_shapes_lead_to_the_holder_of_most(layout: Any) -> None:
    """The real controller sends arrays; Pixiu believed in objects. The first request already has its preference."""
    lmcache = controller(layout)
    async with world({"a": engine(), "b": engine()}, lmcache) as service:
        facts = await service.ask(PROMPT)
        assert facts.preferred == B
        assert facts.overlaps.prompt_tokens == 601  # exact: the engine counted
        assert facts.overlaps.by_endpoint[B].source is CONTROLLER
        assert service.metric("kvproxy_kvcache_lookups_total", outcome="hit") == 1


@pytest.mark.parametrize(("reused", "believed"), [(0, 0), (601, 4000)])
async def test_a_hint_is_distrusted_where_an_engine_denied_one(reused: int, believed: int) -> None:
    """Hints that go the same way are trusted only as far as the engine had the blocks; a right one costs nothing."""
    async with world({"a": engine(), "b": engine()}, controller(whole_at_a)) as service:
        assert (await service.ask(PROMPT)).preferred == A
        facts = await service.serve(PROMPT, A, cached=reused)
        facts.overlaps = NO_FACTS
        facts.lookup_overlaps = ()
        service.kv.overlap.store.add_holders(facts, lambda _: [Holder("a", 4000, False)])
        [claim] = facts.lookup_overlaps
        assert claim.tokens == believed


@pytest.mark.parametrize(
    "layout", [lambda _: {}, lambda _: {"a": ["LocalCPUBackend", 0]}], ids=["empty", "zero tokens"]
)
async def test_a_lookup_that_names_nobody_is_a_miss(layout: Any) -> None:
    async with world({"a": engine()}, controller(layout)) as service:
        facts = await service.ask(PROMPT)
        assert facts.preferred is None
        assert service.metric("kvproxy_kvcache_lookups_total", outcome="miss") == 1


async def test_a_prompt_shorter_than_a_chunk_is_not_looked_up() -> None:
    """It cannot match: neither tokenize nor lookup is worth the wait."""
    lmcache, tokenizer = controller(both), engine()
    async with world({"a": tokenizer}, lmcache) as service:
        await service.serve(chat("a short question"), A)
        await service.settled()
        assert tokenizer.calls["/tokenize"] == 1  # afterwards, for the turns to come
        assert not (await service.ask(chat("a short question"))).wants_lookup
        assert lmcache.calls["/lookup"] == 0


async def test_a_short_tokenized_prompt_is_not_looked_up() -> None:
    """Long in bytes, short in tokens: known only after the engine counted."""
    lmcache = controller(both)
    async with world({"a": engine()}, lmcache) as service:
        await service.ask(chat("x" * 5000))
        assert lmcache.calls["/lookup"] == 0
        assert service.metric("kvproxy_kvcache_lookups_total", outcome="no_tokens") == 1


async def test_a_deadline_hit_opens_no_breaker_and_what_comes_late_still_teaches() -> None:
    """The service was slow for us, not broken: ten hits in a row leave its breaker closed."""
    answer = asyncio.Event()

    async def slow(asked: dict[str, Any]) -> dict[str, Any]:
        await answer.wait()
        return {"layout_info": {"b": ["LocalCPUBackend", len(asked["tokens"])]}}

    lmcache = controller(both, lookup=slow)
    limits = {"lookup_routing_timeout": 0.02, "circuit_breaker": {"failure_threshold": 1}}
    async with world({"a": engine(), "b": engine()}, lmcache, **limits) as service:
        await asyncio.gather(*(service.ask(chat(long_text(f"w{number}-"))) for number in range(10)))
        assert service.metric("kvproxy_kvcache_lookups_total", outcome="lookup_timeout") == 10
        await until(lambda: lmcache.calls["/lookup"] == 10)
        answer.set()
        local = service.kv.overlap.indexes["default"].approximate
        await until(lambda: local.counts.held_blocks(B) > 0)
        assert service.kv.overlap.store.possible
        assert service.metric("kvproxy_kvcache_token_memory_bytes") > 0
        assert service.kv.gather(*chat(long_text("w3-")), cluster=service.cluster).preferred == B


async def test_the_deadline_runs_from_the_receipt_of_a_request() -> None:
    """Time spent before the lookup is gone: past the deadline no lookup is waited for, however fast."""
    clock = FakeClock()
    async with world({"a": engine()}, controller(whole_at_a), clock=clock, lookup_routing_timeout=60.0) as service:
        in_time, late = (service.kv.gather(*chat(long_text(name)), cluster=service.cluster) for name in ("x", "y"))
        clock.advance(59.0)
        await service.kv.look_up(in_time)
        clock.advance(1.0)
        await service.kv.look_up(late)
        assert (in_time.preferred, late.preferred) == (A, None)
        assert service.metric("kvproxy_kvcache_lookups_total", outcome="lookup_timeout") == 1


async def test_a_late_hint_that_may_be_no_prefix_teaches_nothing() -> None:
    """Of several holders the number is an upper bound: believed for this request at most, never by the index."""
    answer = asyncio.Event()

    async def slow(asked: dict[str, Any]) -> dict[str, Any]:
        await answer.wait()
        return {"layout_info": both(asked["tokens"])}

    limits = {"lookup_routing_timeout": 0.02}
    lmcache = controller(both, lookup=slow)
    async with world({"a": engine(), "b": engine()}, lmcache, **limits) as service:
        await service.ask(PROMPT)
        await until(lambda: lmcache.calls["/lookup"] == 1)
        answer.set()
        await until(lambda: service.metric("kvproxy_queue_depth", queue="kvcache_lookup") == 0)
        await asyncio.sleep(0)
        local = service.kv.overlap.indexes["default"].approximate
        assert (local.counts.held_blocks(A), local.counts.held_blocks(B)) == (0, 0)


async def test_a_dead_service_costs_no_more_than_the_deadline_and_then_nothing() -> None:
    """Down from the start: refused connections open the breaker; from then on no lookup is sent."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with serve(engine()) as a:
            config = settings(lmcache_endpoint=url, circuit_breaker={"failure_threshold": 3, "recovery_timeout": 60})
            async with running(config, cluster_of({"a": a})) as service:
                for number in range(3):
                    facts = await service.ask(chat(long_text(f"w{number}-")))
                    assert facts.preferred is None
                assert service.metric("kvproxy_kvcache_lookups_total", outcome="error") == 3
                facts = service.kv.gather(*PROMPT, cluster=service.cluster)
                assert not facts.wants_lookup
                assert service.metric("kvproxy_kvcache_lookups_total", outcome="breaker_open") == 1
                assert service.metric("kvproxy_breaker_open", breaker="kvcache/lookup") == 1
                assert service.metric("kvproxy_breaker_open", breaker="kvcache/tokenize") == 0


async def test_a_service_that_never_answers_costs_the_deadline() -> None:
    """Then, by its own timeout in the background, it opens the breaker."""

    async def never(_: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    breaker = {"failure_threshold": 1, "recovery_timeout": 60}
    limits = {"lookup_routing_timeout": 0.01, "request_timeout": 0.05, "circuit_breaker": breaker}
    async with world({"a": engine()}, controller(both, lookup=never), **limits) as service:
        await service.ask(completion(list(range(600))))  # token ids: no engine has to answer in time
        await until(lambda: not service.kv.overlap.store.possible)
        assert service.metric("kvproxy_kvcache_lookups_total", outcome="lookup_timeout") == 1


async def test_a_thousand_identical_prompts_are_one_tokenize() -> None:
    """Singleflight: a request that comes while it runs shares the answer."""
    go = asyncio.Event()

    async def gated(asked: dict[str, Any]) -> dict[str, Any]:
        await go.wait()
        return {"tokens": list(range(600)), "max_model_len": 9999}

    tokenizer, lmcache = engine(tokenize=gated), controller(both)
    async with world({"a": tokenizer, "b": tokenizer}, lmcache) as service:
        asking = [asyncio.create_task(service.ask(PROMPT)) for _ in range(1000)]
        await until(lambda: tokenizer.calls["/tokenize"])
        go.set()
        found = await asyncio.gather(*asking)
        assert tokenizer.calls["/tokenize"] == 1
        assert service.metric("kvproxy_kvcache_tokenizes_total", outcome="ok") == 1
        assert lmcache.calls["/lookup"] == 1
        assert service.metric("kvproxy_kvcache_lookups_total", outcome="hit") == 1000
        assert all(facts.preferred == B for facts in found)


async def test_lookups_under_way_are_bounded() -> None:
    """A service that hangs cannot pile up work: beyond the bound requests are routed without it."""

    async def never(_: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    limits = {"lookup_routing_timeout": 0, "request_timeout": 3600}
    async with world({"a": engine()}, Fake({"/lookup": never}), **limits) as service:
        for number in range(MAX_LOOKUPS + 3):
            await service.ask(completion(list(range(number, number + 300))))
        assert service.metric("kvproxy_queue_depth", queue="kvcache_lookup") == MAX_LOOKUPS
        assert service.metric("kvproxy_queue_limit", queue="kvcache_lookup") == MAX_LOOKUPS
        assert service.metric("kvproxy_kvcache_lookups_total", outcome="busy") == 3


async def test_bodies_of_lookups_under_way_are_bounded() -> None:
    """Late lookups keep what the clients sent; all together no more than a bound, and free again when they end."""
    go = asyncio.Event()

    async def gated(asked: dict[str, Any]) -> Any:
        await go.wait()
        return {"layout_info": {}}

    body = bytes(MAX_HELD_BYTES // 2)
    limits = {"lookup_routing_timeout": 0, "request_timeout": 3600}
    async with world({"a": engine()}, Fake({"/lookup": gated}), **limits) as service:
        for number in range(3):
            await service.ask((completion(list(range(number, number + 300)))[0], body))
        assert service.metric("kvproxy_queue_depth", queue="kvcache_lookup") == 2
        assert service.metric("kvproxy_kvcache_lookups_total", outcome="busy") == 1
        go.set()
        await until(lambda: not service.metric("kvproxy_queue_depth", queue="kvcache_lookup"))
        await service.ask((completion(list(range(9, 309)))[0], body))
        assert service.metric("kvproxy_queue_depth", queue="kvcache_lookup") == 1


async def test_local_knowledge_alone_never_waits() -> None:
    """Without a lookup service no task is made and nothing is awaited."""
    async with running(settings(), cluster_of({"a": "http://127.0.0.1:9"})) as service:
        before = len(asyncio.all_tasks())
        asking = service.kv.facts_for(*PROMPT, cluster=service.cluster)
        with pytest.raises(StopIteration):
            asking.send(None)
        assert len(asyncio.all_tasks()) == before


async def test_a_client_that_leaves_counts_nothing() -> None:
    """The lookup goes on without it, and the breaker hears how the service really did."""
    go = asyncio.Event()

    async def gated(asked: dict[str, Any]) -> dict[str, Any]:
        await go.wait()
        return {"layout_info": {}}

    lmcache = controller(both, lookup=gated)
    async with world({"a": engine()}, lmcache, circuit_breaker={"failure_threshold": 1}) as service:
        leaving = asyncio.create_task(service.ask(PROMPT))
        await until(lambda: lmcache.calls["/lookup"])
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert service.kv.overlap.store.possible
        go.set()
        await until(lambda: service.metric("kvproxy_queue_depth", queue="kvcache_lookup") == 0)
        assert service.kv.overlap.store.possible


async def test_shutdown_ends_lookups_under_way() -> None:
    async def never(_: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    limits = {"lookup_routing_timeout": 0.01, "request_timeout": 3600}
    async with world({"a": engine()}, Fake({"/lookup": never}), **limits) as service:
        await service.ask(PROMPT)
    assert service.metric("kvproxy_queue_depth", queue="kvcache_lookup") == 0


async def test_the_same_short_prompt_for_two_models_is_two_questions() -> None:
    """One model's cache proves nothing about the other's, however few tokens they share."""
    answer, asked_for = asyncio.Event(), []

    async def slow(asked: dict[str, Any]) -> dict[str, Any]:
        asked_for.append(asked["tokens"])
        await answer.wait()
        return {"layout_info": {}}

    requests = [parsed(RequestKind.COMPLETION, {"model": model, "prompt": [1, 2, 3]}) for model in ("m", "n", "m")]
    async with world({"a": engine()}, controller(both, lookup=slow), lookup_min_tokens=1) as service:
        waiting = [asyncio.create_task(service.ask(request)) for request in requests]
        await until(lambda: len(asked_for) == 2)
        answer.set()
        await asyncio.gather(*waiting)
    assert asked_for == [[1, 2, 3]] * 2


async def test_a_lookup_that_is_cancelled_at_the_end_fails_no_request() -> None:
    """The service ends while a request waits: it goes on without."""

    async def never(_: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    lmcache = Fake({"/lookup": never})
    async with world({"a": engine()}, lmcache, lookup_routing_timeout=60.0, request_timeout=3600) as service:
        waiting = asyncio.create_task(service.ask(PROMPT), name="request")
        await until(lambda: lmcache.calls["/lookup"] == 1)
    assert (await waiting).preferred is None
    assert service.metric("kvproxy_kvcache_lookups_total", outcome="error") == 1
