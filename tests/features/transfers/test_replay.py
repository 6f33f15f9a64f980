"""Transfers on demand in a replay: what is offered, what is refused, what comes of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import msgspec
import pytest

from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.load import EngineState
from kvproxy.cluster.routing.policy import PRECISE, Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.routing.selector import decide
from kvproxy.cluster.routing.speeds import SpeedModel, SpeedPriors
from kvproxy.cluster.routing.work import prefill_s
from kvproxy.cluster.settings import PolicyName
from kvproxy.features.transfers.copy_planner import (
    DISPLACES,
    LATE,
    LINK,
    NOT_HELD,
    STORE,
    Links,
    LinkTerms,
    Transfer,
    TransferPlanner,
)
from kvproxy.lab.replay.compare import PolicySpec, UnknownPolicy, play_policy
from kvproxy.lab.replay.results import ReplayOutcome, Summary, summarize_outcomes
from kvproxy.lab.replay.router import LiveRequest, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.settings import Pace, ReplayFleet
from kvproxy.lab.replay.trace import Turn
from kvproxy.lab.replay.transfers import LinkPlan, SimTransfers
from kvproxy.lab.replay.view import Settle, endpoint_id
from kvproxy.lab.simulator.block_cache import BlockCache
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import BlockStored, EngineSettings, KvEvent
from tests.lab.replay.traces import chat_trace, shared_prefix_trace

BLOCK = 512
SPEEDS = SpeedModel(SpeedPriors())
PLAN = LinkPlan(10.0, latency_s=0.001)
A, B, C = (endpoint_id(index) for index in range(3))


def endpoints() -> list[SimEndpoint]:
    return [SimEndpoint(name, index, Engine(EngineSettings(64, BLOCK))) for index, name in enumerate((A, B, C))]


def planner(plan: LinkPlan = PLAN) -> SimTransfers:
    return SimTransfers(plan, block_size=BLOCK, rng=Random(1))


def published(blocks: int) -> Overlap:
    """In the engine's memory by its own events."""
    return Overlap(blocks * BLOCK, source=PRECISE, claimed_tokens=blocks * BLOCK)


def asked(**held: Overlap) -> PickRequest:
    """Return a prompt of 10,000 tokens; what endpoints hold by their name."""
    names = {"a": A, "b": B, "c": C}
    return PickRequest(facts=OverlapFacts(10_000, {names[name]: overlap for name, overlap in held.items()}))


def test_the_longest_is_offered_everywhere_at_its_price() -> None:
    """Those that hold it are left as they are; of the price nothing but the copy, where nothing else waits."""
    offered = planner().offer(asked(a=published(16), b=published(2)), endpoints(), SPEEDS, 0.0)
    assert [offered.facts.matched_tokens(name) for name in (A, B, C)] == [16 * BLOCK] * 3
    assert offered.transfer_s is not None
    assert set(offered.transfer_s) == {B, C}
    copy_s = PLAN.latency_s + 14 * BLOCK / PLAN.tokens_per_s
    assert offered.transfer_s[B] == pytest.approx((LATE + LINK) * copy_s + displaced_s(2, 16))
    assert offered.transfer_s[C] > offered.transfer_s[B]


def test_a_copy_that_a_limit_refuses_is_left_out_alone() -> None:
    """B lacks less than C: where only the longer copy is too much, the shorter one is offered all the same."""
    there, request = endpoints(), asked(a=published(16), b=published(8))
    planned = TransferPlanner(LinkTerms(10_000_000.0, 0.001, BLOCK, BLOCK), rng=Random(1)).offer(
        request,
        there,
        SPEEDS,
        0.0,
        sources=there,
        published={A: 16 * BLOCK},
        refuses=lambda tokens: tokens > 8 * BLOCK,
    )
    assert planned.transfer_s is not None
    assert set(planned.transfer_s) == {B}


@pytest.mark.parametrize(
    ("plan", "held"),
    [
        (replace(PLAN, gb_per_s=0.9), published(16)),
        (replace(PLAN, min_tokens=16 * BLOCK + 1), published(16)),
        (PLAN, Overlap(16 * BLOCK)),  # promised, not announced
        (PLAN, published(0)),
    ],
    ids=["slow link", "too little", "not published", "nothing"],
)
def test_missing_calls(plan: LinkPlan, held: Overlap) -> None:
    request = asked(a=held)
    offered = planner(plan).offer(request, endpoints(), SPEEDS, 0.0)
    assert (offered.facts, offered.transfer_s or None) == (request.facts, None)


def displaced_s(held: int, copied: int) -> float:
    """Return the worth of a copy's memory: a share of the prefill it saves."""
    uncached = [10_000 - blocks * BLOCK for blocks in (held, copied)]
    before, after = (prefill_s(one, 10_000 - one, 0.0, SPEEDS.seconds) for one in uncached)
    return DISPLACES * (before - after)


