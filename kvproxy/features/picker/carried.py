"""A request that another program carries: placed by the same facts and the same decision as one that we carry."""

from __future__ import annotations

import asyncio
import logging
import math

import msgspec

from kvproxy.base.errors import QueueFull
from kvproxy.base.types import EndpointId, Headers
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routes import Routes, RouteTarget
from kvproxy.cluster.routing.policy import NO_FACTS, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.screening import Refusal
from kvproxy.features.transfers.copy_watch import follow_copy
from kvproxy.proxy.filter_settings import InferenceRequestSettings
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH
from kvproxy.proxy.filters.kvcache import KvCacheLearning, needs_facts
from kvproxy.proxy.forward.asking import priority_of
from kvproxy.proxy.forward.body_guard import with_model
from kvproxy.proxy.forward.metrics import RouteMetrics
from kvproxy.proxy.placing import (
    PickerTarget,
    list_endpoints,
    outside_subset,
    pick_request,
    read_headers,
    refusal_reply,
    shed_reply,
)
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import MAX_REMEMBERED, Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.request.parse import decode_body, scan_body
from kvproxy.proxy.request.session import SessionHeaders
from kvproxy.proxy.reservations import Ended, PickReservation, Reservations

log = logging.getLogger("kvproxy.picker")


class Placer:
    """What all requests that are carried elsewhere share."""

    def __init__(self, target: PickerTarget, *, lease_s: float, fallbacks: int) -> None:
        self.target = target
        self.lease_s, self.fallbacks = lease_s, fallbacks
        self.clock = target.clock
        self.held = Reservations(metrics=target.metrics, clock=target.clock, queue="picker")
        self.pace = asyncio.Lock()
        self._routes: Routes | None = None
        self.sessions = SessionHeaders()
        self.observers: tuple[RequestObserver, ...] = ()
        self.hooks: frozenset[str] = frozenset()
        self._follow()

    def begin(self, method: str, path: str, headers: Headers) -> CarriedRequest:
        """A request whose headers are there."""
        if self.target.routes is not self._routes:
            self._follow()
        return CarriedRequest(self, method, path.partition("?")[0], headers)

    def _follow(self) -> None:
        """The configuration was replaced."""
        target = self.target
        self._routes, config = target.routes, target.config
        settings = next((spec.settings for spec in config.filters if spec.name == "inference_request"), None)
        name = settings.session_header if isinstance(settings, InferenceRequestSettings) else ""
        self.sessions = SessionHeaders(name)
        counted = RouteMetrics(target.metrics, clusters=target.clusters, routes=config.routes)
        self.observers = (counted, *target.observers)
        self.hooks = frozenset[str]().union(*(observer.hooks for observer in self.observers))


