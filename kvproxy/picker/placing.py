"""Places a request that another program carries: the same facts and the same decision as for one that we carry."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.router_queue import QueueFull
from kvproxy.cluster.routes import Routes, RouteTarget
from kvproxy.cluster.screening import Refusal
from kvproxy.config.filter_schema import InferenceRequestSettings
from kvproxy.config.schema import Config
from kvproxy.filters.inference_request import KIND_OF_PATH
from kvproxy.filters.kvcache import KvCacheLearning, needs_facts, prefers
from kvproxy.forward.answer import verdict_on
from kvproxy.forward.body_guard import with_model
from kvproxy.forward.headers import RANK_HEADER
from kvproxy.forward.metrics import RouteMetrics
from kvproxy.forward.relay import LAST_PIECES, TAIL_BYTES, read_end
from kvproxy.forward.request_options import priority_of
from kvproxy.kvcache.overlap.facts import RequestFacts
from kvproxy.kvcache.service import KvCache
from kvproxy.metrics.catalog import Metrics
from kvproxy.picker.reservations import Ended, PickReservation, Reservations
from kvproxy.request.error_reply import LocalReply
from kvproxy.request.exchange import MAX_REMEMBERED, Exchange
from kvproxy.request.observer import RequestObserver, notify
from kvproxy.request.parse import decode_body, scan_body
from kvproxy.request.session import SessionHeaders
from kvproxy.routing.policy import NO_FACTS, PickRequest
from kvproxy.routing.selector import Decision
from kvproxy.types import Clock, EndpointId, Headers, InferenceRequest

log = logging.getLogger("kvproxy.picker")

_NO_ENDPOINTS: frozenset[EndpointId] = frozenset()
_MESSAGES = {
    404: "No engine serves this model.",
    429: "The engines have as much to do as they take; try again later.",
    503: "No engine can take this request now.",
}


class PickerTarget(Protocol):
    """The running proxy, as far as requests that others carry need it. Asked again for every request: a reload may have
    replaced any part."""

    @property
    def config(self) -> Config: ...
    @property
    def routes(self) -> Routes: ...
    @property
    def clusters(self) -> Mapping[str, Cluster]: ...
    @property
    def kvcache(self) -> KvCache | None: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def observers(self) -> Sequence[RequestObserver]: ...


def pick_request(
    inference: InferenceRequest | None,
    target: RouteTarget,
    facts: RequestFacts | None,
    service: KvCache | None,
    *,
    streams: bool,
    policy: str = "",
    excluded: frozenset[EndpointId] = _NO_ENDPOINTS,
) -> PickRequest:
    """What the decision is asked. `streams`: its first token will be told of."""
    prefer = service is not None and prefers(service.settings, target.cluster.settings.policy)
    return PickRequest(
        model=target.upstream_model or ("" if inference is None else inference.model),
        session_key=None if inference is None else inference.affinity_key,
        facts=NO_FACTS if facts is None else facts.overlaps,
        preferred=facts.preferred if prefer and facts is not None and not policy else None,
        excluded=excluded,
        streams=streams,
        prompt_head=b"" if inference is None else inference.head,
        policy=policy,
    )


def rank_headers(endpoint: Endpoint) -> dict[str, str]:
    """What the request has to carry to be served there: the data-parallel rank, where that is what was chosen."""
    return {} if endpoint.rank is None else {RANK_HEADER.decode(): str(endpoint.engine.ranks.number(endpoint.rank))}


def address_of(endpoint: Endpoint) -> str:
    """`host:port`, as Envoy names an endpoint."""
    host = endpoint.origin.host
    return f"[{host}]:{endpoint.origin.port}" if ":" in host else f"{host}:{endpoint.origin.port}"


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
        self._placer = placer
        self.path = path
        self._headers = headers
        self._kind = KIND_OF_PATH.get(path) if method == "POST" else None
        self._post = method == "POST"
        self.exchange = exchange = Exchange(received_at=placer.clock())
        exchange.observers, exchange.hooks = placer.observers, placer.hooks
        self._target: RouteTarget | None = None
        self._facts: RequestFacts | None = None
        self._asked = PickRequest()
        self._streams = False
        self._refusal = Refusal.NO_ENDPOINTS
        self._held: PickReservation | None = None
        self.listed: list[Endpoint] = []  # the chosen endpoint, then where to go if it cannot be reached
        self._headers_answered: Headers = []
        self._first, self._last = b"", list[bytes]()

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
        exchange, placer = self.exchange, self._placer
        if "received" in exchange.hooks:
            notify(RequestObserver.received, exchange, placer.clock())
        await self._read(body)
        inference = exchange.inference
        self._streams = sees_answer and inference is not None and inference.stream
        if inference is not None and inference.stream and not sees_answer:
            exchange.inference = msgspec.structs.replace(inference, stream=False)  # as far as times can tell
        model = "" if inference is None else inference.model
        target = self._target = placer.target.routes.resolve(self.path, model)
        if target is None:
            raise LocalReply(404, "unknown_model" if model else "no_route", "No route leads there.")
        exchange.outcome.cluster = target.cluster.name
        await self._know(target)
        await self._decide(target, _outside(subset, target.cluster))
        if not target.upstream_model or body is None or inference is None:
            return None
        return await with_model(body, target.upstream_model, named=model, pace=placer.pace)

    async def _read(self, body: bytes | None) -> None:
        names, said, encoded = self._placer.sessions.names, {}, False
        for name, value in self._headers:
            if name in names:
                said[name] = value
            elif name == b"content-encoding":
                encoded = value.strip().lower() not in (b"", b"identity")
            elif name == b"x-request-id":
                self.exchange.request_id = value.decode("latin-1")[:128]
        if self._kind is None or body is None or encoded:
            return
        caller = self._placer.sessions.read(said)
        inference = decode_body(self._kind, body, caller)
        if inference is None:
            inference, _ = await scan_body(self._kind, body, caller, pace=self._placer.pace)
        self.exchange.body, self.exchange.inference = body, inference
        if inference is not None:
            session = "child" if inference.parent_session else "named" if inference.session_key else "none"
            self._placer.target.metrics.request.clients.labels(inference.client or "unknown", session).inc()

    async def _know(self, target: RouteTarget) -> None:
        """What endpoints hold of its prompt. No fact about a cache fails a request."""
        exchange, service = self.exchange, self._placer.target.kvcache
        if service is None or exchange.inference is None or exchange.body is None:
            return
        recorded = bool(self._placer.target.config.receipts.path)
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
        learning = KvCacheLearning(service, facts, prefers=False)
        exchange.facts_source = learning.refresh
        exchange.observers = (learning, *exchange.observers)  # the others are told what it found out
        exchange.hooks |= learning.hooks
        if "facts_known" in exchange.hooks:
            notify(RequestObserver.facts_known, exchange)

    async def _decide(self, target: RouteTarget, outside: frozenset[EndpointId]) -> None:
        placer, cluster = self._placer, target.cluster
        if placer.held.full:
            raise _shed(429, "too_many_requests")
        self._asked = self._ask(target, outside)
        now, queue = placer.clock(), cluster.queue
        verdict = cluster.decide(self._asked, now)
        if queue is None or isinstance(verdict, Refusal) or queue.admits(verdict, now):
            pick = self._take(verdict, now)
        else:
            header = cluster.settings.queue.priority_header.lower().encode()
            level = priority_of(self._headers, header) if header else 0
            try:
                pick = await queue.wait(verdict, self._decide_refreshed, self._take, tenant="", level=level)
            except QueueFull as full:
                raise _shed(429, "queue_full", math.ceil(full.retry_after_s)) from None
        if pick is None:
            raise _refused(self._refusal, outside)
        self.exchange.body = None
        self.listed = [pick.endpoint, *self._further(cluster, pick.endpoint)]

    def _ask(self, target: RouteTarget, outside: frozenset[EndpointId]) -> PickRequest:
        exchange, service = self.exchange, self._placer.target.kvcache
        return pick_request(exchange.inference, target, self._facts, service, streams=self._streams, excluded=outside)

    def _decide_refreshed(self, now: float) -> Decision[Endpoint] | Refusal:
        assert self._target is not None
        if self.exchange.facts_source is not None:
            self.exchange.facts_source(self.exchange)
        self._asked = self._ask(self._target, self._asked.excluded)
        return self._target.cluster.decide(self._asked, now)

    def _take(self, verdict: Decision[Endpoint] | Refusal, now: float) -> Pick | None:
        """No await since the decision: nothing comes between a choice and its load."""
        exchange, placer = self.exchange, self._placer
        assert self._target is not None
        cluster = self._target.cluster
        if isinstance(verdict, Refusal):
            self._refusal = verdict
            cluster.refuse(self._asked, verdict)
            notify(RequestObserver.refused, exchange, verdict.value, now)
            return None
        notify(RequestObserver.placed, exchange, verdict, now)
        pick = cluster.reserve(verdict, now)
        self._held = placer.held.hold_pick(cluster, pick, service=None, facts=None, lease_s=placer.lease_s)
        outcome = exchange.outcome
        outcome.attempts += 1
        outcome.endpoint, outcome.policy, outcome.pick_reason = pick.endpoint.id, verdict.policy, verdict.reason
        if len(verdict.candidates) <= MAX_REMEMBERED:
            outcome.candidates, outcome.costs = verdict.candidates, verdict.costs
        return pick

    def _further(self, cluster: Cluster, chosen: Endpoint) -> list[Endpoint]:
        """Where to go instead, in order: the same decision without those before."""
        found: list[Endpoint] = []
        excluded, now = self._asked.excluded | {chosen.id}, self._placer.clock()
        while len(found) < self._placer.fallbacks:
            verdict = cluster.decide(msgspec.structs.replace(self._asked, excluded=excluded, preferred=None), now)
            if isinstance(verdict, Refusal):
                break
            excluded |= {verdict.endpoint.id}
            same = {address_of(each) for each in (chosen, *found)}
            if address_of(verdict.endpoint) not in same and rank_headers(verdict.endpoint) == rank_headers(chosen):
                found.append(verdict.endpoint)
        return found

    def answered(self, status: int, headers: Headers, *, address: str, details: str) -> str:
        """The answer's head has come, from `address` ("": unknown), or from Envoy itself (`details` say why). How that
        stands to the pick; a metric label."""
        outcome = self.exchange.outcome
        outcome.status, self._headers_answered = status, headers
        if details or self._held is None:
            outcome.end = "local_reply"
            if self._held is not None:
                unreached = details.startswith("upstream")
                self._settle(AttemptOutcome.FAILURE if unreached else AttemptOutcome.CANCELLED)
            return "none"
        return self._reconcile(self._held, address) if address else "unreported"

    def _reconcile(self, held: PickReservation, address: str) -> str:
        if address == address_of(held.pick.endpoint):
            return "as_picked"
        fallback = next((each for each in self.listed if address_of(each) == address), None)
        served = fallback or next((each for each in held.cluster.endpoints if address_of(each) == address), None)
        # Why it went elsewhere is not said: not reached, or not known to Envoy.
        self._settle(AttemptOutcome.UNPROVEN if fallback is not None else AttemptOutcome.CANCELLED)
        if served is not None:
            now = self._placer.clock()
            asked = msgspec.structs.replace(self._asked, preferred=served.id, excluded=_NO_ENDPOINTS)
            verdict = held.cluster.decide(asked, now)
            if not isinstance(verdict, Refusal) and verdict.endpoint is served:
                self._take(verdict, now)
            self.exchange.outcome.endpoint = served.id
        return "unknown" if served is None else "elsewhere" if fallback is None else "fallback"

    def piece(self, data: bytes) -> None:
        """A piece of the answer's body went by."""
        if not data:
            return
        if not self._first:
            self._first = data
            if self._streams:
                self._first_byte(self._placer.clock())
        self._last.append(data)
        if len(self._last) > LAST_PIECES:
            del self._last[0]

    def _first_byte(self, now: float) -> None:
        exchange, held = self.exchange, self._held
        if held is not None:
            self._placer.held.first_token(held.id)
        exchange.outcome.ttft_s = now - exchange.received_at
        if "first_byte" in exchange.hooks:
            notify(RequestObserver.first_byte, exchange, now)

    def completed(self) -> None:
        """The answer is whole."""
        exchange, outcome = self.exchange, self.exchange.outcome
        outcome.end = outcome.end or "completed"
        error = None
        if self._last:
            *earlier, last = self._last
            tail = b"".join(earlier)[-TAIL_BYTES:] + last
            error = read_end(
                exchange, outcome.status, self._headers_answered, first=self._first, tail=tail, post=self._post
            )
        held, now = self._held, self._placer.clock()
        if held is not None:
            if outcome.ttft_s is None and outcome.status < 400:
                self._first_byte(now)
            verdict = self._verdict(held, error is not None, verdict_on(outcome.status, error), now)
            held.pick.endpoint.metrics.request(outcome.status)
            self._settle(verdict, prompt_tokens=outcome.prompt_tokens, cached_tokens=outcome.cached_tokens)
            if verdict is AttemptOutcome.SUCCESS and outcome.completion_tokens is not None:
                policies, endpoint = held.cluster.policies, held.pick.endpoint.id
                policies.observe_answer(endpoint, held.pick.reservation, outcome.completion_tokens, now)
        self._finish(now)

    def _verdict(self, held: PickReservation, broken: bool, bad: AttemptOutcome, now: float) -> AttemptOutcome:
        status = self.exchange.outcome.status
        if not broken and status < 400:
            return AttemptOutcome.SUCCESS
        if status == 503:
            return AttemptOutcome.BUSY
        reason = "engine_error" if broken else f"status_{status}"
        if bad is AttemptOutcome.FAILURE:
            held.pick.endpoint.metrics.attempt_failure(reason)
            if held.cluster.verdicts.is_spared(held.pick.endpoint, self._asked.model, reason=reason, now=now):
                return AttemptOutcome.UNPROVEN
        return bad

    def give_back(self) -> None:
        """The place is not wanted any more."""
        self._settle(AttemptOutcome.CANCELLED)

    def left(self) -> None:
        """The request is over without the end of an answer."""
        self.exchange.outcome.client_left()
        self.give_back()
        self._finish(self._placer.clock())

    def refused(self, why: LocalReply) -> None:
        """The client got this instead of an endpoint."""
        self._placer.target.metrics.request.local_replies.labels(str(why.status), why.reason).inc()
        self.exchange.outcome.status, self.exchange.outcome.end = why.status, "local_reply"
        self._finish(self._placer.clock())

    def _settle(
        self, outcome: AttemptOutcome, *, prompt_tokens: int | None = None, cached_tokens: int | None = None
    ) -> None:
        if self._held is not None:
            self._placer.held.end_pick(self._held.id, Ended(outcome, prompt_tokens, cached_tokens))
            self._held = None

    def _finish(self, now: float) -> None:
        notify(RequestObserver.finished, self.exchange, now)
        notify(RequestObserver.ended, self.exchange, self.exchange.outcome.status, "")


def _outside(subset: frozenset[str] | None, cluster: Cluster) -> frozenset[EndpointId]:
    if subset is None:
        return _NO_ENDPOINTS
    return frozenset(
        each.id for each in cluster.endpoints if address_of(each) not in subset and each.origin.host not in subset
    )


def _refused(refusal: Refusal, outside: frozenset[EndpointId]) -> LocalReply:
    if refusal is Refusal.MODEL_NOT_SERVED:
        return LocalReply(404, refusal.value, _MESSAGES[404])
    if refusal is Refusal.SATURATED:
        return _shed(429, refusal.value)
    return _shed(503, "subset" if outside and refusal is Refusal.ALL_TRIED else refusal.value)


def _shed(status: int, reason: str, retry_after_s: int = 1) -> LocalReply:
    return LocalReply(status, reason, _MESSAGES[status], headers=[(b"retry-after", b"%d" % retry_after_s)])
