"""Carries one request to an engine and its answer back; before the first byte went down it may try another endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from kvproxy.base.errors import (
    ConnectError,
    EndpointUnhealthy,
    PoolFull,
    ResponseHeadTooLarge,
    UpstreamError,
)
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.resilience.retry import RetryBudget
from kvproxy.base.types import Clock, EndpointId, Headers
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool, UpstreamResponse
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routing.policy import SESSION
from kvproxy.cluster.screening import Refusal
from kvproxy.proxy.forward.answer import NOT_IMPLEMENTED, names_no_model, read_short, verdict_on
from kvproxy.proxy.forward.engine_request import Answer, EngineRequest, HedgesRequests, SplitsRequests
from kvproxy.proxy.forward.headers import RequestHead, describe_decision, response_headers
from kvproxy.proxy.forward.relay import EditsAnswers, Relay, is_comment, is_event_stream
from kvproxy.proxy.forward.request_body import RequestBody
from kvproxy.proxy.forward.retries import Next, Retries, Suspects
from kvproxy.proxy.placement import NO_ENDPOINTS, Placement
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import CLIENT_CLOSED_REQUEST, Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.settings import RetrySettings

_NOT_FOUND = 404
_UNKNOWN_MODEL = "unknown_model"

#: Seconds between comments in a stream whose request waits at the proxy: less than most idle limits on the way.
COMMENT_S = 15.0
_COMMENT = b": waiting for an engine\n\n"
_STREAM_HEAD: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True)
class HeldReply:
    """An engine's 5xx answer, kept in case no other endpoint does better."""

    endpoint: Endpoint
    status: int
    headers: Headers
    body: bytes


class GaveUp(Exception):
    """No endpoint delivered; nothing was sent downstream. `why`: the last failure, or why none could be tried."""

    def __init__(self, why: UpstreamError | HeldReply | Refusal, cluster: Cluster) -> None:
        super().__init__("no endpoint delivered")
        self.why = why
        self.cluster = cluster


@dataclass(frozen=True, slots=True)
class Forwarder:
    """Resources shared by all forwarded requests."""

    pool: UpstreamPool
    timeouts: Timeouts
    retry: RetrySettings
    budget: RetryBudget
    metrics: Metrics
    clock: Clock
    rng: random.Random
    editor: EditsAnswers | None = None
    #: By cluster, of those whose requests may go in legs.
    legs: Mapping[str, SplitsRequests] = field(default_factory=dict)
    #: By cluster, of those whose requests may be sent twice.
    hedges: Mapping[str, HedgesRequests] = field(default_factory=dict)


class Delivery(msgspec.Struct, eq=False):
    """The way down to the client: which header fields it gets, and whether it has them already."""

    exchange: Exchange
    downstream: Downstream
    debug: bool = False
    #: The response whose head was passed on before its first event, and the fields that the client got.
    passed: UpstreamResponse | None = None
    passed_headers: Headers = []
    timer: asyncio.TimerHandle | None = None  # of the next comment, while the request waits

    def headers_of(self, pick: Pick, response: UpstreamResponse) -> Headers:
        """Return the fields of this engine's response as the client gets them."""
        headers = response_headers(response.headers, endpoint=pick.endpoint.id.encode(), origin=pick.endpoint.origin)
        if self.debug:
            headers.append((b"x-kvproxy-decision", describe_decision(pick.decision, self.exchange.facts).encode()))
        return headers

    def pass_head(self, pick: Pick, response: UpstreamResponse) -> None:
        """Send the head of an event stream before its first event: clients and proxies before this one see that the
        engine took the request. Another engine may still be tried behind it."""
        downstream = self.downstream
        connection = downstream.connection
        inference = self.exchange.inference
        if connection is None or downstream.status or inference is None or not inference.stream:
            return
        if response.status == 200 and connection.writable and is_event_stream(response.headers):
            headers = self.headers_of(pick, response)
            with contextlib.suppress(RuntimeError):  # of a field that no response may have; the relay raises it again
                downstream.start_now(200, headers)
                self.passed = response
                self.passed_headers = headers

    @contextlib.contextmanager
    def commenting(self) -> Iterator[None]:
        """Send a client that wants a stream comments from time to time, so that nothing between gives up."""
        inference = self.exchange.inference
        if self.downstream.connection is None or inference is None or not inference.stream:
            yield
            return
        self._comment_later()
        try:
            yield
        finally:
            if self.timer is not None:
                self.timer.cancel()

    def _comment_later(self) -> None:
        self.timer = asyncio.get_running_loop().call_later(COMMENT_S, self._comment)

    def _comment(self) -> None:
        self._comment_later()
        downstream = self.downstream
        if downstream.connection is not None and downstream.connection.writable:
            if not downstream.status:
                downstream.start_now(200, [*_STREAM_HEAD])
            downstream.write_now(_COMMENT)