class CarriedRequest:
    """One request: placed once, then told of what becomes of it, and ended once."""

    def __init__(self, placer: Placer, method: str, path: str, headers: Headers) -> None:
        self.placer = placer
        self.path = path
        self._headers = headers
        self._kind = KIND_OF_PATH.get(path) if method == "POST" else None
        self.post = method == "POST"
        self.exchange = exchange = Exchange(received_at=placer.clock())
        exchange.observers, exchange.hooks = placer.observers, placer.hooks
        self._target: RouteTarget | None = None
        self._facts: RequestFacts | None = None
        self.asked = PickRequest()
        self.streams = False
        self._refusal = Refusal.NO_ENDPOINTS
        self.held: PickReservation | None = None
        self.listed: list[Endpoint] = []  # the chosen endpoint, then where to go if it cannot be reached

    @property
    def reads_body(self) -> bool:
        """Whether its body says something of where to."""
        return self._kind is not None

    async def place(
        self, body: bytes | None, *, subset: frozenset[str] | None = None, sees_answer: bool = False
    ) -> bytes | None:
        """Decide, and reserve the place; `listed` has it. The body that replaces the client's, if one does.

        `subset`: only these addresses; `sees_answer`: the pieces of the answer will be told of as they come. Raises
        LocalReply where no endpoint may take it.
        """
        exchange, placer = self.exchange, self.placer
        if "received" in exchange.hooks:
            notify(RequestObserver.received, exchange, placer.clock())
        await self._read(body)
        inference = exchange.inference
        self.streams = sees_answer and inference is not None and inference.stream
        if inference is not None and inference.stream and not sees_answer:
            exchange.inference = msgspec.structs.replace(inference, stream=False)  # as far as times can tell
        model = "" if inference is None else inference.model
        target = self._target = placer.target.routes.resolve(self.path, model)
        if target is None:
            raise LocalReply(404, "unknown_model" if model else "no_route", "No route leads there.")
        exchange.outcome.cluster = target.cluster.name
        await self._know(target)
        await self._decide(target, outside_subset(subset, target.cluster))
        if not target.upstream_model or body is None or inference is None:
            return None
        return await with_model(body, target.upstream_model, named=model, pace=placer.pace)

    async def _read(self, body: bytes | None) -> None:
        caller, encoded, self.exchange.request_id = read_headers(self._headers, self.placer.sessions)
        if self._kind is None or body is None or encoded:
            return
        inference = decode_body(self._kind, body, caller)
        if inference is None:
            inference, _ = await scan_body(self._kind, body, caller, pace=self.placer.pace)
        self.exchange.body, self.exchange.inference = body, inference
        if inference is not None:
            session = "child" if inference.parent_session else "named" if inference.session_key else "none"
            self.placer.target.metrics.request.clients.labels(inference.client or "unknown", session).inc()

    async def _know(self, target: RouteTarget) -> None:
        """What endpoints hold of its prompt. No fact about a cache fails a request."""
        exchange, service = self.exchange, self.placer.target.kvcache
        if service is None or exchange.inference is None or exchange.body is None:
            return
        recorded = bool(self.placer.target.config.receipts.path)
        if not (recorded or needs_facts(service.settings, target.cluster.settings)):
            return
        try:
            facts = await service.facts_for(
                exchange.inference, exchange.body, cluster=target.cluster, model=target.upstream_model
            )
        except Exception:
            log.exception("no facts for this request")
            return
        self._facts, exchange.facts = facts, facts.overlaps
        learning = KvCacheLearning(service, facts, False)
        exchange.facts_source = learning.refresh
        exchange.observers = (learning, *exchange.observers)  # the others are told what it found out
        exchange.hooks |= learning.hooks
        if service.on_demand is not None:
            follow_copy(service.on_demand, exchange, facts)
        if "facts_known" in exchange.hooks:
            notify(RequestObserver.facts_known, exchange)

    async def _decide(self, target: RouteTarget, outside: frozenset[EndpointId]) -> None:
        placer, cluster = self.placer, target.cluster
        if placer.held.full:
            raise shed_reply(429, "too_many_requests")
        self.asked = self._ask(target, outside)
        now, queue = placer.clock(), cluster.queue
        verdict = cluster.decide(self._offered(now), now)
        if queue is None or isinstance(verdict, Refusal) or queue.admits(verdict, now):
            pick = self.take(verdict, now)
        else:
            notify(RequestObserver.queued, self.exchange, verdict, now)
            header = cluster.settings.queue.priority_header.lower().encode()
            level = priority_of(self._headers, header) if header else 0
            try:
                pick = await queue.wait(verdict, self._decide_refreshed, self.take, tenant="", level=level)
            except QueueFull as full:
                raise shed_reply(429, "queue_full", math.ceil(full.retry_after_s)) from None
        if pick is None:
            raise refusal_reply(self._refusal, outside)
        if self.exchange.copier is not None and await self.exchange.copier.wait(self.exchange):
            pick.begin(self.exchange.facts or NO_FACTS, cluster.speeds, placer.clock())
        self.exchange.body = None
        self.listed = list_endpoints(cluster, self.asked, pick.endpoint, placer.clock(), most=placer.fallbacks)

    def _ask(self, target: RouteTarget, outside: frozenset[EndpointId]) -> PickRequest:
        exchange, service = self.exchange, self.placer.target.kvcache
        return pick_request(exchange.inference, target, self._facts, service, streams=self.streams, excluded=outside)

    def _decide_refreshed(self, now: float) -> Decision[Endpoint] | Refusal:
        assert self._target is not None
        if self.exchange.facts_source is not None:
            self.exchange.facts_source(self.exchange)
        self.asked = self._ask(self._target, self.asked.excluded)
        return self._target.cluster.decide(self._offered(now), now)

    def _offered(self, now: float) -> PickRequest:
        """What is asked, with what could be copied for it."""
        copier = self.exchange.copier
        return self.asked if copier is None else copier.offer(self.asked, now)

    def take(self, verdict: Decision[Endpoint] | Refusal, now: float) -> Pick | None:
        """Make it true: no await since the decision, so that nothing comes between a choice and its load."""
        exchange, placer = self.exchange, self.placer
        assert self._target is not None
        cluster = self._target.cluster
        if isinstance(verdict, Refusal):
            self._refusal = verdict
            cluster.count_refusal(self.asked, verdict)
            notify(RequestObserver.refused, exchange, verdict.value, now)
            return None
        notify(RequestObserver.placed, exchange, verdict, now)
        pick = cluster.reserve(verdict, now)
        self.held = placer.held.hold_pick(cluster, pick, service=None, facts=None, lease_s=placer.lease_s)
        outcome = exchange.outcome
        outcome.attempts += 1
        outcome.endpoint, outcome.policy, outcome.pick_reason = pick.endpoint.id, verdict.policy, verdict.reason
        if len(verdict.candidates) <= MAX_REMEMBERED:
            outcome.candidates, outcome.costs = verdict.candidates, verdict.costs
        return pick

    def give_back(self) -> None:
        """The place is not wanted any more."""
        self.settle(AttemptOutcome.CANCELLED)

    def left(self) -> None:
        """The request is over without the end of an answer."""
        self.exchange.outcome.client_left()
        self.give_back()
        self.finish(self.placer.clock())

    def refused(self, why: LocalReply) -> None:
        """The client got this instead of an endpoint."""
        self.placer.target.metrics.request.local_replies.labels(str(why.status), why.reason).inc()
        self.exchange.outcome.status, self.exchange.outcome.end = why.status, "local_reply"
        self.finish(self.placer.clock())

    def settle(
        self, outcome: AttemptOutcome, *, prompt_tokens: int | None = None, cached_tokens: int | None = None
    ) -> None:
        """What was reserved is given back."""
        if self.held is not None:
            self.placer.held.end_pick(self.held.id, Ended(outcome, prompt_tokens, cached_tokens))
            self.held = None

    def finish(self, now: float) -> None:
        """The observers hear of the end."""
        notify(RequestObserver.finished, self.exchange, now)
        notify(RequestObserver.ended, self.exchange, self.exchange.outcome.status, "")
