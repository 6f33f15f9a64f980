"""A request that another program carries: placed by the same facts and the same decision as one that we carry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from kvproxy.base.errors import QueueFull, UpstreamError
from kvproxy.base.types import EndpointId, Headers
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routes import Routes, RouteTarget
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.screening import Refusal
from kvproxy.operate.placing.external import (
    ExternalPlacement,
    PlacerTarget,
    full_reply,
    list_endpoints,
    outside_subset,
    read_headers,
    refusal_reply,
    shed_reply,
)
from kvproxy.operate.placing.reservations import MAX_RESERVATIONS, PickReservation, Reservations
from kvproxy.proxy.filter_settings import InferenceRequestSettings
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH
from kvproxy.proxy.filters.kvcache import needs_facts, prefers, use_facts
from kvproxy.proxy.forward.answer import verdict_on
from kvproxy.proxy.forward.body_guard import is_examined, with_model
from kvproxy.proxy.forward.metrics import RouteMetrics
from kvproxy.proxy.metrics import ClientCounts, RequestMetrics
from kvproxy.proxy.placement import MAX_PRIORITY, NO_ENDPOINTS, chosen_policy, priority_of
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.request.parse import decode_body, scan_body
from kvproxy.proxy.request.session import SessionHeaders

log = logging.getLogger("kvproxy")


class Placer:
    """State shared by all requests that are carried elsewhere.

    `observed`: False for questions, which nothing counts, and whose facts are gathered even if no policy uses them.
    """

    def __init__(
        self,
        target: PlacerTarget,
        *,
        lease_s: float,
        fallbacks: int,
        queue: str,
        limit: int = MAX_RESERVATIONS,
        observed: bool = True,
    ) -> None:
        self.target = target
        self.lease_s = lease_s
        self.fallbacks = fallbacks
        self.clock = target.clock
        self.held = Reservations(metrics=target.metrics, clock=target.clock, limit=limit, queue=queue)
        self._observed = observed
        self.pace = asyncio.Lock()
        self._routes: Routes | None = None
        self.sessions = SessionHeaders()
        self.offers_policies = False  # some cluster lets clients choose
        self.observers: tuple[RequestObserver, ...] = ()
        self.hooks: frozenset[str] = frozenset()
        self.clients = ClientCounts(target.metrics)
        #: Clusters whose requests need facts, and whether the largest match is preferred there.
        self.informed: Mapping[str, bool] = {}
        self._follow()

    def begin(self, method: str, path: str, headers: Headers) -> CarriedRequest:
        """Return a request whose headers are there."""
        if self.target.routes is not self._routes:
            self._follow()
        return CarriedRequest(self, method, path.partition("?")[0], headers)

    def _follow(self) -> None:
        """Adopt a replaced configuration."""
        target = self.target
        self._routes = target.routes
        config = target.config
        settings = next((spec.settings for spec in config.filters if spec.name == "inference_request"), None)
        self.offers_policies = any(one.client_policies for one in config.clusters.values())
        name = settings.session_header if isinstance(settings, InferenceRequestSettings) else ""
        self.sessions = SessionHeaders(name)
        if self._observed:
            counted = RouteMetrics(target.metrics, clusters=target.clusters, routes=config.routes)
            self.observers = (counted, *target.observers)
            self.hooks = frozenset[str]().union(*(observer.hooks for observer in self.observers))
        if (service := target.kvcache) is not None:
            recorded = not self._observed or any(one.wants_facts for one in target.observers)
            self.informed = {
                name: prefers(service.settings, one.settings.policy)
                for name, one in target.clusters.items()
                if recorded or needs_facts(service.settings, one.settings)
            }


class CarriedRequest:
    """Request carried elsewhere: placed once, updated as it proceeds, and ended once."""

    def __init__(self, placer: Placer, method: str, path: str, headers: Headers) -> None:
        self.placer = placer
        self.path = path
        self._headers = headers
        self._kind = KIND_OF_PATH.get(path) if method == "POST" else None
        self.post = method == "POST"
        self._method = method
        self.exchange = exchange = Exchange(received_at=placer.clock())
        exchange.observers = placer.observers
        exchange.hooks = placer.hooks
        self.priority = 0  # set by the app; 0: that of the cluster's header
        self.lease_s = placer.lease_s
        self._placement: ExternalPlacement | None = None  # once it has an endpoint
        self.held: PickReservation | None = None
        self.listed: list[Endpoint] = []  # the chosen endpoint, then where to go if it cannot be reached

    @property
    def reads_body(self) -> bool:
        """True if its body matters for the placement."""
        return self._kind is not None or any(one.reads_bodies(self._method) for one in self.placer.target.guards)

    async def place(
        self,
        body: bytes | None,
        *,
        subset: frozenset[str] | None = None,
        exclude: frozenset[EndpointId] = NO_ENDPOINTS,
        sees_answer: bool = False,
    ) -> bytes | None:
        """Decide, and reserve the place; `listed` has it. Returns the body that replaces the client's, if any.

        `subset`: only these addresses; `exclude`: not these endpoints; `sees_answer`: the pieces of the answer are
        reported as they come. Raises LocalReply where no endpoint may take it.
        """
        exchange = self.exchange
        placer = self.placer
        await _read(self, body)
        if "received" in exchange.hooks:
            notify(RequestObserver.received, exchange, placer.clock())
        inference = exchange.inference
        if inference is not None and inference.stream and not sees_answer:
            exchange.inference = msgspec.structs.replace(inference, stream=False)  # its first token is not seen
        model = "" if inference is None else inference.model
        target = placer.target.routes.resolve(self.path, model)
        if target is None:
            raise LocalReply(404, "unknown_model" if model else "no_route", "No route leads there.")
        exchange.outcome.cluster = target.cluster.name
        if placer.offers_policies:
            exchange.policy = chosen_policy(self._headers, target.cluster)
        placement = await self.prepare(target, body)
        placement.excluded = outside_subset(subset, target.cluster) | exclude
        await self._decide(placement)
        if not target.upstream_model or body is None or inference is None:
            return None
        return await with_model(body, target.upstream_model, named=model, pace=placer.pace)

    async def prepare(self, target: RouteTarget, body: bytes | None) -> ExternalPlacement:
        """Return its placement, with all that decides about it. Raises LocalReply if no engine may get it."""
        exchange = self.exchange
        for guard in self.placer.target.guards:
            await guard.examine(exchange, self.path, self._headers, body)
        await _gather_facts(self, target)
        return ExternalPlacement(
            exchange=exchange,
            cluster=target.cluster,
            clock=self.placer.clock,
            model=target.upstream_model or ("" if exchange.inference is None else exchange.inference.model),
            priority=_priority_of(self.priority, self._headers, target.cluster),
        )

    async def _decide(self, placement: ExternalPlacement) -> None:
        placer = self.placer
        if placer.held.full:
            raise shed_reply(429, "too_many_requests")
        pick = await self._reserve(placement, placement.excluded)
        self._placement = placement
        await placement.wait_to_send(pick)
        self.exchange.body = None
        if placer.fallbacks:
            asked = placement.make_question()
            self.listed = list_endpoints(placement.cluster, asked, pick.endpoint, placer.clock(), most=placer.fallbacks)

    async def place_again(self) -> None:
        """Reserve another endpoint than those tried; the one before was settled. Raises LocalReply if none is left."""
        placement = self._placement
        assert placement is not None
        tried = self.exchange.outcome.endpoint
        if tried is not None:
            placement.excluded |= {tried}
        await self._reserve(placement, NO_ENDPOINTS)

    async def _reserve(self, placement: ExternalPlacement, outside: frozenset[EndpointId]) -> Pick:
        """Wait for a place and hold it. Raises LocalReply if none is left for a request that may not go `outside`."""
        try:
            pick = await placement.place(self.placer.clock())
        except QueueFull as full:
            raise full_reply(full) from None
        if pick is None:
            raise refusal_reply(placement.refusal, outside)
        self.held = self.placer.held.hold_pick(placement.cluster, pick, lease_s=self.lease_s)
        self.listed = [pick.endpoint]
        return pick

    def move_to(self, endpoint: Endpoint, now: float) -> None:
        """Reserve the endpoint that served instead, if a request may be placed there."""
        placement = self._placement
        if placement is None:
            return
        asked = msgspec.structs.replace(placement.make_question(), preferred=endpoint.id, excluded=NO_ENDPOINTS)
        verdict = placement.cluster.decide(asked, now)
        if not isinstance(verdict, Refusal) and verdict.endpoint is endpoint:
            self.take(placement, verdict, now)

    def take(self, placement: ExternalPlacement, verdict: Decision[Endpoint] | Refusal, now: float) -> None:
        """Reserve what was decided, without a wait; a refusal is counted."""
        if (pick := placement.take(verdict, now)) is not None:
            placement.note_attempt(pick)
            self.held = self.placer.held.hold_pick(placement.cluster, pick, lease_s=self.lease_s)

    def first_byte(self, now: float) -> None:
        """Record the first byte of the engine's answer."""
        exchange = self.exchange
        if self.held is not None:
            self.placer.held.first_token(self.held.id)
        exchange.outcome.ttft_s = now - exchange.received_at
        if "first_byte" in exchange.hooks:
            notify(RequestObserver.first_byte, exchange, now)

    def answered(self, error: UpstreamError | None) -> None:
        """Record the end of the answer; the outcome has its status and counts, `error` is the engine's report of
        one."""
        outcome = self.exchange.outcome
        held = self.held
        now = self.placer.clock()
        if held is not None:
            if outcome.ttft_s is None and outcome.status < 400:
                _infer_first_byte(self, now)
            verdict = _verdict_on(self.exchange, held, error, now)
            held.pick.endpoint.metrics.count_request(outcome.status)
            if held.pick.stay is not None:
                held.pick.stay.calls_tool = outcome.calls_tool
            self.settle(verdict, cached_tokens=outcome.cached_tokens)
        self.finish(now)

    def left(self) -> None:
        """End a request without the end of an answer."""
        self.exchange.outcome.client_left()
        self.settle(AttemptOutcome.CANCELLED)
        self.finish(self.placer.clock())

    def refused(self, why: LocalReply) -> None:
        """Record a refusal that the client got."""
        self.placer.target.metrics.group(RequestMetrics).local_replies.labels(str(why.status), why.reason).inc()
        self.exchange.outcome.status = why.status
        self.exchange.outcome.end = "local_reply"
        self.finish(self.placer.clock())

    def settle(self, outcome: AttemptOutcome, *, cached_tokens: int | None = None) -> None:
        """Settle the reservation."""
        if self.held is not None:
            self.placer.held.end_pick(self.held.id, outcome, cached_tokens=cached_tokens)
            self.held = None

    def finish(self, now: float) -> None:
        """Notify the observers of the end."""
        exchange = self.exchange
        notify(RequestObserver.finished, exchange, now)
        if "ended" in exchange.hooks:
            notify(RequestObserver.ended, exchange, exchange.outcome.status, "")