@pytest.mark.parametrize(("in_flight", "offered"), [(0, True), (50_000, True), (51_000, False)])
def test_a_target_full_of_hot_blocks_is_refused(in_flight: int, offered: bool) -> None:
    """With requests in flight and the copy over nine tenths of its memory, all else there would be given up. What is in
    flight elsewhere does not matter."""
    there = endpoints()
    for endpoint in there:
        endpoint.load.engine = EngineState(0.0, capacity_tokens=65_000)
    there[2].load.reserve(0, in_flight, 0.0)
    found = planner().offer(asked(a=published(16)), there, SPEEDS, 0.0).transfer_s
    assert found is not None
    assert (B in found, C in found) == (True, offered)


def test_a_copy_that_is_over_in_time_costs_the_link_alone() -> None:
    """With a second of work before the request there, a copy of a tenth of that delays nothing."""
    there = endpoints()
    there[2].load.reserve(20_000, 0, 0.0)
    offered = planner().offer(asked(a=published(16)), there, SPEEDS, 0.0)
    assert offered.transfer_s is not None
    link_s = LINK * (PLAN.latency_s + 16 * BLOCK / PLAN.tokens_per_s)
    assert offered.transfer_s[C] == pytest.approx(link_s + displaced_s(0, 16))
    assert offered.transfer_s[B] > offered.transfer_s[C]


def compute(engine: Engine, blocks: list[int]) -> None:
    """Store the blocks in the engine."""
    cache: BlockCache = engine.own_cache
    taken = cache.allocate(len(blocks))
    cache.store(taken, BlockStored(tuple(blocks), None))
    cache.release(taken)


def test_both_links_are_reserved() -> None:
    """A second copy from the same source, and one into the same target, begin when the first is over."""
    source, target, other = (each.engine for each in endpoints())
    blocks = list(range(1, 17))
    compute(source, blocks)
    under_test = planner()
    first, there = under_test.begin(Transfer(A, B, NOT_HELD, 16 * BLOCK, 0.0), source, target, blocks, 0.0)
    assert first == pytest.approx(PLAN.latency_s + 16 * BLOCK / PLAN.tokens_per_s)
    assert list(there) == blocks
    second, _ = under_test.begin(Transfer(A, C, NOT_HELD, 16 * BLOCK, 0.0), source, other, blocks, 0.0)
    assert second == pytest.approx(2 * first)
    offered = under_test.offer(asked(a=published(16)), endpoints(), SPEEDS, 0.0)
    assert offered.transfer_s is not None
    assert offered.transfer_s[B] == pytest.approx(LATE * 3 * first + LINK * first + displaced_s(0, 16))
    assert (under_test.counts.made, under_test.counts.tokens) == (2, 32 * BLOCK)


def test_prefixes_lost_at_the_source_are_not_copied() -> None:
    """It comes to nothing at once, and no link is held for it."""
    source, target, _ = (each.engine for each in endpoints())
    under_test = planner()
    over_at, there = under_test.begin(Transfer(A, B, NOT_HELD, 4 * BLOCK, 0.0), source, target, [1, 2, 3, 4], 5.0)
    assert (over_at, list(there)) == (5.0 + PLAN.latency_s, [])
    assert under_test.counts.empty == 1


class OneHolds:
    """A view of caches in which the first engine holds sixteen blocks of every prompt."""

    def facts(self, turn: Turn) -> OverlapFacts:
        return OverlapFacts(turn.prompt_tokens, {A: published(16)})

    def routed(self, endpoint: int, turn: Turn) -> Settle:
        return lambda predicted, cached: None

    def observe(self, endpoint: int, events: Sequence[KvEvent]) -> None:
        """Its facts do not change."""

    def forget(self, endpoint: int) -> None:
        """As little."""


@pytest.mark.parametrize("came", [16, 5, 0])
def test_a_request_is_counted_by_what_came_for_it(came: int) -> None:
    """Not by what was to come: that is what its engine computes, and what its prediction is judged by."""
    there, policy = endpoints(), KvAware(rng=Random(1), speeds=SpeedModel(SpeedPriors()))
    there[0].load.reserve(200_000, 0, 0.0)
    router = VirtualRouter(there, policy, OneHolds(), transfers=planner())
    turn = Turn(0.0, 20 * BLOCK, 10, array("Q", range(20)))
    placed = router.arrive(LiveRequest(0, 0, turn, ReplayOutcome(0.0, turn.prompt_tokens)), 0.0)
    assert placed is not None
    assert placed.transfer is not None
    assert (placed.endpoint.load.pending_tokens, placed.request.outcome.predicted_tokens) == (4 * BLOCK, 16 * BLOCK)
    router.copied(placed, came, 0.1)
    load, outcome = placed.endpoint.load, placed.request.outcome
    assert (load.pending_tokens, outcome.predicted_tokens) == ((20 - came) * BLOCK, came * BLOCK)
    assert load.resident_tokens == 20 * BLOCK


