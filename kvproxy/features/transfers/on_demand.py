"""Transfers on demand: KV is copied to the endpoint of a request.

Replays play the same plan (copy_planner.py). A copy is part of the decision: the request has its place, and goes when
the copy is there, or is not worth waiting for any more. Where a copy failed or is late the engine computes."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
from xxhash import xxh3_64_intdigest

from kvproxy.base.types import EndpointId, Tier
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.feature import CacheObserver, CacheParts, RequestWatch
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.store import ActionKind
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.costs import own_s
from kvproxy.cluster.routing.policy import Overlap, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import prefill_s
from kvproxy.features.transfers.copy_planner import (
    NOT_HELD,
    STORE,
    LinkTerms,
    Transfer,
    TransferPlanner,
    landed,
    near_tokens,
)
from kvproxy.features.transfers.note import NOTE, UNDER_WAY, TransferResult
from kvproxy.features.transfers.transfers import STEP_TOKENS, Transfers
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver

#: Least duration of a copy: a call to the service, and polling for its end.
LATENCY_S = 0.02


@dataclass(slots=True, eq=False)
class CopiedRequest:
    """A request, and what became of its copy; None: it has none."""

    facts: RequestFacts
    result: TransferResult | None = None


@dataclass(slots=True, eq=False)
class Copy:
    """Copy in progress, and the waiting requests it is made for."""

    tokens: int
    source: str  # as of TransferResult
    requests: list[CopiedRequest] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class CopyDeadline:
    """A request's, for its copy, until then at most."""

    copy: Copy
    until: float


