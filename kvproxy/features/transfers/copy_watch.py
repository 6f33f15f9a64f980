"""Follows one request to its place: begins the copy of KV that goes there, and lets the request wait for it."""

from __future__ import annotations

import logging

from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.features.transfers.on_demand import OnDemand, Wait
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver

log = logging.getLogger("kvproxy.kvcache")


def follow_copy(on_demand: OnDemand, exchange: Exchange, facts: RequestFacts) -> None:
    """From now on, for the request with these facts."""
    if on_demand.waits:
        exchange.copier = watch = AwaitedCopy(on_demand, facts)
        exchange.attach(watch)
    else:
        exchange.attach(QueuedCopy(on_demand, facts))


class _CopyWatch(RequestObserver):
    """Of one request. (It must not hold the exchange, which would be a cycle.)"""

    __slots__ = ("_facts", "_on_demand")

    def __init__(self, on_demand: OnDemand, facts: RequestFacts) -> None:
        self._on_demand = on_demand
        self._facts = facts

    def finished(self, exchange: Exchange, now: float) -> None:
        self._settle(exchange, "left")

    def _settle(self, exchange: Exchange, unfinished: str) -> None:
        """Record the copy's outcome. Once per request: a placed request is not queued again."""
        if self._facts.transfer is not None and exchange.outcome.transfer is None:
            exchange.outcome.transfer = self._on_demand.settle(self._facts, unfinished)


class QueuedCopy(_CopyWatch):
    """The copy is made while the router queue holds the request, which waits for nothing else."""

    __slots__ = ()

    def queued(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        self._on_demand.plan(self._facts, decision, now)

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        self._settle(exchange, "late")


class AwaitedCopy(_CopyWatch):
    """The copy is part of the decision, and the request waits for it: a Copier."""

    __slots__ = ("_counted", "_refused", "_wait")

    def __init__(self, on_demand: OnDemand, facts: RequestFacts) -> None:
        super().__init__(on_demand, facts)
        self._refused = ""
        self._wait: Wait | None = None
        self._counted = facts.overlaps  # overlaps by which its place was reserved

    def offer(self, asked: PickRequest, now: float) -> PickRequest:
        """As of Copier."""
        try:
            offered, refused = self._on_demand.offer(self._facts, asked, now)
        except Exception:
            log.exception("[kvcache] this request is placed without copies")
            return asked
        if refused and not self._refused:  # once a request, however often it is decided on
            self._refused = refused
            self._on_demand.count_refused(refused)
        return offered

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        if self._facts.transfer is None:
            self._wait = self._on_demand.begin(self._facts, decision, now)
            self._counted = decision.request.facts

    async def wait(self, exchange: Exchange) -> bool:
        """As of Copier."""
        wait = self._wait
        self._wait = None
        if wait is not None:
            await self._on_demand.wait(self._facts, wait)
            self._settle(exchange, "late")
            exchange.facts = self._facts.overlaps
        counted = self._counted
        self._counted = self._facts.overlaps
        return wait is not None or counted is not self._counted  # the latter: a limit refused the copy after all