def test_copies_push_out_none_of_their_own_beginning() -> None:
    """A full cache gives up what is older, whatever of the prompt is there stays; without room nothing is taken in."""
    cache = BlockCache(6)
    for hashes in ([1, 2], [9, 8, 7, 6]):
        blocks = cache.allocate(len(hashes))
        cache.store(blocks, BlockStored(tuple(hashes), None))
        cache.release(blocks)
    assert cache.receive([1, 2, 3, 4]) == 2
    assert cache.match_prefix([1, 2, 3, 4], 4) == 4
    assert cache.receive([1, 2, 3, 4]) == 0
    cache.allocate(5)
    assert cache.receive([21, 22]) == 0
    assert 21 not in cache


def figures(fleet: ReplayFleet, text: str, gap_ms: int = 60) -> Summary:
    spec = PolicySpec.parse(text)
    policy = spec.make(rng=Random(1))
    trace = shared_prefix_trace(gap_ms=gap_ms)
    outcomes = play_policy(trace, Pace(closed_loop=False), fleet, policy, spec)
    assert all(each.first_token_at is not None for each in outcomes)
    return summarize_outcomes(outcomes, fleet.instances)


def test_more_is_reused_where_it_can_be_copied() -> None:
    """And the mean first token comes earlier; without a link it is the same run."""
    fleet = ReplayFleet(instances=3, link=LinkPlan(12.5))
    without, moved = (figures(fleet, text) for text in ("kv_aware", "kv_aware+move"))
    assert moved.hit_rate > without.hit_rate
    assert moved.ttft_mean_s < without.ttft_mean_s
    assert figures(replace(fleet, link=LinkPlan(0.5)), "kv_aware+queue+move") == without


def test_nothing_is_lost_with_engines_that_leave() -> None:
    """Copies under way to a lost engine, and from it, come to nothing; every request is answered or broken once."""
    fleet = ReplayFleet(instances=3, link=LinkPlan(1.5), leaves=((0, 0.4),), joins=((0, 0.7),))
    spec = PolicySpec(PolicyName.KV_AWARE, queue=True, move=True)
    trace = chat_trace()
    outcomes = play_policy(trace, Pace(scale=0.1), fleet, spec.make(rng=Random(1)), spec)
    assert len(outcomes) == trace.requests
    assert sum(each.first_token_at is not None for each in outcomes) >= trace.requests - 12


def test_moving_needs_a_policy_that_prices_it() -> None:
    with pytest.raises(UnknownPolicy, match=r"\+move needs kv_aware"):
        PolicySpec.parse("least_ttft+move")
    assert str(PolicySpec.parse("kv_aware+move+no_queue")) == "kv_aware+no_queue+move"


def test_prefixes_computed_nearly_as_fast_are_not_copied() -> None:
    """A copy takes the links from others: at 1.5 GB/s, or where it takes long to begin, a short beginning is not worth
    it; a long one is, whose tokens attend to more before them."""
    slow = planner(LinkPlan(1.5, latency_s=0.001))
    short, long = asked(a=published(4)), PickRequest(facts=OverlapFacts(100_000, {A: published(180)}))
    assert not slow.offer(short, endpoints(), SPEEDS, 0.0).transfer_s
    assert slow.offer(long, endpoints(), SPEEDS, 0.0).transfer_s
    assert planner().offer(short, endpoints(), SPEEDS, 0.0).transfer_s
    assert not planner(LinkPlan(12.5, latency_s=0.2)).offer(short, endpoints(), SPEEDS, 0.0).transfer_s


def test_a_copy_that_ends_leaves_its_links_to_those_that_began_after_it() -> None:
    """The second from the same source still has the link of both; when it is over nothing is remembered."""
    links = Links()
    first, second = Transfer(A, B, NOT_HELD, 16, 0.0), Transfer(A, C, NOT_HELD, 16, 0.0)
    links.reserve(first, 1.0)
    links.reserve(second, 2.0)
    links.release(first)
    assert (links.free_at(A, B, 0.5), links.free_at(STORE, B, 0.5)) == (2.0, 0.5)
    links.release(second)
    assert (links.into, links.out) == ({}, {})


def test_a_copy_for_a_request_that_needs_an_adapter_too() -> None:
    """Both prices count, and the copy is found though the cluster says later what the adapter costs."""
    subject, there = planner(), endpoints()
    policy = KvAware(rng=Random(1), speeds=SPEEDS)
    offered = subject.offer(asked(a=published(16)), there, SPEEDS, 0.0)
    assert offered.transfer_s is not None
    plain = decide(offered, there, policy, 0.0)
    loaded = decide(msgspec.structs.replace(offered, adapter_s={A: 30.0, B: 1.0, C: 30.0}), there, policy, 0.0)
    assert plain is not None
    assert loaded is not None
    more = [after - before for before, after in zip(plain.costs, loaded.costs, strict=True)]
    assert more[1] == pytest.approx(1.0)
    assert min(more[0], more[2]) > 30.0  # late, besides
    transfer = subject.find_transfer(loaded)
    assert transfer is not None
    assert (loaded.endpoint.id, transfer.target) == (B, B)
