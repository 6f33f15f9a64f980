"""Policies by hash: the ring, consistent hashing with bounded load, session affinity."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.features.hash_policies.consistent_hash import LOAD_FACTOR, ConsistentHash, HashRing
from kvproxy.features.hash_policies.session import Session
from tests.cluster.routing.fleet import FakeCandidate, fleet, occupy
from tests.support.examples import examples

KEYS = [f"session-{n}".encode() for n in range(2000)]


def owners(ring: HashRing, candidates: list[FakeCandidate]) -> dict[bytes, EndpointId]:
    indexes = ring.place_candidates(candidates)
    return {key: next(member for member in ring.walk(key) if member in indexes) for key in KEYS}


def test_a_key_keeps_its_owner() -> None:
    """The ring is a function of its members, not of their order or of former members."""
    ring = HashRing()
    before = owners(ring, fleet(5))
    assert owners(ring, list(reversed(fleet(5)))) == before
    assert owners(HashRing(), fleet(5)) == before


@pytest.mark.parametrize("gone", range(5))
def test_removing_one_moves_only_its_keys(gone: int) -> None:
    """Every other endpoint keeps its keys."""
    ring, candidates = HashRing(), fleet(5)
    before = owners(ring, candidates)
    removed = candidates.pop(gone).id
    after = owners(ring, candidates)
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == removed}
    assert moved
    assert owners(HashRing(), candidates) == after


def test_adding_one_moves_keys_only_to_it() -> None:
    """And about its share of them."""
    ring = HashRing()
    before, after = owners(ring, fleet(5)), owners(ring, fleet(6))
    moved = [after[key] for key in KEYS if before[key] != after[key]]
    assert set(moved) == {"e5"}
    assert 0.5 < len(moved) / (len(KEYS) / 6) < 1.6


def test_keys_spread_by_weight() -> None:
    """An endpoint of weight 3 owns about three times the keys of one of weight 1."""
    shares = Counter(
        owners(HashRing(), [FakeCandidate(EndpointId(f"e{i}"), w) for i, w in enumerate((1, 3, 1))]).values()
    )
    assert 2.0 < shares[EndpointId("e1")] / shares[EndpointId("e0")] < 4.5
    assert 2.0 < shares[EndpointId("e1")] / shares[EndpointId("e2")] < 4.5


def test_a_weight_that_shrinks_moves_only_that_endpoints_keys() -> None:
    """Slow start must not reshuffle the fleet."""
    ring, candidates = HashRing(), fleet(5)
    before = owners(ring, candidates)
    candidates[2].weight = 0.1
    after = owners(ring, candidates)
    assert {before[key] for key in KEYS if before[key] != after[key]} == {"e2"}
    candidates[2].weight = 1.0
    assert owners(ring, candidates) == before


def test_the_ring_forgets_who_left_long_ago() -> None:
    """A fleet whose endpoints come and go does not grow its memory."""
    ring = HashRing()
    for generation in range(300):
        ring.place_candidates([FakeCandidate(EndpointId(f"g{generation}")), *fleet(2)])
    assert len(list(ring.walk(b"key"))) < 40
    assert len(ring._hashes) < 40


@settings(max_examples=examples(25))
@given(st.lists(st.floats(min_value=0.01, max_value=1000), min_size=1, max_size=8), st.binary(max_size=20))
def test_a_walk_meets_every_member_once(weights: list[float], key: bytes) -> None:
    """Whatever the weights: the lightest has a point too."""
    ring = HashRing()
    ring.place_candidates([FakeCandidate(EndpointId(f"e{i}"), weight) for i, weight in enumerate(weights)])
    assert sorted(ring.walk(key)) == sorted(f"e{i}" for i in range(len(weights)))


def test_consistent_hash_brings_equal_prompts_together() -> None:
    """By session key first, else by the prompt's head."""
    policy, candidates = ConsistentHash(rng=random.Random(1)), fleet(8)
    by_head = {policy.choose(PickRequest(prompt_head=b"You are"), candidates, 0.0).index for _ in range(20)}
    assert len(by_head) == 1
    request = PickRequest(session_key="You are", prompt_head=b"something else")
    choice = policy.choose(request, candidates, 0.0)
    assert {choice.index} == by_head
    assert choice.reason == "hash_owner"


