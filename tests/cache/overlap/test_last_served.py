"""Sessions and stored responses: where they were served last is a fact, and their end frees what was kept for them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvproxy.base.types import EndpointId, InferenceRequest, RequestKind
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.overlap.last_served import MAX_AGE_S, NO_NAMES, LastServed, RequestNames
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.policy import APPROXIMATE, SESSION, Overlap, PickRequest
from kvproxy.operate.runtime.saved_state import dump_served, restore_served
from kvproxy.proxy.request.parse import parse_body
from kvproxy.proxy.request.session import Caller, Session
from tests.cache.support import Service, cluster_of, running, settings
from tests.support.clock import FakeClock

A, B = EndpointId("a"), EndpointId("b")
URLS = {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"}


def request_of(
    session: str | None = None, *, parent: str | None = None, ends: bool = False, **body: Any
) -> tuple[InferenceRequest, bytes]:
    """Return a request to the responses API."""
    raw = json.dumps({"model": "m", "input": "what came before?", **body}).encode()
    caller = Caller(None if session is None else Session(session, parent), ends=ends)
    request = parse_body(RequestKind.RESPONSES, raw, caller=caller)
    assert request is not None
    return request, raw


def served(
    service: Service,
    request: tuple[InferenceRequest, bytes],
    endpoint: EndpointId,
    *,
    tokens: int = 1000,
    answer: int = 50,
    cached: int | None = None,
    response: str = "",
    tenant: str = "",
) -> RequestFacts:
    """Serve a whole request, with the calls of the filter."""
    facts = service.kv.gather(*request, cluster=service.cluster, tenant=tenant)
    service.kv.placed(facts, endpoint)
    service.kv.finished(facts, Result(endpoint, True, tokens, cached, completion_tokens=answer, response_id=response))
    return facts


def held(service: Service, request: tuple[InferenceRequest, bytes], *, tenant: str = "") -> dict[EndpointId, Overlap]:
    facts = service.kv.gather(*request, cluster=service.cluster, tenant=tenant)
    return dict(facts.overlaps.by_endpoint)


async def test_a_request_that_goes_on_from_a_response_costs_least_where_that_is() -> None:
    """Its own text says nothing of the history: the history is what was served there, answer included, and what the
    engine surely holds of it is the prompt."""
    cluster = cluster_of(URLS)
    async with running(settings(), cluster) as service:
        served(service, request_of(), B, tokens=8000, answer=100, response="resp_1")
        facts = service.kv.gather(*request_of(previous_response_id="resp_1"), cluster=cluster)
        assert facts.overlaps.by_endpoint == {B: Overlap(8000, (), SESSION)}
        assert 8100 < facts.overlaps.prompt_tokens < 8200
        assert facts.preferred == B
        assert not facts.hashes
        choice = KvAware(rng=random.Random(1)).choose(PickRequest(facts=facts.overlaps), cluster.endpoints, 0.0)
        assert cluster.endpoints[choice.index].id == B
        assert choice.reason == "overlap"
        assert held(service, request_of(previous_response_id="resp_2")) == {}


async def test_a_price_and_no_rule() -> None:
    """Where the endpoint that has the history is busy for longer than its prefill takes, another one is chosen."""
    cluster = cluster_of(URLS)
    async with running(settings(), cluster) as service:
        served(service, request_of(), B, tokens=500, response="resp_1")
        facts = service.kv.gather(*request_of(previous_response_id="resp_1"), cluster=cluster)
        policy = KvAware(rng=random.Random(1))
        busy = cluster.endpoints[1]
        for _ in range(20):
            busy.load.reserve(8000, 0, 0.0)
        choice = policy.choose(PickRequest(facts=facts.overlaps), cluster.endpoints, 0.0)
        assert cluster.endpoints[choice.index].id == A
        assert choice.reason == "load"


@pytest.mark.parametrize(
    ("asked", "endpoint"),
    [
        (request_of("s", previous_response_id="resp_1"), A),
        (request_of("s", previous_response_id="of another proxy"), B),
        (request_of("t", parent="s", previous_response_id="of another proxy"), B),
        (request_of("t", previous_response_id="of another proxy"), None),
        (request_of("s", conversation="conv_1"), B),
        (request_of("t", previous_response_id="resp_1"), A),
    ],
)
async def test_the_response_comes_before_the_session_and_that_before_its_parent(
    asked: tuple[InferenceRequest, bytes], endpoint: EndpointId | None
) -> None:
    """A fork goes on from any response of its session; one that no response is known of is where its session was."""
    async with running(settings(), cluster_of(URLS)) as service:
        served(service, request_of("s"), A, response="resp_1")
        served(service, request_of("s", previous_response_id="resp_1"), B, response="resp_2")
        assert [*held(service, asked)] == ([] if endpoint is None else [endpoint])


async def test_the_same_ids_of_others_are_others() -> None:
    """Of another tenant, model or cache salt: neither facts nor ends cross."""
    async with running(settings(), cluster_of(URLS)) as service:
        served(service, request_of("s"), A, response="resp_1", tenant="one")
        asked = request_of("s", previous_response_id="resp_1")
        assert [*held(service, asked, tenant="one")] == [A]
        assert held(service, asked, tenant="two") == {}
        assert held(service, asked) == {}
        for changed in ({"model": "n"}, {"cache_salt": "x"}):
            assert held(service, request_of("s", previous_response_id="resp_1", **changed), tenant="one") == {}
        served(service, request_of("s", ends=True), A, tenant="two")
        assert service.metric("kvproxy_kvcache_sessions_ended_total", result="unknown") == 1
        assert [*held(service, request_of("s", previous_response_id="?"), tenant="one")] == [A]


async def test_lost_entries_of_an_endpoint_are_not_trusted() -> None:
    """After a restart, or when it left; and an hour later."""
    clock = FakeClock()
    async with running(settings(), cluster_of(URLS), clock=clock) as service:
        indexes, asked = service.kv.overlap.indexes["default"], request_of(previous_response_id="resp_1")
        for lost in (indexes.reset_endpoint, indexes.forget_endpoint):
            served(service, request_of(), A, response="resp_1")
            assert [*held(service, asked)] == [A]
            lost(A)
            assert held(service, asked) == {}
        served(service, request_of(), A, response="resp_1")
        clock.now += MAX_AGE_S
        assert [*held(service, asked)] == [A]
        clock.now += 1
        assert held(service, asked) == {}


async def test_a_history_teaches_nothing_of_bytes_and_fills_no_index() -> None:
    """The engine counts tokens of a text that the proxy never saw."""
    async with running(settings(), cluster_of(URLS)) as service:
        for number in range(30):
            served(service, request_of("s", previous_response_id="?"), A, tokens=100_000, response=f"resp_{number}")
        assert service.kv.state.bytes_per_token.learned == {}
        assert service.kv.overlap.indexes["default"].approximate.counts.entries == 0


LONG = "what all histories begin with " * 400  # 12,000 bytes


async def test_a_history_begins_with_what_others_hold_as_well() -> None:
    """The text of its first request: an engine that has that of another history computes the rest alone. It counts as
    asked for with every turn."""
    async with running(settings(), cluster_of(URLS)) as service:
        indexes = service.kv.overlap.indexes["default"]
        served(service, request_of(input=LONG), B, tokens=3000, response="resp_other")
        served(service, request_of(input=LONG), A, tokens=3000, response="resp_1")
        served(service, request_of(previous_response_id="resp_1"), A, tokens=9000, cached=3000, response="resp_2")
        found = held(service, request_of(previous_response_id="resp_2"))
        assert found[A] == Overlap(9000, (), SESSION)
        assert 2900 < found[B].tokens <= 3100
        assert found[B].source is APPROXIMATE
        blocks = indexes.approximate.counts.held_blocks(A)
        served(service, request_of(previous_response_id="resp_2"), A, tokens=9500, cached=9000, response="resp_3")
        assert indexes.approximate.counts.held_blocks(A) == blocks == 46
        served(service, request_of(previous_response_id="resp_3"), A, tokens=9600, cached=0, response="resp_4")
        served(service, request_of(previous_response_id="resp_1"), B, tokens=3200, cached=3000, response="fork")
        assert [*held(service, request_of(previous_response_id="fork"))] == [B, A]


async def test_of_a_long_beginning_a_part_is_kept() -> None:
    """Its memory is bounded, whatever a client sends."""
    async with running(settings(), cluster_of(URLS)) as service:
        served(service, request_of(input=LONG * 20), A, tokens=60_000, response="resp_1")
        facts = service.kv.gather(*request_of(previous_response_id="resp_1"), cluster=service.cluster)
        assert len(facts.hashes) == 128
        assert facts.overlaps.by_endpoint[A].tokens == 60_000


async def test_a_wrong_prediction_is_counted_and_made_good() -> None:
    """By its source; what was prefilled there now is what the next request goes by."""
    async with running(settings(), cluster_of(URLS)) as service:
        served(service, request_of(), A, tokens=2000, response="resp_1")
        served(service, request_of(previous_response_id="resp_1"), A, tokens=2100, cached=0, response="resp_2")
        labels = {"cluster": "default", "endpoint": "a", "source": "session"}
        assert service.metric("kvproxy_kvcache_predictions_total", result="miss", **labels) == 1
        assert held(service, request_of(previous_response_id="resp_2")) == {A: Overlap(2100, (), SESSION)}


async def test_engines_that_reuse_in_steps_reuse_histories_in_steps() -> None:
    """As they do any prompt."""
    async with running(settings(), cluster_of(URLS)) as service:
        served(service, request_of(), A, tokens=5000, response="resp_1")
        service.kv.overlap.indexes["default"].steps.known[A] = 4096
        [overlap] = held(service, request_of(previous_response_id="resp_1")).values()
        assert (overlap.tokens, overlap.held_tokens) == (4096, 5000)


async def test_tables_are_bounded_and_shown() -> None:
    """The longest unused go first; many responses push out no session."""
    async with running(settings(), cluster_of(URLS)) as service:
        served(service, request_of("s"), A, response="resp_1")
        assert service.metric("kvproxy_kvcache_last_served", what="sessions") == 1
        assert service.metric("kvproxy_kvcache_last_served", what="responses") == 1
        empty = service.metric("kvproxy_kvcache_index_bytes", index="last_served")
        served(service, request_of(input=LONG), A, response="resp_2")
        blocks, messages = 46, 1
        further = 0.5 * empty + 8 * (blocks + messages)
        assert service.metric("kvproxy_kvcache_index_bytes", index="last_served") == empty + further
    table = LastServed(max_entries=2)
    for number in (1, 2, 3, 2, 4):
        table.note_served(
            RequestNames(session=number), response_id="", endpoint=A, prompt_tokens=1, answer_tokens=0, keys=(), now=0.0
        )
    assert table.sessions == 2
    found = [table.find_history(RequestNames(session=number), 0.0) is not None for number in (1, 2, 3, 4)]
    assert found == [False, True, False, True]
    table.note_served(NO_NAMES, response_id="", endpoint=A, prompt_tokens=1, answer_tokens=0, keys=(), now=0.0)
    for number in range(5):
        table.note_served(
            NO_NAMES, response_id=f"r{number}", endpoint=A, prompt_tokens=1, answer_tokens=0, keys=(), now=0.0
        )
    assert (table.sessions, table.responses) == (2, 2)
    table.end_session(2)
    table.end_session(2)
    assert table.held_bytes == 3 * empty / 2


async def test_the_end_of_a_session_forgets_it() -> None:
    """Its place, whether the last request is one of its own or a small one only to say so."""
    async with running(settings(), cluster_of(URLS)) as service:
        for last in (request_of("s", ends=True), request_of("s", ends=True, input="")):
            served(service, request_of("s"), A)
            assert [*held(service, request_of("s", previous_response_id="?"))] == [A]
            served(service, last, A)
            assert held(service, request_of("s", previous_response_id="?")) == {}
        assert service.metric("kvproxy_kvcache_sessions_ended_total", result="known") == 2


def test_kept_tables_are_bounded() -> None:
    """Those used last come first, in pieces; what no longer stands is left out, and what came back goes out in the
    same order as before."""
    tables = LastServed()
    for number in range(1, 1001):
        names = RequestNames(seed=1, session=number)
        endpoint, keys = A if number % 2 else B, (number,)
        tables.note_served(
            names, response_id="", endpoint=endpoint, prompt_tokens=number, answer_tokens=1, keys=keys, now=number
        )
    tables.forget_cache(B)
    now = 100 + MAX_AGE_S
    whole, part = (_all_of(dump_served(tables, now, max_bytes=size)) for size in (1 << 20, 1 << 13))
    assert sum(map(len, part.sessions)) <= 1 << 12
    assert 0 < len(part.sessions) < len(whole.sessions) == 8
    again = LastServed(max_entries=40)
    _all_of(restore_served(again, whole, now, keep={"a"}))
    assert again.sessions == 40
    assert again.find_history(RequestNames(session=999), now) is not None
    assert again.find_history(RequestNames(session=901), now) is None  # beyond the bound of its table
    assert tables.find_history(RequestNames(session=901), now) is not None
    assert again.find_history(RequestNames(session=998), now) is None  # the endpoint had lost it
    first = next(again.entries())
    assert (first[0], first[2].prompt_tokens, list(first[2].keys)) == (921, 921, [921])


def _all_of(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value
