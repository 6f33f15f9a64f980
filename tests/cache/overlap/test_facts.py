"""Several sources, one truth: the larger contiguous match."""

from __future__ import annotations

from random import Random

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId, Tier
from kvproxy.cache.feedback.trust import Trust
from kvproxy.cache.overlap.merge import HolderOverlap, merge_overlaps, preferred_endpoint
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routing.policy import FactSource, Overlap, OverlapFacts
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings
from tests.support.clock import FakeClock

A, B, C = EndpointId("a"), EndpointId("b"), EndpointId("c")
LOOKUP = FactSource("lookup")


def merged(
    local: dict[EndpointId, Overlap], claims: list[HolderOverlap], *, prompt_tokens: int, trust: Trust
) -> dict[EndpointId, Overlap]:
    """Merge routed prompts with a lookup's holders."""
    routed = {endpoint: overlap.tokens for endpoint, overlap in local.items()}
    return merge_overlaps(
        routed=routed, trust=Trust(), looked_up=claims, lookup_trust=trust, prompt_tokens=prompt_tokens
    )


def claim(endpoint: EndpointId, tokens: int) -> HolderOverlap:
    return HolderOverlap(endpoint, tokens, True, LOOKUP)


def test_a_larger_claim_extends_what_is_in_engine_memory() -> None:
    """LMCache holds host and disk copies: what it adds to the device's match is lower-tier."""
    assert merged({A: Overlap(256)}, [claim(A, 1024)], prompt_tokens=2000, trust=Trust())[A] == Overlap(
        256, ((Tier.HOST, 768),), LOOKUP, claimed_tokens=1024, backed_tokens=256
    )


def test_a_smaller_claim_changes_nothing() -> None:
    """Device memory is never believed to hold less because LMCache does."""
    assert merged({A: Overlap(512)}, [claim(A, 256)], prompt_tokens=2000, trust=Trust()) == {A: Overlap(512)}


def test_a_claim_of_nothing_is_no_fact() -> None:
    """A 0-token match is not a match."""
    assert merged({}, [claim(A, 0)], prompt_tokens=100, trust=Trust()) == {}


def test_a_claim_is_capped_by_the_prompt() -> None:
    """No endpoint holds more of a prompt than there is."""
    assert merged({}, [claim(A, 4096)], prompt_tokens=100, trust=Trust())[A].tokens == 100


def test_lookup_claims_count_by_their_measured_trust() -> None:
    """Facts of other sources stand; other endpoints are trusted as before."""
    trust = Trust()
    for _ in range(2):
        trust.observe_claim(A, 1000, 0, 0)
    found = merged({A: Overlap(200)}, [claim(A, 1000), claim(B, 1000)], prompt_tokens=2000, trust=trust)
    assert found[A] == Overlap(200, ((Tier.HOST, 400),), LOOKUP, claimed_tokens=1000, backed_tokens=200)
    assert found[B].tokens == 1000


def preferred(facts: OverlapFacts, endpoints: str, *, min_tokens: int = 1, model: str = "m") -> str | None:
    """Of these endpoints of a cluster, in its order; `c` serves another model."""
    configured = tuple(
        EndpointSettings(id=name, url=f"http://127.0.0.1:{9 + ord(name)}", models=["other"] if name == "c" else [])
        for name in endpoints
    )
    cluster = Cluster(
        "x", ClusterSettings(endpoints=configured), metrics=Metrics(), clock=FakeClock(), rng=Random(1), sources=()
    )
    return preferred_endpoint(facts, cluster.endpoints, model=model, min_tokens=min_tokens)


def test_the_largest_match_is_preferred() -> None:
    facts = OverlapFacts(1000, {A: Overlap(100), B: Overlap(0, ((Tier.HOST, 300),))})
    assert preferred(facts, "ab") == B


def test_ties_go_to_the_first_in_the_clusters_order() -> None:
    """The same facts always prefer the same endpoint, whatever order they were learned in."""
    facts = OverlapFacts(1000, {EndpointId("d"): Overlap(100), B: Overlap(100)})
    assert preferred(facts, "abd") == B


def test_no_match_counts_for_more_than_the_prompt_has() -> None:
    """Two endpoints that hold all of it are equal, however long what they hold is."""
    facts = OverlapFacts(1000, {A: Overlap(1000), B: Overlap(4000)})
    assert preferred(facts, "ab") == A


def test_a_match_below_the_minimum_is_no_preference() -> None:
    facts = OverlapFacts(1000, {A: Overlap(100)})
    assert preferred(facts, "a", min_tokens=101) is None
    assert preferred(facts, "a", min_tokens=100) == A


def test_zero_tokens_are_never_preferred() -> None:
    """Not even with a minimum of zero."""
    assert preferred(OverlapFacts(1000, {A: Overlap(0)}), "a", min_tokens=0) is None


def test_an_endpoint_that_cannot_serve_the_model_is_not_preferred() -> None:
    """Nor one that is not in the cluster."""
    facts = OverlapFacts(1000, {A: Overlap(900), B: Overlap(10), C: Overlap(999)})
    assert preferred(facts, "b") == B
    assert preferred(facts, "abc") == A
    assert preferred(facts, "abc", model="other") == C
