"""Event streams are believed as far as what they claim alone has proved right."""

from __future__ import annotations

from array import array

import pytest

from kvproxy.cache.indexes.block_events import BlockStored
from kvproxy.cache.overlap.index_state import FollowedEvents, IndexState
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cluster.routing.policy import PRECISE, Overlap
from tests.cache.support import A

#: Twenty blocks of 16 tokens, and as many text blocks for them: a token is 16 bytes long here.
TOKENS = array("I", range(1, 321))
HASHES = array("Q", range(100, 120))
BYTES_PER_TOKEN = TEXT_BLOCK_BYTES / 16


@pytest.fixture
def local() -> LocalIndexes:
    """One endpoint that announced the whole prompt."""
    sources = LocalIndexes(IndexState(), FollowedEvents())
    sources.exact = frozenset({A})
    sources.precise.apply_events(A, 0, [BlockStored(tuple(range(20)), None, TOKENS, 16)])
    return sources


def overlap(local: LocalIndexes) -> Overlap:
    return local.find_overlaps(
        local.approximate.locate(HASHES), bytes_per_token=BYTES_PER_TOKEN, tokens=TOKENS, cache_salt=None
    )[A]


def test_placements_of_another_router_count(local: LocalIndexes) -> None:
    """Nothing backs it and nothing has contradicted it."""
    assert overlap(local) == Overlap(320, source=PRECISE, claimed_tokens=320)


def test_unbacked_claims_that_proved_wrong_count_less(local: LocalIndexes) -> None:
    """Two that found nothing cached halve the next."""
    for _ in range(2):
        found = overlap(local)
        local.trust.observe_claim(A, found.claimed_tokens, found.backed_tokens, 0)
    assert overlap(local).tokens == pytest.approx(160, abs=1)
    assert overlap(local).claimed_tokens == 320


def test_a_routed_prompt_backs_the_claim(local: LocalIndexes) -> None:
    """Then the stream's record does not matter."""
    for _ in range(9):
        local.trust.observe_claim(A, 320, 0, 0)
    local.settle_entry(local.route(A, local.approximate.locate(HASHES)), prefilled=True)
    assert overlap(local) == Overlap(320, source=PRECISE, claimed_tokens=320, backed_tokens=320)


def test_an_endpoint_that_left_takes_its_record_along(local: LocalIndexes) -> None:
    """Another engine under its id starts at nothing."""
    local.trust.observe_claim(A, 320, 0, 0)
    local.forget_endpoint(A)
    assert overlap(local).tokens == 320
