"""Decides for each request of a cluster whether it goes in two legs."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.costs import wait_s
from kvproxy.cluster.routing.kv_aware import CostWeights
from kvproxy.cluster.routing.selector import PANIC, Decision
from kvproxy.features.disaggregation.bodies import read_body
from kvproxy.features.disaggregation.legs import NoPrefill, TwoLegs
from kvproxy.features.disaggregation.note import FAILED, NOTE, REFUSED, Legs
from kvproxy.features.disaggregation.plan import Plan, choose_plan, wait_before
from kvproxy.features.disaggregation.prefill_leg import Splitting
from kvproxy.features.disaggregation.watch import Disaggregated, find_all
from kvproxy.proxy.forward.engine_request import Answer, EngineRequest


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
        now = state.tools.clock()
        speeds = self._cluster.speeds
        waits_s = 0.0 if speeds is None else wait_before(pick.reservation, pick.endpoint, speeds, now)
        plans = self.list_plans(pick.decision, waits_s, now, barred=exchange.barred, all_requests=not alone)
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
            state.metrics,
            state.tasks,
            state.tools.clock,
        )
        two = TwoLegs(shared, request, pick, names=names, legs=legs, others=list(plans[1:]))
        two.reserve(best)
        return two.run()

    def list_plans(
        self,
        decision: Decision[Endpoint],
        waits_s: float,
        now: float,
        *,
        barred: frozenset[str] = frozenset(),
        all_requests: bool,
    ) -> Sequence[Plan[Endpoint]]:
        """Return the plans that are cheaper than the decoder alone, or all, the cheapest first. `waits_s` is the wait
        for the decoder without this request."""
        asked = decision.request
        decode = decision.endpoint
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
        stall = CostWeights().stall
        return choose_plan(
            facts,
            decode,
            able,
            speeds,
            now,
            stall=stall,
            decode_wait_s=waits_s,
            s_per_token=lambda one: pairs.s_per_token(one, decode),
            all_requests=all_requests,
        )


def describe_prefill(decision: Decision[Endpoint], cluster: Cluster) -> dict[str, object] | None:
    """Return the first leg of a request that another program is to carry; None: it goes to one endpoint."""
    state = next(find_all([cluster]), None)
    if state is None or (connector := state.connector) is None or decision.reason == PANIC:
        return None
    now = state.tools.clock()
    waits_s = 0.0 if cluster.speeds is None else wait_s(decision.endpoint, cluster.speeds, now)
    alone = connector.computes_alone
    plans = Splitter(cluster, state).list_plans(decision, waits_s, now, all_requests=not alone)
    if not plans:
        return None
    best = plans[0]
    return {
        "endpoint": best.prefill.id,
        "url": str(best.prefill.origin),
        "connector": state.settings.connector.value,
        "tokens": best.pulled_tokens,
        "expected_s": best.expected_s,
        "alone_s": best.local_s,
    }


async def _fail(pick: Pick) -> Answer:
    raise NoPrefill(f"no endpoint prefills for {pick.endpoint.id}")