class OnDemand:
    """Made by `transfers`, within its limits and under its rules. Requests that go the same way share a copy."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._store = transfers.store
        self._max_wait_s = transfers.settings.max_wait
        self._clock = transfers.clock
        self._planner = TransferPlanner(self._terms(), rng=transfers.rng)
        #: Waiting requests, by their copies: instance and digest of the copied prefix.
        self._waiting: dict[tuple[str, int], Copy] = {}

    def offer(self, request: CopiedRequest, asked: PickRequest, now: float) -> tuple[PickRequest, str]:
        """Return what is to be decided with what could be copied, and the limit that refuses a copy (a metric label) or
        ""."""
        facts = request.facts
        cluster = facts.cluster
        speeds = cluster.speeds
        if request.result is not None or speeds is None or cluster.queue is None or not self._is_long(facts):
            return asked, ""
        refusals: list[str] = []

        def refuses(tokens: int) -> bool:
            if refused := self._transfers.link.why_refused(tokens, math.inf):
                refusals.append(refused)
            return bool(refused)

        self._planner.terms = self._terms()
        published, stored = self._sources(facts)
        offered = self._planner.offer(
            asked,
            cluster.screening.candidates(asked.model, now),
            speeds,
            now,
            sources=facts.endpoints,
            published=published,
            stored=stored,
            refuses=refuses,
        )
        return offered, refusals[0] if refusals else ""

    def count_refused(self, reason: str) -> None:
        """Count a request's refused copies."""
        self._transfers.metrics.refused.labels(reason).inc()

    def begin(self, request: CopiedRequest, decision: Decision[Endpoint], now: float) -> CopyDeadline | None:
        """Begin the request's copy, if the decision was made with one."""
        facts = request.facts
        transfer = self._planner.find_transfer(decision)
        speeds = facts.cluster.speeds
        here = decision.endpoint
        if speeds is None or facts.tokens is None:
            return None
        if transfer is None:
            copy = self._join(request, here)
            saved_s = 0.0 if copy is None else prefill_s(copy.tokens, 0, 0.0, speeds.seconds)
        else:
            copy = self._begin(request, transfer, speeds)
            saved_s = own_s(facts.overlaps, here.id, speeds) - own_s(decision.request.facts, here.id, speeds)
        if copy is None:
            return None
        return CopyDeadline(copy, now + min(self._max_wait_s, saved_s * speeds.slowness(here.id, now)))

    async def wait(self, request: CopiedRequest, wait: CopyDeadline) -> None:
        """Wait for the copy, within the bound. Its tokens then count among the facts."""
        began = self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait.until - began):
                await wait.copy.over.wait()
        result = request.result
        waited_s = self._clock() - began
        self._transfers.metrics.waits.observe(waited_s)
        if result is not None:
            result.waited_s = round(waited_s, 6)
            self._count_moved(request.facts, result)

    def _count_moved(self, facts: RequestFacts, result: TransferResult) -> None:
        held = facts.overlaps.by_endpoint.get(result.endpoint, NOT_HELD)
        overlap = landed(held, min(result.moved, result.tokens), Tier.HOST)
        if overlap is held:
            return
        if self._store.source is not None:
            overlap = msgspec.structs.replace(overlap, source=self._store.source)
        by_endpoint = {**facts.overlaps.by_endpoint, result.endpoint: overlap}
        facts.overlaps = msgspec.structs.replace(facts.overlaps, by_endpoint=by_endpoint)

    def settle(self, request: CopiedRequest, result: TransferResult, unfinished: str) -> TransferResult:
        """Return the outcome of the copy, for which the request waits no longer."""
        if result.result == UNDER_WAY:
            result.result = unfinished
            for copy in self._waiting.values():
                copy.requests = [one for one in copy.requests if one is not request]
        self._transfers.metrics.on_demand.labels(result.result).inc()
        return result

    def _is_long(self, facts: RequestFacts) -> bool:
        """Return True if enough of its prompt is known to be copied."""
        return facts.tokens is not None and len(facts.tokens) >= self._planner.terms.min_tokens

    def _terms(self) -> LinkTerms:
        """As the link is at present."""
        speed = self._transfers.link.tokens_per_s or math.inf
        least = self._transfers.settings.min_tokens
        return LinkTerms(speed, LATENCY_S, least, STEP_TOKENS, lands=Tier.HOST)

    def _sources(self, facts: RequestFacts) -> tuple[Mapping[EndpointId, int], Mapping[EndpointId, int]]:
        """Return what a lookup service reported that endpoints have in memory, and that their instances read from
        farther."""
        published = dict[EndpointId, int]()
        stored = dict[EndpointId, int]()
        for told in facts.lookup_overlaps:
            near = near_tokens(Overlap(0, told.lower)) if told.lower else told.tokens
            if self._store.copies:
                published[told.endpoint] = max(near, published.get(told.endpoint, 0))
            if told.tokens > near:
                stored[told.endpoint] = max(told.tokens, stored.get(told.endpoint, 0))
        return published, stored

    def _begin(self, request: CopiedRequest, transfer: Transfer, speeds: SpeedModel) -> Copy | None:
        """Return the copy for this request, which may be under way already; None where a limit refuses it."""
        facts = request.facts
        target = facts.cluster.find_endpoint(transfer.target)
        tokens = facts.tokens
        if target is None or tokens is None:
            return None
        copied = tokens[: transfer.tokens]
        digest = xxh3_64_intdigest(copied.tobytes())
        key = (target.instance_id, digest)
        copy = self._waiting.get(key)
        if copy is None:
            prefix = KnownPrefix(digest, facts.model, facts.request.cache_salt or "", deque(), digest, copied)
            source = "" if transfer.source == STORE else self._instance_of(facts, transfer.source)
            over = partial(self._over, key, transfer)
            if not self._transfers.begin(target, prefix, transfer.missing, source, "placed", speeds, over):
                return None
            copy = self._waiting[key] = Copy(transfer.tokens, transfer.source or "shared")
            self._planner.links.reserve(transfer, transfer.over_at)
        self._enrol(request, copy, transfer.target)
        return copy

    def _join(self, request: CopiedRequest, target: Endpoint) -> Copy | None:
        """Return a copy of what the request begins with, too, that is under way to where it goes."""
        tokens = request.facts.tokens
        for (instance, digest), copy in self._waiting.items():
            if tokens is None or instance != target.instance_id or len(tokens) < copy.tokens:
                continue
            if xxh3_64_intdigest(tokens[: copy.tokens].tobytes()) == digest:
                self._enrol(request, copy, target.id)
                return copy
        return None

    def _enrol(self, request: CopiedRequest, copy: Copy, target: EndpointId) -> None:
        copy.requests.append(request)
        request.result = TransferResult(target, copy.source, copy.tokens)

    def _instance_of(self, facts: RequestFacts, endpoint: EndpointId) -> str:
        source = facts.cluster.find_endpoint(endpoint)
        return "" if source is None else source.instance_id

    def _over(self, key: tuple[str, int], transfer: Transfer, result: str, tokens: int) -> None:
        """Its links are free; requests that wait still will be placed by what is there now."""
        self._planner.links.release(transfer)
        copy = self._waiting.pop(key)
        copy.over.set()
        for request in copy.requests:
            if request.result is not None:
                request.result.result = result
                request.result.moved = tokens
            if tokens:
                self._store.add_holders(request.facts, self._transfers.copied.find_holders)


class CopyObserver(CacheObserver):
    """Copies of one cache service."""

    def __init__(self, parts: CacheParts) -> None:
        transfers = Transfers(parts)
        transfers.store.adopted[ActionKind.TRANSFER] = transfers.done
        self.on_demand = OnDemand(transfers)

    def watch(self, facts: RequestFacts) -> RequestWatch:
        """Follow the request from now on."""
        return CopyWatch(self.on_demand, CopiedRequest(facts))


class CopyWatch(RequestObserver):
    """The copy of one request. (It must not hold the exchange, which would be a cycle.)"""

    __slots__ = ("_counted", "_on_demand", "_refused", "_request", "_wait")

    def __init__(self, on_demand: OnDemand, request: CopiedRequest) -> None:
        self._on_demand = on_demand
        self._request = request
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

    def finished(self, exchange: Exchange, now: float) -> None:
        self._settle(exchange, "left")

    def _settle(self, exchange: Exchange, unfinished: str) -> None:
        """Record the copy's outcome, once."""
        if self._request.result is not None and NOTE not in exchange.outcome.notes:
            exchange.outcome.notes[NOTE] = self._on_demand.settle(self._request, self._request.result, unfinished)
