"""Follows one request to its place: begins the copy of KV that goes there, and lets the request wait for it."""

from __future__ import annotations

from kvproxy.cache.feature import CacheObserver, CacheParts, RequestWatch
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.providers import ActionKind
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.features.transfers.feature import NOTE
from kvproxy.features.transfers.on_demand import CopiedRequest, CopyDeadline, OnDemand
from kvproxy.features.transfers.transfers import Transfers
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver


class CopyObserver(CacheObserver):
    """Copies of one cache service."""

    def __init__(self, parts: CacheParts) -> None:
        transfers = Transfers(parts)
        parts.actions.added[ActionKind.TRANSFER] = transfers
        self.on_demand = OnDemand(transfers, parts.overlap)

    def watch(self, facts: RequestFacts) -> RequestWatch:
        """Follow the request from now on."""
        kind = AwaitedCopy if self.on_demand.waits else QueuedCopy
        return kind(self.on_demand, CopiedRequest(facts))


class _CopyWatch(RequestObserver):
    """Of one request. (It must not hold the exchange, which would be a cycle.)"""

    __slots__ = ("_on_demand", "_request")

    def __init__(self, on_demand: OnDemand, request: CopiedRequest) -> None:
        self._on_demand = on_demand
        self._request = request

    def finished(self, exchange: Exchange, now: float) -> None:
        self._settle(exchange, "left")

    def _settle(self, exchange: Exchange, unfinished: str) -> None:
        """Record the copy's outcome. Once per request: a placed request is not queued again."""
        if self._request.result is not None and NOTE not in exchange.outcome.notes:
            exchange.outcome.notes[NOTE] = self._on_demand.settle(self._request, self._request.result, unfinished)


class QueuedCopy(_CopyWatch):
    """The copy is made while the router queue holds the request, which waits for nothing else."""

    __slots__ = ()

    def queued(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        self._on_demand.plan(self._request, decision, now)

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        self._settle(exchange, "late")


class AwaitedCopy(_CopyWatch):
    """The copy is part of the decision, and the request waits for it."""

    __slots__ = ("_counted", "_refused", "_wait")

    def __init__(self, on_demand: OnDemand, request: CopiedRequest) -> None:
        super().__init__(on_demand, request)
        self._refused = ""
        self._wait: CopyDeadline | None = None
        self._counted = request.facts.overlaps  # overlaps by which its place was reserved

    def deciding(self, exchange: Exchange, asked: PickRequest, now: float) -> PickRequest:
        """Offer what could be copied."""
        offered, refused = self._on_demand.offer(self._request, asked, now)
        if refused and not self._refused:  # once a request, however often it is decided on
            self._refused = refused
            self._on_demand.count_refused(refused)
        return offered

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        if self._request.result is None:
            self._wait = self._on_demand.begin(self._request, decision, now)
            self._counted = decision.request.facts

    async def before_sending(self, exchange: Exchange) -> bool:
        """Wait for the copy that the request was placed with."""
        wait = self._wait
        self._wait = None
        if wait is not None:
            await self._on_demand.wait(self._request, wait)
            self._settle(exchange, "late")
            exchange.facts = self._request.facts.overlaps
        counted = self._counted
        self._counted = self._request.facts.overlaps
        return wait is not None or counted is not self._counted  # the latter: a limit refused the copy after all