async def _read(request: CarriedRequest, body: bytes | None) -> None:
    caller, encoded, request.exchange.request_id = read_headers(request._headers, request.placer.sessions)
    if request._kind is None or body is None or encoded:
        return
    inference = decode_body(request._kind, body, caller)
    if inference is None:
        found = await scan_body(request._kind, body, caller, pace=request.placer.pace, also=is_examined)
        inference, request.exchange.members = found
    request.exchange.body = body
    request.exchange.inference = inference
    if inference is not None:
        request.placer.clients.count_request(inference)


async def _gather_facts(request: CarriedRequest, target: RouteTarget) -> None:
    """Gather overlaps with its prompt. No fact about a cache fails a request."""
    exchange = request.exchange
    service = request.placer.target.kvcache
    preferring = request.placer.informed.get(target.cluster.name)
    if service is None or preferring is None or exchange.inference is None or exchange.body is None:
        return
    if "facts_began" in exchange.hooks:
        notify(RequestObserver.facts_began, exchange)
    try:
        facts = await service.facts_for(
            exchange.inference, exchange.body, cluster=target.cluster, model=target.upstream_model
        )
    except Exception:
        log.exception("no facts for this request")
        return
    later = exchange.observers
    exchange.observers = ()
    use_facts(service, facts, exchange, prefers=preferring)
    exchange.observers += later  # they are notified of an end after the cache has learned from it
    if "facts_known" in exchange.hooks:
        notify(RequestObserver.facts_known, exchange)


