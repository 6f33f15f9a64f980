"""Decides for each request of a cluster whether it goes in two legs."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.kv_aware import CostWeights
from kvproxy.cluster.routing.selector import PANIC
from kvproxy.features.disaggregation.bodies import read_body
from kvproxy.features.disaggregation.legs import NoPrefill, Splitting, TwoLegs
from kvproxy.features.disaggregation.note import FAILED, NOTE, REFUSED, Legs
from kvproxy.features.disaggregation.plan import Plan, choose_plan, wait_before
from kvproxy.features.disaggregation.watch import Disaggregated
from kvproxy.proxy.forward.asking import Answer, EngineRequest


class Splitter:
    """Of one cluster; made for each configuration."""

    def __init__(self, cluster: Cluster, state: Disaggregated) -> None:
        self._cluster = cluster
        self._state = state

    def split(self, request: EngineRequest, pick: Pick) -> Coroutine[None, None, Answer] | None:
        """As of SplitsRequests."""
        state = self._state
        connector = state.connector
        exchange = request.exchange
        inference = exchange.inference
        notes = exchange.outcome.notes
        earlier = notes.get(NOTE)
        body = request.body.whole
        if connector is None or state.tasks is None or body is None or inference is None:
            return None
        alone = connector.computes_alone
        failed = isinstance(earlier, Legs) and earlier.result in (FAILED, REFUSED)
        if alone and (failed or pick.decision.reason == PANIC):
            return None
        plans = self._list_plans(pick, exchange.barred, state.tools.clock(), all_requests=not alone)
        if (alone and not plans) or (names := read_body(body, inference.kind)) is None:
            return None
        if not plans:
            return _fail(pick)
        best = plans[0]
        legs = Legs(best.prefill.id, best.pulled_tokens, best.expected_s, best.local_s)
        notes[NOTE] = legs
        shared = Splitting(
            self._cluster,
            connector,
            state.settings,
            state.pairs,
            state.price,
            state.metrics,
            state.tasks,
            state.tools.clock,
        )
        others = [plan.prefill for plan in plans[1:]]
        two = TwoLegs(shared, request, pick, names=names, legs=legs, others=others)
        two.reserve(best.prefill)
        return two.run()

    def _list_plans(
        self, pick: Pick, barred: frozenset[str], now: float, *, all_requests: bool = False
    ) -> Sequence[Plan[Endpoint]]:
        """Return the plans that are cheaper than the decoder alone, or all, the cheapest first."""
        asked = pick.decision.request
        decode = pick.endpoint
        settings = self._state.settings
        facts = asked.facts
        if not all_requests and facts.prompt_tokens - facts.matched_tokens(decode.id) < settings.min_tokens:
            return ()
        speeds = self._cluster.speeds
        able = [
            one
            for one in self._cluster.screening.find_prefillers(asked.model, now)
            if one.engine is not decode.engine and one.id not in asked.excluded and one.id not in barred
        ]
        pairs = self._state.pairs
        if settings.canary and all_requests:
            able = [one for one in able if not pairs.is_out(one, decode)]
        elif settings.canary:
            able = [one for one in able if pairs.may_carry(one, decode, asked.model)]
        waits_s = 0.0 if speeds is None else wait_before(pick.reservation, decode, speeds, now)
        stall = CostWeights().stall
        return choose_plan(
            facts,
            decode,
            able,
            speeds,
            now,
            stall=stall,
            decode_wait_s=waits_s,
            price=self._state.price,
            all_requests=all_requests,
        )


async def _fail(pick: Pick) -> Answer:
    raise NoPrefill(f"no endpoint prefills for {pick.endpoint.id}")