class Forwarding(Placement, kw_only=True):
    """One request on its way. `run` ends with the answer delivered, or raises GaveUp before anything was sent."""

    _shared: Forwarder
    _asking: EngineRequest
    _delivery: Delivery
    _retries: Retries
    _suspects: Suspects
    _last: UpstreamError | HeldReply | Refusal = Refusal.NO_ENDPOINTS
    _task: asyncio.Task[object] | None = None
    _asked_elsewhere: bool = False  # for a model that the first engine lacks
    _given_back: str | None = None  # set when the endpoint became unhealthy: "" to be retried, else why it is not

    async def run(self, task: asyncio.Task[object] | None) -> None:
        """Attempt, and attempt again, within the attempts, the retry budget and what may safely be sent twice. `task`
        is the one this runs in."""
        self._task = task
        shared = self._shared
        now = shared.clock()
        shared.budget.count_request(now)
        try:
            while True:
                pick = await self.place(now)
                if pick is None:
                    if not self.exchange.outcome.attempts:
                        self._last = self.refusal
                    pause_s = self._retries.next_round()
                    if pause_s is None:
                        raise GaveUp(self._last, self.cluster)
                else:
                    next_step = await self._attempt(pick)
                    if next_step is Next.DELIVERED:
                        return
                    if next_step is Next.RESUME:
                        pause_s = 0.0
                    else:
                        pause_s = self._retries.count_failure(pick.endpoint) if next_step is Next.RETRY else None
                    if pause_s is None:
                        raise GaveUp(self._last, self.cluster)
                if pause_s:
                    await asyncio.sleep(pause_s)
                self.excluded, self.instead = self._retries.list_places()
                if self._asking.own_rank is not None:
                    self.excluded |= self._asking.other_ranks()
                now = shared.clock()
        finally:
            if self._suspects.undecided:
                self._suspects.blame(shared.clock())

    def level(self) -> int:
        """As of Placement."""
        return self._asking.level

    async def wait_turn(self, turn: Awaitable[Pick | None]) -> Pick | None:
        """As of Placement."""
        with self._delivery.commenting():
            return await turn

    async def _attempt(self, pick: Pick) -> Next:
        response: UpstreamResponse | None = None
        pick.on_unhealthy(self._give_back)
        try:
            if "attempt_began" in self.exchange.hooks:
                notify(RequestObserver.attempt_began, self.exchange, pick)
            if "before_sending" in self.exchange.hooks:
                await self.wait_to_send(pick)
            hedges = self._shared.hedges.get(self.cluster.name) if self._shared.hedges else None
            if hedges is None or self._retries.lost or self._retries.moves:
                response, status, first = await self._asking.ask_engine(pick)
            else:
                pick, (response, status, first) = await self._race(hedges, pick)
            if status >= 500 and status != NOT_IMPLEMENTED:
                first, whole = await read_short(response, first)
                if whole:
                    return self._server_error(pick, response, first, status)
            elif status == _NOT_FOUND and (reason := self._why_elsewhere(pick)):
                first, whole = await read_short(response, first)
                if whole and (reason != _UNKNOWN_MODEL or names_no_model(first)):
                    return self._ask_elsewhere(pick, response, first, reason)
            delivery = self._delivery
            if delivery.downstream.status and (
                status != 200 or not (delivery.passed is response or is_event_stream(response.headers))
            ):
                await self._cannot_follow(pick, response, first)
            return await self._deliver(pick, response, first)
        except UpstreamError as error:
            return self._failed(pick, error.with_traceback(None))  # kept, and its frames hold the request
        except asyncio.CancelledError:
            # that of `_give_back` alone?
            if self._given_back is None or self._task is None or self._task.uncancel():
                raise
            return self._move_away(pick)
        finally:
            if response is not None and not response.complete:
                response.abort()
            if not pick.reservation.released:
                pick.endpoint.metrics.count_request(CLIENT_CLOSED_REQUEST)
                pick.settle(AttemptOutcome.CANCELLED, now=self._shared.clock())

    async def _race(self, hedges: HedgesRequests, pick: Pick) -> tuple[Pick, Answer]:
        """Return the faster of two answers, and the endpoint that gave it, if the request is sent twice."""
        racing = hedges.race(self._asking, pick, self._retries.may_send_twice)
        if racing is None:
            return pick, await self._asking.ask_engine(pick)
        winner, answer = await racing
        if winner is not pick:  # another endpoint than that of the attempt
            exchange = self.exchange
            now = self._shared.clock()
            notify(RequestObserver.attempt_failed, exchange, "hedged", now)
            notify(RequestObserver.placed, exchange, winner.decision, now)
            exchange.outcome.attempts -= 1  # counted as it was sent
            self.note_attempt(winner)
            winner.on_unhealthy(self._give_back)
            if "attempt_began" in exchange.hooks:
                notify(RequestObserver.attempt_began, exchange, winner)
        return winner, answer

    def _failed(self, pick: Pick, error: UpstreamError) -> Next:
        """Nothing reached the client yet (a relay in progress ends its own failures)."""
        shared = self._shared
        now = shared.clock()
        if isinstance(error, PoolFull):
            pick.settle(AttemptOutcome.BUSY, now=now)
        elif isinstance(error, ConnectError):
            pick.settle(AttemptOutcome.FAILURE, now=now)
        elif isinstance(error, ResponseHeadTooLarge):
            pick.settle(AttemptOutcome.CLIENT_ERROR, now=now)
        else:
            self._suspects.add(pick, error.reason, now)
        self._last = error
        pick.endpoint.metrics.attempt_failure(error.reason)
        if isinstance(error, ResponseHeadTooLarge):
            return self._retries.note_failure(error.reason, "same_anywhere")
        refusal = self._retries.find_refusal(unprocessed=isinstance(error, ConnectError | PoolFull))
        return self._retries.note_failure(error.reason, refusal)

    def _server_error(self, pick: Pick, response: UpstreamResponse, body: bytes, status: int) -> Next:
        """Return a 5xx, or a 200 whose first event is an error (an engine that died in its prefill answers so).

        The short answer is kept and another endpoint tried if that is allowed.
        """
        busy = status == 503
        now = self._shared.clock()
        if busy:
            pick.settle(AttemptOutcome.BUSY, now=now)
        else:
            self._suspects.add(pick, f"status_{status}", now)
        self._last = hold_reply(pick, response, body)
        reason = "busy" if busy else "status_5xx"
        pick.endpoint.metrics.attempt_failure(reason)
        return self._retries.note_failure(reason, self._retries.find_refusal(unprocessed=busy))

    def _why_elsewhere(self, pick: Pick) -> str:
        """Return why another engine may answer better than this one's 404, a metric label; "": none may."""
        inference = self.exchange.inference
        if inference is None:
            return ""
        holder = self._retries.holder = find_holder(self.exchange)
        if holder is not None and holder != pick.endpoint.id:
            return "history_elsewhere"
        if self._asked_elsewhere or not self.model:
            return ""
        engine = pick.endpoint.engine
        endpoints = self.cluster.endpoints
        known = any(one.engine is not engine and one.serves(self.model) for one in endpoints)
        return _UNKNOWN_MODEL if known else ""

    def _ask_elsewhere(self, pick: Pick, response: UpstreamResponse, body: bytes, reason: str) -> Next:
        """Try the engine that has the history of the request, or once another one that may serve the model: an adapter
        that this one has not loaded, or no longer has. The answer is kept in case no other engine has it."""
        pick.settle(AttemptOutcome.CLIENT_ERROR, now=self._shared.clock())
        if reason == _UNKNOWN_MODEL:
            self._asked_elsewhere = True
            engine = pick.endpoint.engine
            self.cluster.adapters.record_missing(str(engine.id), engine.adapters, self.model)
            pick.endpoint.metrics.attempt_failure(reason)
        self._last = hold_reply(pick, response, body)
        return self._retries.note_failure(reason, self._retries.find_refusal(unprocessed=True))

    def _give_back(self) -> None:
        """Interrupt the wait on an unhealthy endpoint if that helps.

        Without another endpoint to go to the attempt may as well wait on, since verdicts on all of them are often
        wrong; without budget the next failed probe tries again; a request that can never be sent again ends now."""
        if self._given_back is not None or not self.cluster.screening.may_serve(self.model, self._shared.clock()):
            return
        refusal = self._retries.find_refusal(unprocessed=False)
        if refusal not in ("outage", "budget"):
            assert self._task is not None
            self._given_back = refusal
            self._task.cancel()

    def _move_away(self, pick: Pick) -> Next:
        pick.settle(AttemptOutcome.CANCELLED, now=self._shared.clock())  # the endpoint has been judged by its probes
        self._last = error = EndpointUnhealthy(f"{pick.endpoint.id} became unhealthy before it answered")
        pick.endpoint.metrics.attempt_failure(error.reason)
        refusal = self._given_back or ""
        self._given_back = None
        return self._retries.note_failure(error.reason, refusal)

    def _note_first_token(self, pick: Pick) -> None:
        now = self._shared.clock()
        pick.first_token(now)
        if self._retries.lost or self._retries.moves:  # of the rest of a stream
            return
        self.exchange.outcome.ttft_s = now - self.exchange.received_at
        if "first_byte" in self.exchange.hooks:
            notify(RequestObserver.first_byte, self.exchange, now)

    async def _cannot_follow(self, pick: Pick, response: UpstreamResponse, first: bytes) -> None:
        """End a stream whose head came from an attempt that failed, and that this answer cannot go on with."""
        first, _ = await read_short(response, first)
        self._last = hold_reply(pick, response, first)
        pick.endpoint.metrics.count_request(response.status)
        pick.settle(verdict_on(response.status, None), now=self._shared.clock())
        raise GaveUp(self._last, self.cluster)

    async def _deliver(self, pick: Pick, response: UpstreamResponse, first: bytes) -> Next:
        if self._suspects.undecided and response.status < 500:
            self._suspects.blame(self._shared.clock(), proven=True)
        begins_later = first.startswith(b":") and is_comment(first)
        if not begins_later:
            self._note_first_token(pick)
        editor = self._shared.editor
        edit = None if editor is None else editor.follow(self.exchange, response)
        continuation = self.exchange.continuation
        asked = self._asking
        if continuation is not None and not continuation.follow(
            pick, response, target=asked.target, body=asked.body.whole
        ):
            continuation = None
        post = asked.method == b"POST"
        relay = Relay(self.exchange, response, self._delivery.downstream, post, edit, continuation)
        if begins_later:
            relay.on_event = functools.partial(self._note_first_token, pick)
        delivery = self._delivery
        headers = delivery.passed_headers if delivery.passed is response else delivery.headers_of(pick, response)
        error = await relay.run(headers, first)
        now = self._shared.clock()
        succeeded = error is None and response.status < 400
        verdict = AttemptOutcome.SUCCESS if succeeded else verdict_on(response.status, error)
        if verdict is AttemptOutcome.FAILURE:
            reason = error.reason if error is not None else f"status_{response.status}"
            if self._suspects.is_spared(pick.endpoint, reason, now):
                verdict = AttemptOutcome.UNPROVEN
        if error is not None and verdict is not AttemptOutcome.CLIENT_ERROR:
            pick.endpoint.metrics.attempt_failure(error.reason)
        pick.endpoint.metrics.count_request(response.status)
        if pick.stay is not None:
            pick.stay.calls_tool = self.exchange.outcome.calls_tool
        pick.settle(verdict, now=now)
        if error is not None and relay.broken:
            return await self._resume(pick, relay, headers, error)
        outcome = self.exchange.outcome
        if self._retries.lost or self._retries.moves:  # the counts are those of several engines
            outcome.cached_tokens = None
            return Next.DELIVERED
        policies = self.cluster.policies
        reused = outcome.cached_tokens if outcome.prefill_endpoint is None else None
        if policies.observes_reuse and reused is not None:
            pick.observe_reuse(reused, now)
        return Next.DELIVERED

    async def _resume(self, pick: Pick, relay: Relay, headers: Headers, error: UpstreamError) -> Next:
        """Prepare the request for the rest of a stream that broke, or end the stream."""
        continuation = self.exchange.continuation
        assert continuation is not None
        leg = continuation.next_leg(error, debug=self._delivery.debug)
        goes_on = False
        if leg is not None:
            retries = self._retries
            self._last = error
            if leg.moved:
                retries.moves += 1
                notify(RequestObserver.attempt_failed, self.exchange, error.reason, self._shared.clock())
                goes_on = True
            else:
                refusal = retries.find_refusal(unprocessed=False)
                retries.lost |= {pick.endpoint.id, *pick.endpoint.engine.members}
                goes_on = retries.note_failure(error.reason, refusal) is Next.RETRY
                if not goes_on:
                    continuation.refuse(refusal)
        if leg is None or not goes_on:
            await relay.tell_broken(headers, error)
            return Next.DELIVERED
        self._asking = self._asking.with_leg(leg)
        return Next.RESUME