def _infer_first_byte(request: CarriedRequest, now: float) -> None:
    """Record the first byte of an answer at its end. Nothing is learned from that of a stream, which came long
    before and was not reported."""
    exchange = request.exchange
    inference = exchange.inference
    if inference is None or not inference.stream:
        request.first_byte(now)
        return
    exchange.inference = msgspec.structs.replace(inference, stream=False)
    exchange.outcome.ttft_s = now - exchange.received_at


def _priority_of(own: int, headers: Headers, cluster: Cluster) -> int:
    """Return the app's own priority, or that of the cluster's header."""
    header = cluster.settings.queue.priority_header.lower().encode()
    if own or not header:
        return max(-MAX_PRIORITY, min(MAX_PRIORITY, own))
    return priority_of(headers, header)


def _verdict_on(exchange: Exchange, held: PickReservation, error: UpstreamError | None, now: float) -> AttemptOutcome:
    """Return what the end of the answer proves of its endpoint, whose failure is counted."""
    status = exchange.outcome.status
    endpoint = held.pick.endpoint
    if error is None and status < 400:
        return AttemptOutcome.SUCCESS
    if status == 503:
        return AttemptOutcome.BUSY
    verdict = verdict_on(status, error)
    if verdict is AttemptOutcome.FAILURE:
        reason = f"status_{status}" if error is None else error.reason
        endpoint.metrics.attempt_failure(reason)
        model = held.pick.decision.request.model
        if held.cluster.verdicts.is_spared(endpoint, model, reason=reason, client=exchange.tenant, now=now):
            return AttemptOutcome.UNPROVEN
    return verdict
