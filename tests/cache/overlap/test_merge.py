"""Routed requests and KV events: one merge, in the proxy and in a replay."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvproxy.base.types import EndpointId, InferenceRequest, Prompt, RequestKind, Tier
from kvproxy.cache.feedback.trust import Trust
from kvproxy.cache.indexes.beginnings import PreciseMatch
from kvproxy.cache.indexes.block_events import BlockRemoved, BlockStored
from kvproxy.cache.overlap.index_state import FollowedEvents, IndexState
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.overlap.merge import in_steps, is_contradicted, merge_overlaps
from kvproxy.cache.overlap.prompt_hashes import SHORT_BYTES
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cluster.routing.policy import PRECISE, Overlap
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.lab.replay.trace import Turn
from kvproxy.lab.replay.view import IndexView, endpoint_id
from kvproxy.lab.simulator import engine_io as simulated
from tests.cache.support import A, B

#: A prompt of 256 blocks of 16 tokens, 4,096 in all, and as many blocks of text.
TOKENS = array("I", range(1, 4097))
HASHES = array("Q", range(1000, 1256))
NAMES = tuple(range(256))
BYTES_PER_TOKEN = TEXT_BLOCK_BYTES / 16
OTHER = array("Q", range(9000, 9050))


@pytest.fixture
def local() -> LocalIndexes:
    """One endpoint whose events are followed exactly; it was sent the prompt, announced it and evicted it."""
    sources = LocalIndexes(IndexState(), FollowedEvents())
    sources.exact = frozenset({A})
    sources.settle_entry(sources.route(A, sources.approximate.locate(HASHES)), prefilled=True)
    sources.precise.apply_events(A, 0, [BlockStored(NAMES, None, TOKENS, 16), BlockRemoved(NAMES)])
    return sources


def overlaps(local: LocalIndexes) -> dict[str, Overlap]:
    found = local.find_overlaps(
        local.approximate.locate(HASHES), bytes_per_token=BYTES_PER_TOKEN, tokens=TOKENS, cache_salt=None
    )
    return {str(endpoint): overlap for endpoint, overlap in found.items()}


def test_an_unrelated_request_in_flight_brings_nothing_back(local: LocalIndexes) -> None:
    """Evicted blocks are gone, however busy the engine is with other prompts."""
    assert overlaps(local) == {}
    local.route(A, local.approximate.locate(OTHER))
    assert overlaps(local) == {}


def test_this_prompt_in_flight_counts_until_its_request_is_over(local: LocalIndexes) -> None:
    """Its blocks are promised and not yet announced; afterwards only events speak for them."""
    claim = local.route(A, local.approximate.locate(HASHES))
    assert overlaps(local) == {"a": Overlap(4096)}
    local.settle_entry(claim, prefilled=True)
    assert overlaps(local) == {}


def test_a_prefix_in_flight_counts_as_far_as_it_goes(local: LocalIndexes) -> None:
    """A request that shares 64 blocks with this prompt promises those."""
    local.route(A, local.approximate.locate(HASHES[:64] + OTHER))
    assert overlaps(local) == {"a": Overlap(64 * 16)}


def test_two_requests_in_flight_promise_together(local: LocalIndexes) -> None:
    """The end of one takes nothing from the other."""
    first, second = local.route(A, local.approximate.locate(HASHES)), local.route(A, local.approximate.locate(HASHES))
    local.settle_entry(first, prefilled=False)
    assert overlaps(local) == {"a": Overlap(4096)}
    local.settle_entry(second, prefilled=False)
    assert overlaps(local) == {}
    assert local.approximate.counts.in_flight_entries == 0


def test_a_promise_survives_a_reload(local: LocalIndexes) -> None:
    """Indexes over the same state share what is in flight; its end counts in both."""
    state = IndexState()
    before = LocalIndexes(state, FollowedEvents())
    before.exact = frozenset({A})
    before.precise.apply_events(A, 0, [BlockStored(NAMES, None, TOKENS, 16), BlockRemoved(NAMES)])
    claim = before.route(A, before.approximate.locate(HASHES))
    after = LocalIndexes(state, FollowedEvents())
    after.exact = frozenset({A})
    assert overlaps(after) == {"a": Overlap(4096)}
    after.settle_entry(claim, prefilled=True)
    assert overlaps(after) == {}


@pytest.mark.parametrize("gone", [LocalIndexes.forget_endpoint, LocalIndexes.reset_endpoint], ids=["left", "restarted"])
def test_an_endpoint_that_is_gone_keeps_no_promise(local: LocalIndexes, gone: object) -> None:
    """Requests under way there died with it."""
    claim = local.route(A, local.approximate.locate(HASHES))
    gone(local, A)  # type: ignore[operator]
    assert overlaps(local) == {}
    local.settle_entry(claim, prefilled=False)
    assert overlaps(local) == {}


def test_without_events_nothing_is_kept_twice() -> None:
    """The index of requests under way costs nothing where no events are followed."""
    local = LocalIndexes(IndexState())
    local.route(A, local.approximate.locate(HASHES))
    assert local.approximate.counts.in_flight_entries == 0
    assert overlaps(local)[A].tokens == pytest.approx(4096, rel=0.01)


@pytest.mark.parametrize("size_bytes", [0, 100, 2048, SHORT_BYTES, SHORT_BYTES + 1, 2 * SHORT_BYTES])
def test_a_prompt_has_the_same_blocks_however_they_are_found(size_bytes: int) -> None:
    """Short ones without the memory of sessions, where nothing goes by message keys."""
    prompt = Prompt(b"", (b"x" * size_bytes, b"y" * 300))
    request = InferenceRequest(RequestKind.CHAT, "m", prompt)
    plain, keyed = LocalIndexes(IndexState(), lookups=False), LocalIndexes(IndexState(), FollowedEvents())
    hashes, keys, *_ = plain.prompts.hash_prompt(request, "m")
    assert (hashes, 2) == (keyed.prompts.hash_prompt(request, "m")[0], len(keyed.prompts.hash_prompt(request, "m")[1]))
    assert (len(plain.sessions), len(keys)) == ((0, 0) if prompt.size_bytes <= SHORT_BYTES else (1, 2))


@pytest.mark.parametrize(
    ("routed", "in_flight", "announced", "exact", "expected"),
    [
        (320, 0, None, True, None),
        (320, 160, None, True, Overlap(160)),
        (320, 160, None, False, Overlap(320)),
        (320, 0, 160, True, Overlap(160, (), PRECISE, 0.0, 160, 160)),
        (320, 0, 160, False, Overlap(320, claimed_tokens=160)),
        (320, 320, 160, True, Overlap(320, claimed_tokens=160)),
        (320, 160, 320, True, Overlap(320, (), PRECISE, 0.0, 320, 320)),
        (160, 0, 320, True, Overlap(320, (), PRECISE, 0.0, 320, 160)),
        (160, 0, 320, False, Overlap(320, (), PRECISE, 0.0, 320, 160)),
        (0, 0, 320, True, Overlap(320, (), PRECISE, 0.0, 320, 0)),
    ],
)
def test_the_merge(routed: int, in_flight: int, announced: int | None, exact: bool, expected: Overlap | None) -> None:
    """Exact events are believed over what was routed, but not over what is promised; others add to it."""
    found = merge_overlaps(
        routed={A: routed} if routed else {},
        in_flight={A: in_flight} if in_flight else {},
        announced={} if announced is None else {A: PreciseMatch(announced, (), 0)},
        exact={A} if exact else {B},
        trust=Trust(),
        lookup_trust=Trust(),
    )
    assert found == ({} if expected is None else {A: expected})


#: Matches that endpoints share, as neighbours in a lookup do.
_MATCHES = [PreciseMatch(0, (), 0), PreciseMatch(512, (), 0), PreciseMatch(512, ((Tier.HOST, 256),), 0)]
_KNOWN = st.tuples(
    st.sampled_from([None, *_MATCHES]),
    st.sampled_from([0, 256, 512, 768, 1024]),  # routed there
    st.sampled_from([0, 512, 1024]),  # in flight
    st.booleans(),  # its stream is complete
    st.booleans(),  # its claims were wrong before
)


@given(st.lists(_KNOWN, max_size=40))
@example([(_MATCHES[1], 0, 0, True, False), (_MATCHES[1], 0, 0, True, True)])  # the second one's claims are doubted
@example([(_MATCHES[1], 0, 0, True, False), (_MATCHES[1], 0, 1024, True, False)])  # and this one's promise is longer
def test_endpoints_are_merged_as_if_each_were_alone(
    fleet: list[tuple[PreciseMatch | None, int, int, bool, bool]],
) -> None:
    """Objects that endpoints share save time, and change no result."""
    names = [EndpointId(f"e{number}") for number in range(len(fleet))]
    known = dict(zip(names, fleet, strict=True))
    trust = Trust()
    for name in names:
        if known[name][4]:
            trust.observe_claim(name, 1024, 0, 0)

    def merged(some: list[EndpointId]) -> dict[EndpointId, Overlap]:
        return merge_overlaps(
            routed={name: known[name][1] for name in some if known[name][1]},
            in_flight={name: known[name][2] for name in some if known[name][2]},
            announced={name: match for name in some if (match := known[name][0]) is not None},
            exact={name for name in some if known[name][3]},
            trust=trust,
            lookup_trust=Trust(),
        )

    alone: dict[EndpointId, Overlap] = {}
    for name in names:
        alone |= merged([name])
    assert merged(names) == alone


def test_a_promise_counts_over_announcements_that_are_not_trusted() -> None:
    """Events of that engine were wrong before; what is under way there will be there."""
    trust = Trust()
    for _ in range(30):
        trust.observe_claim(A, 320, 0, 0)
    sources = {
        "routed": {},
        "announced": {A: PreciseMatch(320, (), 0)},
        "exact": {A},
        "trust": trust,
        "lookup_trust": trust,
    }
    assert merge_overlaps(in_flight={}, **sources)[A].tokens < 32  # type: ignore[arg-type]
    assert merge_overlaps(in_flight={A: 160}, **sources)[A] == Overlap(160, claimed_tokens=320)  # type: ignore[arg-type]


def test_lower_tiers_follow_what_is_on_the_device() -> None:
    """A lower trust shortens the prefix at its end."""
    announced = {A: PreciseMatch(96, ((Tier.HOST, 64),), 0)}
    found = merge_overlaps(routed={}, in_flight={}, announced=announced, exact={A}, trust=Trust(), lookup_trust=Trust())
    assert (found[A].device_tokens, found[A].lower_tokens) == (96, 64)


def test_a_discounted_claim_may_reach_the_device() -> None:
    """Of a claim that is hardly believed nothing is left for lower tiers, and not less than nothing."""
    trust = Trust()
    for _ in range(30):
        trust.observe_claim(A, 320, 0, 0)
    announced = {A: PreciseMatch(256, ((Tier.HOST, 64),), 0)}
    found = merge_overlaps(routed={}, announced=announced, exact={A}, trust=trust, lookup_trust=Trust())[A]
    assert 0 < found.device_tokens < 256
    assert found.lower_tokens == 0


@pytest.mark.parametrize(
    ("predicted", "cached", "contradicted"),
    [(0, 0, False), (100, 38, False), (100, 37, True), (8000, 6936, False), (8000, 6935, True)],
)
def test_contradictions_of_a_prediction(predicted: int, cached: int, contradicted: bool) -> None:
    """Half of a short one, and an eighth and 64 tokens of a long one, are within what blocks and estimates explain."""
    assert is_contradicted(predicted, cached) is contradicted


def test_a_replay_believes_what_the_proxy_believes() -> None:
    """The same story told to both: evicted, another prompt under way, this one under way, over."""
    turn = Turn(0.0, 6 * 512 + 100, 1, array("Q", range(6)))
    other = Turn(0.0, 3 * 512, 1, array("Q", range(500, 503)))
    view = IndexView(ReplayFleet(instances=1), 512, rng=Random(1))

    def blocks() -> int:
        return view.facts(turn).matched_tokens(endpoint_id(0)) // 512

    view.facts(turn)
    view.routed(0, turn)(0, 0)
    view.observe(0, [simulated.BlockStored(tuple(turn.blocks), None)])
    assert blocks() == 6
    view.observe(0, [simulated.BlockRemoved(name) for name in reversed(turn.blocks)])
    assert blocks() == 0
    view.facts(other)
    view.routed(0, other)
    assert blocks() == 0
    settle = view.routed(0, turn)
    assert blocks() == 6
    settle(0, 0)
    assert blocks() == 0


STEPPED = {A: 1024}


@pytest.mark.parametrize(
    ("overlap", "reused"),
    [
        (Overlap(3000), Overlap(2048, held_tokens=3000)),
        (Overlap(1000), Overlap(0, held_tokens=1000)),
        (Overlap(1500, ((Tier.HOST, 1000),)), Overlap(1500, ((Tier.HOST, 548),), held_tokens=2500)),
        (Overlap(2100, ((Tier.HOST, 900),)), Overlap(2048, (), held_tokens=3000)),
        (Overlap(2048), Overlap(2048, held_tokens=2048)),
        (
            Overlap(3000, (), PRECISE, 0.0, 3000, 700),
            Overlap(2048, (), PRECISE, 0.0, 2048, 700, 3000),
        ),
    ],
)
def test_an_engine_that_reuses_in_steps(overlap: Overlap, reused: Overlap) -> None:
    """Whole steps count, on whatever tier; what a claim is tested by is what the engine can make of it."""
    assert in_steps(overlap, 1024, 10_000) == reused


def test_the_last_token_is_always_computed() -> None:
    """A prompt of two whole steps reuses one of them."""
    assert in_steps(Overlap(2048), 1024, 2048).tokens == 1024
    assert in_steps(Overlap(2048), 1024, 2049).tokens == 2048


def test_partial_blocks_count_on_average() -> None:
    """Half a block of text, less half a block of the engine's: else every match is taken for shorter than it is."""
    local = LocalIndexes(IndexState())
    for endpoint, blocks in ((A, 2), (B, 3)):
        local.enter_prompt(endpoint, local.approximate.locate(HASHES[:blocks]))
    found = local.find_overlaps(
        local.approximate.locate(HASHES[:3]),
        bytes_per_token=TEXT_BLOCK_BYTES / 64,
        tokens=None,
        cache_salt=None,
        prompt_tokens=200,
    )
    assert (found[A].tokens, found[B].tokens) == (128 + 24, 192)  # all of B's whole blocks are the prompt's


def test_steps_are_those_of_their_endpoint() -> None:
    """Another engine of the cluster may be of another kind."""
    merged = merge_overlaps(
        routed={A: 2003, B: 2003}, trust=Trust(), lookup_trust=Trust(), steps=STEPPED, prompt_tokens=5000,
    )  # fmt: skip
    assert merged == {A: Overlap(1024, held_tokens=2003), B: Overlap(2003)}
