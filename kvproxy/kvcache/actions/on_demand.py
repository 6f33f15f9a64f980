"""Transfers on demand: while the router queue holds a request, KV is copied to where it would then go.

The plan is that of routing/transfers.py, which replays play. The request keeps its place and waits for nothing: it goes
when its turn comes, with what is there by then, and where a copy failed or is late the engine computes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from functools import partial

from xxhash import xxh3_64_intdigest

from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.screening import Refusal
from kvproxy.kvcache.actions.hotness import KnownPrefix
from kvproxy.kvcache.actions.transfers import STEP_TOKENS, Transfers
from kvproxy.kvcache.overlap.facts import RequestFacts
from kvproxy.kvcache.overlap.sources import OverlapSources
from kvproxy.request.exchange import UNDER_WAY, Exchange, TransferResult
from kvproxy.request.observer import RequestObserver
from kvproxy.routing.policy import Overlap
from kvproxy.routing.selector import Decision
from kvproxy.routing.speeds import SpeedModel
from kvproxy.routing.transfers import STORE, LinkTerms, Transfer, TransferPlanner, near_tokens
from kvproxy.types import EndpointId, Tier

#: A copy takes at least so long: a call to the service, and asking whether it is over.
LATENCY_S = 0.02


class TransferWatch(RequestObserver):
    """Follows one request through the router queue."""

    __slots__ = ("_facts", "_on_demand")

    def __init__(self, on_demand: OnDemand, facts: RequestFacts) -> None:
        self._on_demand = on_demand
        self._facts = facts

    def queued(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        self._on_demand.plan(self._facts, decision, now)

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        self._settle(exchange, "late")

    def finished(self, exchange: Exchange, now: float) -> None:
        self._settle(exchange, "left")

    def _settle(self, exchange: Exchange, unfinished: str) -> None:
        """It waits no longer. Once: what is placed is not queued again."""
        if self._facts.transfer is not None and exchange.outcome.transfer is None:
            exchange.outcome.transfer = self._on_demand.settle(self._facts, unfinished)


class OnDemand:
    """Made by `transfers`, within its limits and under its rules. Requests that go the same way share a copy."""

    def __init__(self, transfers: Transfers, overlap: OverlapSources) -> None:
        self._transfers = transfers
        self._overlap = overlap
        self._planner = TransferPlanner(self._terms(), rng=transfers.rng)
        #: Requests that wait, by the copies they wait for: instance and digest of what is copied there.
        self._waiting: dict[tuple[str, int], list[RequestFacts]] = {}

    def watch(self, facts: RequestFacts) -> TransferWatch:
        """What follows the request with these facts."""
        return TransferWatch(self, facts)

    def plan(self, facts: RequestFacts, decision: Decision[Endpoint], now: float) -> None:
        """The router queue holds the request, which would go where this says. A copy begins if it is then cheaper."""
        speeds, tokens = facts.cluster.speeds, facts.tokens
        if speeds is None or tokens is None or len(tokens) < self._planner.terms.min_tokens:
            return
        transfer = self._find_transfer(facts, decision, speeds, now)
        target = None if transfer is None else facts.cluster.find_endpoint(transfer.target)
        if transfer is None or target is None:
            return
        copied = tokens[: transfer.tokens]
        digest = xxh3_64_intdigest(copied.tobytes())
        prefix = KnownPrefix(digest, facts.model, facts.request.cache_salt or "", deque(), digest, copied)
        key = (target.instance_id, digest)
        if key not in self._waiting and not self._begin(key, facts, transfer, target, prefix, speeds):
            return
        self._waiting[key].append(facts)
        facts.transfer = TransferResult(transfer.target, transfer.source or "shared", transfer.tokens)

    def settle(self, facts: RequestFacts, unfinished: str) -> TransferResult | None:
        """The request waits no longer: what became of its copy by then."""
        result = facts.transfer
        if result is not None:
            if result.result == UNDER_WAY:
                result.result = unfinished
                for key, waiting in self._waiting.items():
                    self._waiting[key] = [one for one in waiting if one is not facts]
            self._transfers.metrics.on_demand.labels(result.result).inc()
        return result

    def _find_transfer(
        self, facts: RequestFacts, decision: Decision[Endpoint], speeds: SpeedModel, now: float
    ) -> Transfer | None:
        planner, asked, endpoints = self._planner, decision.request, decision.candidates
        planner.terms = self._terms()
        published, stored = self._sources(facts)
        asked = planner.offer(
            asked, endpoints, speeds, now, sources=facts.endpoints, published=published, stored=stored
        )
        if asked is decision.request:
            return None
        planned = facts.cluster.decide(asked, now)
        return None if isinstance(planned, Refusal) else planner.find_transfer(planned)

    def _terms(self) -> LinkTerms:
        """As the link is at present."""
        speed, least = self._transfers.link.tokens_per_s or math.inf, self._transfers.settings.min_tokens
        return LinkTerms(speed, LATENCY_S, least, STEP_TOKENS, lands=Tier.HOST, waits=False)

    def _sources(self, facts: RequestFacts) -> tuple[Mapping[EndpointId, int], Mapping[EndpointId, int]]:
        """What a lookup service said that endpoints have in memory, and that their instances read from farther."""
        provider, published, stored = self._overlap.lookups.provider, dict[EndpointId, int](), dict[EndpointId, int]()
        for told in facts.lookup_overlaps:
            near = near_tokens(Overlap(0, told.lower)) if told.lower else told.tokens
            if provider is not None and provider.copies:
                published[told.endpoint] = max(near, published.get(told.endpoint, 0))
            if told.tokens > near:
                stored[told.endpoint] = max(told.tokens, stored.get(told.endpoint, 0))
        return published, stored

    def _begin(
        self,
        key: tuple[str, int],
        facts: RequestFacts,
        transfer: Transfer,
        target: Endpoint,
        prefix: KnownPrefix,
        speeds: SpeedModel,
    ) -> bool:
        missing = transfer.tokens - near_tokens(facts.overlaps.by_endpoint.get(target.id, Overlap(0)))
        source = "" if transfer.source == STORE else self._instance_of(facts, transfer.source)
        over = partial(self._over, key, transfer)
        if not self._transfers.begin(target, prefix, missing, source, "queued", speeds, over):
            return False
        self._waiting[key] = []
        self._planner.links.reserve(transfer, transfer.over_at)
        return True

    def _instance_of(self, facts: RequestFacts, endpoint: EndpointId) -> str:
        source = facts.cluster.find_endpoint(endpoint)
        return "" if source is None else source.instance_id

    def _over(self, key: tuple[str, int], transfer: Transfer, result: str, tokens: int) -> None:
        """Its links are free; requests that wait still will be placed by what is there now."""
        self._planner.links.release(transfer)
        for facts in self._waiting.pop(key, ()):
            if facts.transfer is not None:
                facts.transfer.result, facts.transfer.moved = result, tokens
            if tokens:
                self._overlap.add_transferred(facts)
