"""Prompts that are computed at one engine and answered at another, in virtual time: by the plan of the feature
`disaggregation`, or by a rule to compare it with.

The router places a request at an engine that answers. If the rule then names another one, that engine prefills first,
its KV goes over a link, and the request joins its own engine with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvproxy.cluster.pick import reserve
from kvproxy.cluster.routing.costs import wait_s
from kvproxy.cluster.routing.kv_aware import CostWeights
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts, PickRequest, Policy
from kvproxy.cluster.settings import EndpointRole
from kvproxy.lab.replay.results import ReplayOutcome
from kvproxy.lab.replay.router import LiveRequest, Placement, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.virtual_time import VirtualTime
from kvproxy.lab.simulator.engine_io import SimRequest

#: The rule of the proxy: by the expected first token.
CHOSEN = "chosen"

#: Returns the engine that prefills a request; None: the one that answers it.
Rule = Callable[["ApartTime", Placement, OverlapFacts, float], SimEndpoint | None]


class ApartTime(VirtualTime):
    """Requests whose prompts `rule` sends to one of `prefillers` are prefilled there first. The router knows the time
    of a pull, as if by canaries."""

    def __init__(
        self,
        *args: Any,
        rule: Rule,
        prefillers: Sequence[SimEndpoint],
        policy: Policy,
        pull_s_per_token: float,
        **more: Any,
    ) -> None:
        from kvproxy.features.disaggregation import plan
        from kvproxy.features.disaggregation.settings import DisaggregationSettings

        super().__init__(*args, **more)
        self.plan = plan
        self.min_tokens = DisaggregationSettings().min_tokens
        assert isinstance(self._router, VirtualRouter)
        self.router = self._router
        self.prefillers = prefillers
        self.speeds = policy.speeds
        self.pull_s_per_token = pull_s_per_token
        self._rule = rule
        self._waiting: dict[str, tuple[Placement, OverlapFacts]] = {}  # by the name of the prefill leg
        self._prefills: dict[str, ReplayOutcome] = {}  # that ended, by the name of the request
        for endpoint in prefillers:
            endpoint.load.on_sample = partial(policy.observe_sample, endpoint.id)

    def wait_before(self, placement: Placement, now: float) -> float:
        """Return the wait at the engine of a placement without it."""
        speeds = self.speeds
        return 0.0 if speeds is None else self.plan.wait_before(placement.reservation, placement.endpoint, speeds, now)

    def find_free(self, now: float) -> SimEndpoint:
        """Return the prefiller that is free first."""
        speeds = self.speeds
        if speeds is None:
            return min(self.prefillers, key=lambda one: one.load.in_flight)
        return min(self.prefillers, key=lambda one: wait_s(one, speeds, now))

    def _submit(self, placement: Placement, now: float) -> None:
        facts = self._facts_of(placement, now)
        prefill = self._rule(self, placement, facts, now)
        if prefill is None or prefill is placement.endpoint:
            super()._submit(placement, now)
            return
        request = placement.request
        reservation = reserve(prefill, PickRequest(facts=facts), self.speeds, now)
        outcome = ReplayOutcome(
            now,
            request.turn.prompt_tokens,
            endpoint=prefill.index,
            predicted_tokens=facts.matched_tokens(prefill.id),
        )
        leg = LiveRequest(request.session, request.number, request.turn, outcome, name=f"p{request.name}")
        self._placed[leg.name] = Placement(leg, prefill, reservation, lambda predicted, cached: None)
        self._waiting[leg.name] = placement, facts
        self._count_as_pulled(placement, facts, now)
        prefill.engine.submit(SimRequest(leg.name, request.turn.blocks, request.turn.prompt_tokens, 1), now)
        self._engines.wake(prefill)

    def _facts_of(self, placement: Placement, now: float) -> OverlapFacts:
        """Return the facts before the placement, by which its endpoint counts as a holder."""
        request = placement.request
        facts = self.router.facts_of(request, now)
        held = {**facts.by_endpoint, placement.endpoint.id: Overlap(request.outcome.predicted_tokens)}
        return OverlapFacts(facts.prompt_tokens, held)

    def _finish(self, placement: Placement, now: float) -> None:
        waiting = self._waiting.pop(placement.request.name, None)
        if waiting is None:
            super()._finish(placement, now)
            prefill = self._prefills.pop(placement.request.name, None)
            if prefill is not None:  # tokens that were pulled were computed all the same
                outcome = placement.request.outcome
                outcome.prefilled_at = prefill.endpoint
                outcome.predicted_tokens = prefill.predicted_tokens
                outcome.cached_tokens = prefill.cached_tokens
            return
        self._router.finished(placement, now)
        decode, facts = waiting
        self._prefills[decode.request.name] = placement.request.outcome
        self._timeline.push(now + self._find_pull_s(decode, facts), self._pulled, (decode, facts))

    def _pulled(self, pulled: tuple[Placement, OverlapFacts], now: float) -> None:
        placement, facts = pulled
        placement.endpoint.engine.receive(placement.request.turn.blocks, now)
        self._count_as_pulled(placement, facts, now)
        super()._submit(placement, now)

    def _find_pull_s(self, placement: Placement, facts: OverlapFacts) -> float:
        missing = facts.prompt_tokens - facts.matched_tokens(placement.endpoint.id)
        return self.plan.pull_s(missing, self.pull_s_per_token)

    def _count_as_pulled(self, placement: Placement, facts: OverlapFacts, now: float) -> None:
        placement.reservation.known = False
        split = self.plan.split_of_pulled(facts, self._find_pull_s(placement, facts))
        placement.endpoint.load.begin(placement.reservation, split, now)


def choose(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> SimEndpoint | None:
    """By the expected first token, as the proxy does."""
    decode = placement.endpoint
    if facts.prompt_tokens - facts.matched_tokens(decode.id) < time.min_tokens:
        return None
    plans = time.plan.choose_plan(
        facts,
        decode,
        [one for one in time.prefillers if one is not decode],
        time.speeds,
        now,
        stall=CostWeights().stall,
        decode_wait_s=time.wait_before(placement, now),
        s_per_token=lambda one: time.pull_s_per_token,
    )
    return plans[0].prefill if plans else None


def never(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> None:
    """Keep every prompt where it is answered."""


def always(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> SimEndpoint:
    """At the prefiller that is free first."""
    return time.find_free(now)


def follow_dynamo(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> SimEndpoint | None:
    """Elsewhere from 2,048 uncached tokens on, or where they are 0.7 of the prompt."""
    missing = facts.prompt_tokens - facts.matched_tokens(placement.endpoint.id)
    local = missing < 2048 and missing < 0.7 * facts.prompt_tokens
    return None if local else time.find_free(now)


def follow_llm_d(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> SimEndpoint | None:
    """Elsewhere from 512 uncached tokens on."""
    missing = facts.prompt_tokens - facts.matched_tokens(placement.endpoint.id)
    return None if missing < 512 else time.find_free(now)


RULES: Mapping[str, Rule] = {
    CHOSEN: choose,
    "never": never,
    "always": always,
    "dynamo": follow_dynamo,
    "llm_d": follow_llm_d,
}


def separating(
    endpoints: Sequence[SimEndpoint], policy: Policy, rule: str, pull_s_per_token: float
) -> Callable[..., ApartTime]:
    """Return how a run of these endpoints is made; "" is the proxy's rule."""
    prefillers = [one for one in endpoints if one.role is not EndpointRole.DECODE]
    rule_of_run = RULES[rule or CHOSEN]
    return partial(ApartTime, rule=rule_of_run, prefillers=prefillers, policy=policy, pull_s_per_token=pull_s_per_token)
