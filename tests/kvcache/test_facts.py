"""Several sources, one truth: the larger contiguous match."""

from __future__ import annotations

from kvproxy.kvcache.overlap.merge import HolderOverlap, merge_overlaps, preferred
from kvproxy.routing.policy import FactSource, Overlap, OverlapFacts
from kvproxy.routing.trust import Trust
from kvproxy.types import EndpointId

A, B, C = EndpointId("a"), EndpointId("b"), EndpointId("c")
LMCACHE = FactSource.LMCACHE_CONTROLLER


def merged(
    local: dict[EndpointId, Overlap], claims: list[HolderOverlap], *, prompt_tokens: int, trust: Trust
) -> dict[EndpointId, Overlap]:
    """What was routed, and a lookup's holders over it."""
    routed = {endpoint: overlap.tokens for endpoint, overlap in local.items()}
    return merge_overlaps(
        routed=routed, trust=Trust(), looked_up=claims, lookup_trust=trust, prompt_tokens=prompt_tokens
    )


def claim(endpoint: EndpointId, tokens: int) -> HolderOverlap:
    return HolderOverlap(endpoint, tokens, True, LMCACHE)


def test_a_larger_claim_extends_what_is_in_engine_memory() -> None:
    """LMCache holds host and disk copies: what it adds to the device's match is lower-tier."""
    assert merged({A: Overlap(256)}, [claim(A, 1024)], prompt_tokens=2000, trust=Trust())[A] == Overlap(
        256, 768, LMCACHE, claimed_tokens=1024, backed_tokens=256
    )


def test_a_smaller_claim_changes_nothing() -> None:
    """Device memory is never believed to hold less because LMCache does."""
    assert merged({A: Overlap(512)}, [claim(A, 256)], prompt_tokens=2000, trust=Trust()) == {A: Overlap(512)}


def test_a_claim_of_nothing_is_no_fact() -> None:
    """A 0-token match is not a match."""
    assert merged({}, [claim(A, 0)], prompt_tokens=100, trust=Trust()) == {}


def test_a_claim_is_capped_by_the_prompt() -> None:
    """Nobody holds more of a prompt than there is."""
    assert merged({}, [claim(A, 4096)], prompt_tokens=100, trust=Trust())[A].tokens == 100


def test_what_only_a_lookup_says_counts_for_what_it_proved_worth() -> None:
    """What is known otherwise stands; other endpoints are believed as before."""
    trust = Trust()
    for _ in range(2):
        trust.observe(A, 1000, 0, 0)
    found = merged({A: Overlap(200)}, [claim(A, 1000), claim(B, 1000)], prompt_tokens=2000, trust=trust)
    assert found[A] == Overlap(200, 400, LMCACHE, claimed_tokens=1000, backed_tokens=200)
    assert found[B].tokens == 1000


def test_the_largest_match_is_preferred() -> None:
    facts = OverlapFacts(1000, {A: Overlap(100), B: Overlap(0, 300)})
    assert preferred(facts, [A, B], min_tokens=1) == B


def test_ties_go_to_the_first_in_the_clusters_order() -> None:
    """The same facts always prefer the same endpoint, whatever order they were learned in."""
    facts = OverlapFacts(1000, {C: Overlap(100), B: Overlap(100)})
    assert preferred(facts, [A, B, C], min_tokens=1) == B


def test_a_match_below_the_minimum_is_no_preference() -> None:
    facts = OverlapFacts(1000, {A: Overlap(100)})
    assert preferred(facts, [A], min_tokens=101) is None
    assert preferred(facts, [A], min_tokens=100) == A


def test_zero_tokens_are_never_preferred() -> None:
    """Not even with a minimum of zero."""
    assert preferred(OverlapFacts(1000, {A: Overlap(0)}), [A], min_tokens=0) is None


def test_who_cannot_serve_the_model_is_not_preferred() -> None:
    """Nor who is not in the order."""
    facts = OverlapFacts(1000, {A: Overlap(900), B: Overlap(10)})
    assert preferred(facts, [B], min_tokens=1) == B
    assert preferred(facts, [A, B], min_tokens=1, serves=lambda endpoint: endpoint == B) == B