def test_consistent_hash_without_a_key_goes_anywhere() -> None:
    """There is nothing to keep together."""
    policy, candidates = ConsistentHash(rng=random.Random(1)), fleet(4)
    choices = [policy.choose(PickRequest(), candidates, 0.0) for _ in range(200)]
    assert len({choice.index for choice in choices}) == 4
    assert {choice.reason for choice in choices} == {"hash_no_key"}


def test_consistent_hash_without_a_key_keeps_the_bound_too() -> None:
    """A full endpoint is passed over wherever on the ring one lands."""
    policy, candidates = ConsistentHash(rng=random.Random(1)), fleet(3)
    occupy(candidates[0], times=30)
    choices = [policy.choose(PickRequest(), candidates, 0.0) for _ in range(50)]
    assert {(choice.index, choice.reason) for choice in choices} == {(1, "hash_no_key"), (2, "hash_no_key")}


def test_consistent_hash_passes_over_who_is_screened_out() -> None:
    """A retry goes to the next on the ring, and the first choice stands when the owner is back."""
    policy, candidates = ConsistentHash(rng=random.Random(1)), fleet(5)
    request = PickRequest(session_key="s")
    owner = candidates[policy.choose(request, candidates, 0.0).index]
    rest = [candidate for candidate in candidates if candidate is not owner]
    second = policy.choose(request, rest, 0.0)
    assert second.reason == "hash_owner"
    assert candidates[policy.choose(request, candidates, 0.0).index] is owner
    assert policy.choose(request, rest, 0.0) == second


def test_consistent_hash_bounds_the_load() -> None:
    """One hot key: no endpoint takes more than 1.25 times its share, and the overflow always goes the same way."""
    policy, candidates = ConsistentHash(rng=random.Random(1)), fleet(4)
    reasons = Counter[str]()
    for total in range(1, 401):
        choice = policy.choose(PickRequest(session_key="hot"), candidates, 0.0)
        reasons[choice.reason] += 1
        occupy(candidates[choice.index])
        most = max(candidate.load.in_flight for candidate in candidates)
        assert most <= LOAD_FACTOR * total / 4 + 1
    assert reasons["hash_owner"] >= 100
    assert reasons["hash_overflow"] > 0
    assert sorted(candidate.load.in_flight for candidate in candidates)[0] < 50


def test_a_session_stays_on_its_endpoint() -> None:
    """Also while that one is a little busier than the others."""
    policy, candidates = Session(rng=random.Random(1)), fleet(4)
    home = policy.choose(PickRequest(session_key="s"), candidates, 0.0).index
    occupy(candidates[home], times=7)
    choice = policy.choose(PickRequest(session_key="s"), candidates, 0.0)
    assert (choice.index, choice.reason) == (home, "session")
    occupy(candidates[home], times=1)  # eight are too many
    assert policy.choose(PickRequest(session_key="s"), candidates, 0.0).reason == "session_overloaded"


@pytest.mark.parametrize(("others", "leaves"), [(0, True), (3, True), (20, False)])
def test_a_session_leaves_an_overloaded_endpoint(others: int, leaves: bool) -> None:
    """More than twice the fair share, and at least eight."""
    policy, candidates = Session(rng=random.Random(1)), fleet(4)
    home = policy.choose(PickRequest(session_key="s"), candidates, 0.0).index
    for index, candidate in enumerate(candidates):
        occupy(candidate, times=20 if index == home else others)
    choice = policy.choose(PickRequest(session_key="s"), candidates, 0.0)
    assert (choice.index != home) is leaves
    assert choice.reason == ("session_overloaded" if leaves else "session")


def test_requests_without_a_session_go_where_it_is_quiet() -> None:
    """As least_request."""
    candidates = fleet(3)
    occupy(candidates[0])
    occupy(candidates[2])
    choice = Session(rng=random.Random(1)).choose(PickRequest(prompt_head=b"x"), candidates, 0.0)
    assert (choice.index, choice.reason) == (1, "no_session")


def test_keys_may_be_any_text() -> None:
    """A lone surrogate from a client's JSON is a key like another."""
    request = PickRequest(session_key="\ud800")
    for policy in (Session(rng=random.Random(1)), ConsistentHash(rng=random.Random(1))):
        first = policy.choose(request, fleet(9), 0.0)
        assert policy.choose(request, fleet(9), 0.0) == first
