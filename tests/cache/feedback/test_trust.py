"""Trust in claims that nothing backs."""

from __future__ import annotations

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cache.feedback.trust import Trust

A, B = EndpointId("a"), EndpointId("b")


def test_everything_is_believed_at_first() -> None:
    """Another router's traffic is as real as ours."""
    assert Trust().trusted_tokens(A, 1000, 0) == 1000


def test_wrong_claims_cost_trust_where_they_were_made() -> None:
    """Two wrong ones halve it, for that endpoint alone; what is backed stays."""
    trust = Trust(decay=1.0)
    for _ in range(2):
        trust.observe_claim(A, 1000, 400, 400)
    assert trust.trusted_share(A) == pytest.approx(0.5)
    assert trust.trusted_tokens(A, 1000, 400) == 700
    assert trust.trusted_tokens(A, 1000, 1200) == 1000
    assert trust.trusted_tokens(B, 1000, 400) == 1000


def test_right_claims_keep_it() -> None:
    """Also when the engine reuses more than was claimed."""
    trust = Trust()
    for cached in (1000, 1000, 1200):
        trust.observe_claim(A, 1000, 0, cached)
    assert trust.trusted_share(A) == pytest.approx(1.0)


def test_a_claim_may_be_partly_right() -> None:
    """By the share of the unbacked tokens that were reused."""
    trust = Trust(prior_claims=0.0, decay=1.0)
    trust.observe_claim(A, 1000, 400, 550)
    assert trust.trusted_share(A) == pytest.approx(0.25)


def test_mistrust_ages() -> None:
    """A hundred wrong claims are forgotten over some thousands of backed responses."""
    trust = Trust()
    for _ in range(100):
        trust.observe_claim(A, 1000, 0, 0)
    assert trust.trusted_share(A) < 0.05
    for _ in range(3000):
        trust.observe_claim(A, 1000, 1000, 1000)
    assert trust.trusted_share(A) > 0.8


def test_backed_claims_leave_no_record() -> None:
    """Nothing is kept for endpoints that never made another kind."""
    trust = Trust(max_endpoints=1)
    trust.observe_claim(A, 1000, 1000, 0)
    trust.observe_claim(B, 1000, 0, 0)
    trust.observe_claim(A, 1000, 0, 0)
    assert trust.trusted_share(B) == 1.0
    assert trust.trusted_share(A) < 1.0
    trust.forget_endpoint(A)
    trust.forget_endpoint(A)
    assert trust.trusted_share(A) == 1.0