def make_forwarding(
    shared: Forwarder,
    exchange: Exchange,
    *,
    cluster: Cluster,
    model: str,
    head: RequestHead,
    body: RequestBody,
    downstream: Downstream,
    debug: bool = False,
) -> Forwarding:
    """Return the forwarding of the request of `downstream`, to be sent with this head and body."""
    scope = downstream.scope
    method = scope["method"].encode()
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    target = raw_path + b"?" + query if query else raw_path
    rank = head.repeated.rank if exchange.trusted else None
    delivery = Delivery(exchange, downstream, debug)
    legs = shared.legs.get(cluster.name) if shared.legs else None
    asking = EngineRequest(
        exchange,
        shared.pool,
        shared.timeouts,
        cluster,
        method,
        target,
        head,
        body,
        rank,
        delivery.pass_head,
        legs,
    )
    retries = Retries(
        shared.retry,
        shared.budget,
        shared.metrics,
        shared.clock,
        shared.rng,
        exchange,
        cluster,
        model,
        method,
        body,
    )
    return Forwarding(
        exchange=exchange,
        cluster=cluster,
        clock=shared.clock,
        model=model,
        excluded=NO_ENDPOINTS if rank is None else asking.other_ranks(),
        _shared=shared,
        _asking=asking,
        _delivery=delivery,
        _retries=retries,
        _suspects=Suspects(cluster, model, exchange, scope),
    )


def hold_reply(pick: Pick, response: UpstreamResponse, body: bytes) -> HeldReply:
    """Return the answer of an attempt to be kept, without the length that its body lacks."""
    headers = response_headers(response.headers, endpoint=pick.endpoint.id.encode(), origin=pick.endpoint.origin)
    if not response.complete:
        headers = [(name, value) for name, value in headers if name != b"content-length"]
    return HeldReply(pick.endpoint, response.status, headers, body)


def find_holder(exchange: Exchange) -> EndpointId | None:
    """Return the endpoint that answered the response which this request continues: engines keep responses to
    themselves."""
    facts = exchange.facts
    if facts is None or exchange.inference is None or exchange.inference.continues is None:
        return None
    holders = (name for name, one in facts.by_endpoint.items() if one.source == SESSION)
    return next(holders, None)
