"""The last decisions: what is kept of a request, and what is not."""

from __future__ import annotations

import gc

from kvproxy.base.types import EndpointId, InferenceRequest, Prompt, RequestKind, Tier
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts
from kvproxy.operate.runtime.recent import RecentDecisions
from kvproxy.proxy.request.exchange import MAX_REMEMBERED, Exchange, Outcome

A = EndpointId("a")


def exchange(*, received_at: float = 10.0, **outcome: object) -> Exchange:
    made = Exchange(received_at=received_at)
    made.request_id, made.tenant, made.body = "r1", "alice", b"x" * 100
    made.inference = InferenceRequest(RequestKind.CHAT, "m", Prompt(b"", (b"hello",)))
    made.facts = OverlapFacts(100, {A: Overlap(64, ((Tier.HOST, 80),))})
    made.outcome = Outcome(**{"endpoint": A, "cluster": "c", "end": "completed", "status": 200, **outcome})  # type: ignore[arg-type]
    return made


def test_kept_entries() -> None:
    """Tenant, endpoint, how long, and the match where the request went, never longer than the prompt."""
    recent = RecentDecisions()
    recent.finished(exchange(ttft_s=0.5), 12.0)
    [decision] = recent.latest()
    assert (decision.ended_at, decision.duration_s, decision.request_id, decision.tenant) == (12.0, 2.0, "r1", "alice")
    assert (decision.model, decision.prompt_tokens, decision.matched_tokens) == ("m", 100, 100)
    assert decision.outcome.ttft_s == 0.5


def test_requests_of_which_little_is_known() -> None:
    """No inference, no facts, no endpoint: all of that is an answer too."""
    recent = RecentDecisions()
    bare = exchange(endpoint=None, end="local_reply")
    bare.inference = None
    recent.finished(bare, 11.0)
    bare.facts = None
    recent.finished(bare, 12.0)
    newest, older = recent.latest()
    assert (newest.model, newest.prompt_tokens, newest.matched_tokens) == ("", 0, 0)
    assert (older.prompt_tokens, older.matched_tokens) == (100, 0)


def test_it_is_bounded_and_lets_prompts_go() -> None:
    """The oldest go first, and no prompt stays alive by it."""
    recent = RecentDecisions(limit=2)
    before = sum(type(each) is InferenceRequest for each in gc.get_objects())
    for number in range(5):
        one = exchange()
        one.request_id = str(number)
        recent.finished(one, 11.0)
    del one
    assert [decision.request_id for decision in recent.latest()] == ["4", "3"]
    assert len(recent) == 2
    assert sum(type(each) is InferenceRequest for each in gc.get_objects()) == before


def test_decisions_have_numbers() -> None:
    """One is found by its number as long as it is kept."""
    recent = RecentDecisions(limit=2)
    for number in range(1, 4):
        one = exchange()
        one.request_id = f"r{number}"
        recent.finished(one, 11.0)
    assert [decision.number for decision in recent.latest()] == [3, 2]
    found = {number: recent.numbered(number) for number in (-1, 0, 1, 2, 3, 4)}
    assert {number: one.request_id for number, one in found.items() if one is not None} == {2: "r2", 3: "r3"}


def test_of_large_fleets_only_the_match_where_it_went_is_kept() -> None:
    """A thousand decisions with every overlap of a thousand endpoints would be a lot of memory."""
    recent = RecentDecisions()
    one = exchange()
    one.facts = OverlapFacts(100, {EndpointId(str(n)): Overlap(1) for n in range(MAX_REMEMBERED)} | {A: Overlap(64)})
    recent.finished(one, 11.0)
    [decision] = recent.latest()
    assert (decision.matched_tokens, set(decision.facts.by_endpoint)) == (64, {A})


def test_the_tally_counts_all_and_starts_over() -> None:
    """Also those no longer kept."""
    recent = RecentDecisions(limit=1)
    for end in ("completed", "completed", "upstream_died"):
        recent.finished(exchange(end=end), 11.0)
    assert recent.take_tally() == {("c", A, "ok"): 2, ("c", A, "failed"): 1}
    assert recent.take_tally() == {}


def test_first_bytes_since_a_moment() -> None:
    """Strictly after it, of streamed answers; requests without one are passed over."""
    recent = RecentDecisions()
    for at, ttft_s, stream in (
        (10.0, 0.1, True),
        (11.0, 0.2, True),
        (12.0, None, True),
        (13.0, 0.3, True),
        (14.0, 9.0, False),
    ):
        one = exchange(ttft_s=ttft_s)
        one.inference = InferenceRequest(RequestKind.CHAT, "m", Prompt(b"", ()), stream=stream)
        recent.finished(one, at)
    assert recent.ttfts_since(10.0) == [0.3, 0.2]
