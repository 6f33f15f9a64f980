"""Rules that admit sessions, those of other schedulers among them, on small fleets."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from benchmarks.session_rules.thunderagent import FORCE_AFTER_S, TICK_S, ThunderAgent
from benchmarks.session_rules.vllm_router import MAX_TTL_S, WINDOW, VllmRouter, Window
from benchmarks.sessions import RULES
from kvproxy.lab.replay.batch import BatchFigures, compare_batch
from kvproxy.lab.replay.compare import ComparisonPlan, PolicySpec, UnknownPolicy, play_policy
from kvproxy.lab.replay.results import ReplayOutcome
from kvproxy.lab.replay.router import LiveRequest, SimEndpoint
from kvproxy.lab.replay.session_rules import Places, SessionRule, find_best_places
from kvproxy.lab.replay.settings import Pace, ReplayFleet
from kvproxy.lab.replay.trace import Trace, Turn
from kvproxy.lab.replay.view import endpoint_id
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import SimRequest
from kvproxy.lab.simulator.timing import EngineTiming
from tests.lab.replay.traces import agents

CAPACITY = 8192  # tokens of each engine here


#: Room for three of the ten contexts at their largest.
SHORT = ReplayFleet(
    instances=1, capacity_tokens=3072, reuse_outputs=True, timing=EngineTiming(prefill_tokens_per_s=500.0)
)
EVERY = (*RULES.values(), "places=3")


def play(policy: str, trace: Trace, fleet: ReplayFleet = SHORT) -> Sequence[ReplayOutcome]:
    """Return the outcomes of one run."""
    spec = PolicySpec.parse_run(policy)
    return play_policy(trace, Pace(), fleet, spec.make(rng=Random(1)), spec)


def figures(policy: str, trace: Trace, fleet: ReplayFleet = SHORT) -> BatchFigures:
    """Return those of one run."""
    plan = ComparisonPlan(fleet, [PolicySpec.parse_run(policy)])
    (one,) = compare_batch(trace, plan, err=io.StringIO()).policies.values()
    return one


@pytest.mark.parametrize("policy", EVERY)
def test_sessions_keep_what_requests_lose(policy: str) -> None:
    """Where memory is short each rule finds more prefixes, and answers every request."""
    plain, ruled = figures("kv_aware+no_admission", agents()), figures(policy, agents())
    assert ruled.ended == plain.ended == 10
    assert ruled.hit_rate > plain.hit_rate
    assert ruled.wait_max_s > 0


@pytest.mark.parametrize("policy", EVERY)
def test_nothing_waits_where_all_fits(policy: str) -> None:
    """Room for every context: sessions take as long as alone, save for what they take from each other."""
    fleet = replace(SHORT, capacity_tokens=65_536, timing=EngineTiming())
    name = "places=10" if policy == "places=3" else policy
    assert figures(name, agents(), fleet).wait_max_s < 1.1  # vllm_router looks at the engine's queue once a second


@pytest.mark.parametrize("policy", EVERY)
def test_an_engine_that_is_lost_loses_no_session(policy: str) -> None:
    """Requests that waited for it or had a place there go on elsewhere; only broken answers fail."""
    fleet = replace(SHORT, instances=2, leaves=((1, 0.1),))
    outcomes = play(policy, agents(), fleet)
    assert len(outcomes) == agents().requests
    answered = [each for each in outcomes if each.finished_at is not None and each.first_token_at is not None]
    assert len(answered) >= len(outcomes) - 3
    assert {each.endpoint for each in answered} == {0, 1}


@pytest.mark.parametrize("policy", EVERY)
def test_an_engine_that_joins_is_used(policy: str) -> None:
    """Its endpoint takes sessions."""
    outcomes = play(policy, agents(20, apart_ms=2000), replace(SHORT, instances=2, joins=((1, 0.1),)))
    assert {each.endpoint for each in outcomes} == {0, 1}


def test_places_are_kept_to_the_end() -> None:
    """Never more sessions than places, each at one endpoint."""
    outcomes = play("places=2", agents(8), replace(SHORT, instances=2))
    homes: dict[int, set[int]] = {}
    for each in outcomes:
        homes.setdefault(each.session, set()).add(each.endpoint)
    assert all(len(home) == 1 for home in homes.values())
    spans = {
        session: (
            min(each.placed_at or 0.0 for each in outcomes if each.session == session),
            max(each.finished_at or 0.0 for each in outcomes if each.session == session),
        )
        for session in homes
    }
    for moment, _ in spans.values():
        there = [homes[session] for session, (first, last) in spans.items() if first <= moment < last]
        assert all(there.count({endpoint}) <= 2 for endpoint in (0, 1))


def endpoints(count: int = 1) -> list[SimEndpoint]:
    """Return idle engines of 8,192 tokens."""
    settings = ReplayFleet(instances=count, capacity_tokens=CAPACITY).engine_settings(64, 0, 1.0)
    return [SimEndpoint(endpoint_id(index), index, Engine(settings)) for index in range(count)]


def request(session: int, tokens: int, number: int = 0) -> LiveRequest:
    """Return one turn of so many tokens."""
    turn = Turn(0.0, tokens, 100, agents(1, 1).sessions[0].turns[0].blocks)
    return LiveRequest(session, number, turn, ReplayOutcome(0.0, tokens))


def granted(rule: SessionRule, now: float) -> list[int]:
    """Return the sessions that may go now."""
    sessions = []
    while (grant := rule.take(now)) is not None:
        sessions.append(grant.request.session)
    return sessions


def test_thunderagent_resumes_the_smallest_new_program_first() -> None:
    """As its users found: large prompts wait behind all smaller ones; and nothing is resumed between ticks."""
    rule = ThunderAgent()
    places = endpoints()
    rule.begin(places)
    first = request(0, 7000)
    rule.offer(first, 0.0)
    assert granted(rule, 0.0) == [0]
    rule.offer(request(1, 6000), 1.0)
    rule.offer(request(2, 3000), 1.1)
    rule.offer(request(3, 4000), 1.2)
    assert granted(rule, 1.2) == []
    assert rule.next_at(1.2) == TICK_S
    rule.ended(first, places[0], 2.0, last=True)
    assert granted(rule, 2.0) == []
    assert sorted(granted(rule, TICK_S)) == [2, 3]


def test_thunderagent_pauses_the_smallest_between_turns() -> None:
    """Contexts that outgrew the memory give way, the smallest first; it waits until there is room again."""
    rule = ThunderAgent()
    places = endpoints()
    rule.begin(places)
    asked = [request(0, 3000), request(1, 4500)]
    for one in asked:
        rule.offer(one, 0.0)
    assert granted(rule, 0.0) == [0, 1]
    for one, grown in zip(asked, (3400, 5000), strict=True):
        one.turn = replace(one.turn, prompt_tokens=grown)
        rule.ended(one, places[0], 1.0, last=False)
    assert granted(rule, TICK_S) == []
    rule.offer(request(0, 3500, 1), TICK_S + 1)
    rule.offer(request(1, 5100, 1), TICK_S + 1)
    assert granted(rule, TICK_S + 1) == [1]
    rule.ended(asked[1], places[0], TICK_S + 2, last=True)
    assert granted(rule, 2 * TICK_S) == [0]


def test_thunderagent_pauses_those_at_work_after_their_request() -> None:
    """With none between turns the smallest keeps its place until its answer ended."""
    rule = ThunderAgent()
    places = endpoints()
    rule.begin(places)
    for session in (0, 1):
        rule.offer(request(session, 1000), 0.0)
    assert granted(rule, 0.0) == [0, 1]
    for session, tokens in ((0, 4040), (1, 4060)):
        rule.ended(request(session, 1000), places[0], 1.0, last=False)
        rule.offer(request(session, tokens, 1), 1.5)
        places[0].engine.submit(SimRequest(str(session), (), tokens, 30), 1.5)
    assert granted(rule, 1.5) == [0, 1]
    while places[0].engine.load.kv_usage < 1.0:
        places[0].engine.advance(places[0].engine.next_event_at() or 0.0)
    assert granted(rule, TICK_S) == []
    for session in (0, 1):
        rule.ended(request(session, 4040, 1), places[0], TICK_S + 1, last=False)
        rule.offer(request(session, 4100, 2), TICK_S + 2)
    assert granted(rule, TICK_S + 2) == [1]


def test_thunderagent_forces_what_waited_for_half_an_hour() -> None:
    """Whatever the room."""
    rule = ThunderAgent()
    rule.begin(endpoints())
    rule.offer(request(0, 8000), 0.0)
    rule.offer(request(1, 8000), 0.0)
    assert granted(rule, 0.0) == [0]
    assert granted(rule, FORCE_AFTER_S - 1) == []
    assert granted(rule, FORCE_AFTER_S + TICK_S) == [1]


def test_the_time_between_turns_is_learned() -> None:
    """No time before a hundred gaps; then enough for nearly all of the short ones, and none for gaps that outlast what
    a prefill costs."""
    window = Window()
    assert window.ttl_s(6.0) == 0.0
    rng = Random(1)
    window.gaps_s.extend(rng.uniform(0.1, 0.9) for _ in range(WINDOW))
    assert 0.9 < window.ttl_s(6.0) <= 6.0
    assert window.ttl_s(60.0) <= MAX_TTL_S
    slow = Window()
    slow.gaps_s.extend(rng.uniform(50.0, 70.0) for _ in range(WINDOW))
    assert slow.ttl_s(6.0) == 0.0


def test_vllm_router_takes_the_latest_first_and_forces_the_rest() -> None:
    """New programs wait behind those that have been served, 300 s at most."""
    rule = VllmRouter(EngineTiming())
    places = endpoints()
    rule.begin(places)
    old = request(0, 5000)
    rule.offer(old, 0.0)
    assert granted(rule, 0.0) == [0]
    rule.offer(request(1, 5000), 1.0)
    assert granted(rule, 1.5) == []
    rule.ended(old, places[0], 2.0, last=False)  # without a time between turns its place is free at once
    assert granted(rule, 2.0) == [1]
    rule.offer(request(2, 5000), 3.0)
    rule.offer(request(0, 5200, 1), 4.0)
    rule.ended(request(1, 5000), places[0], 5.0, last=True)
    assert granted(rule, 5.0) == [0]
    assert granted(rule, 302.0) == []
    assert granted(rule, 304.0) == [2]


def test_vllm_router_admits_nothing_where_requests_wait_in_the_engine() -> None:
    """As read each second from its metrics."""
    rule = VllmRouter(EngineTiming())
    places = endpoints()
    rule.begin(places)
    rule.offer(request(0, 100), 0.0)
    assert granted(rule, 0.0) == [0]
    engine = places[0].engine
    fleet = ReplayFleet(capacity_tokens=CAPACITY, max_sequences=1)
    places[0].engine = Engine(fleet.engine_settings(64, 0, 1.0))
    for name in ("a", "b"):
        places[0].engine.submit(SimRequest(name, (), 100, 10), 0.5)
    rule.offer(request(1, 100), 1.2)
    granted(rule, 1.2)
    rule.offer(request(2, 100), 1.5)
    assert granted(rule, 1.5) == []
    places[0].engine = engine
    assert granted(rule, 2.5) == [2]


@pytest.mark.parametrize("limit", ["places=0", "places=", "places=x"])
def test_a_number_of_places_is_at_least_one(limit: str) -> None:
    """Anything else names no rule."""
    with pytest.raises(UnknownPolicy, match="no policy"):
        PolicySpec.parse_run(limit)


@pytest.mark.parametrize("name", ["no.such.module:Rule", "kvproxy.lab:NoSuchRule"])
def test_a_rule_that_cannot_be_imported_is_named(name: str) -> None:
    """With the reason."""
    with pytest.raises(ValueError, match=f"--policy {name} cannot be imported: "):
        PolicySpec.parse_run(name)


@pytest.mark.parametrize("most", [1, 2, 7, 40])
@pytest.mark.parametrize("peak", [1, 2, 3, 6, 13, 31, 60])
def test_the_best_number_of_places_is_found_by_trying(most: int, peak: int) -> None:
    """Where the figure rises to one number and falls from there; each number is tried once."""
    tried = []

    def measure(places: int) -> float:
        tried.append(places)
        return -abs(places - peak)

    assert find_best_places(measure, most) == min(most, peak)
    assert len(tried) == len(set(tried))


def test_the_bound_of_a_batch_has_its_best_number() -> None:
    """None that the report names is better than its neighbours."""
    plan = ComparisonPlan(SHORT, [PolicySpec.parse_run("places")])
    ((name, best),) = compare_batch(agents(), plan, err=io.StringIO()).policies.items()
    number = int(name.removeprefix("places="))
    for other in {max(1, number - 1), number + 1}:
        assert best.sessions_per_hour >= figures(f"places={other}", agents()).sessions_per_hour


def test_places_without_endpoints_wait() -> None:
    """Nothing goes while no endpoint is there."""
    rule = Places(1)
    rule.begin([])
    rule.offer(request(0, 100), 0.0)
    assert granted(rule, 0.0) == []
    assert rule.next_at(0.0) is None
