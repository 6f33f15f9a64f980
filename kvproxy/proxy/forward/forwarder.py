"""Carries one request to an engine and its answer back; before the first byte went down it may try another endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import random
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.types import Scope

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
from kvproxy.cluster.routing.policy import FactSource
from kvproxy.cluster.screening import Refusal
from kvproxy.proxy.forward.answer import NOT_IMPLEMENTED, RetryState, names_no_model, read_short, verdict_on
from kvproxy.proxy.forward.engine_request import Answer, EngineRequest, HedgesRequests, SplitsRequests
from kvproxy.proxy.forward.headers import RequestHead, describe_decision, response_headers
from kvproxy.proxy.forward.relay import EditsAnswers, Relay, is_comment, is_event_stream
from kvproxy.proxy.forward.request_body import RequestBody
from kvproxy.proxy.metrics import RequestMetrics
from kvproxy.proxy.placement import NO_ENDPOINTS, Placement
from kvproxy.proxy.request.continuation import Leg
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import CLIENT_CLOSED_REQUEST, Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.settings import RetrySettings

_IDEMPOTENT = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"})
_NOT_FOUND = 404

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


class _Next(enum.Enum):
    DELIVERED = enum.auto()
    RETRY = enum.auto()
    RESUME = enum.auto()  # a stream that broke goes on with a request of its own
    GIVE_UP = enum.auto()


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
    _earlier: RetryState | None = None  # set once an attempt failed
    _holder: EndpointId | None = None  # endpoint with the history, once another one proved to lack it
    _last: UpstreamError | HeldReply | Refusal = Refusal.NO_ENDPOINTS
    _suspects: list[tuple[Pick, str]] = []  # failed attempts, and how, until the blame is decided
    _task: asyncio.Task[object] | None = None
    _asked_elsewhere: bool = False  # for a model that the first engine lacks
    _lost: frozenset[EndpointId] = NO_ENDPOINTS  # endpoints that a stream of this request broke at
    _moves: int = 0  # of the stream, off endpoints that did not fail
    _given_back: str | None = None  # set when the endpoint became unhealthy: "" to be retried, else why it is not

    @classmethod
    def of(
        cls,
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
        """Return that of the request of `downstream`, to be sent with this head and body."""
        scope = downstream.scope
        method: str = scope["method"]
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope["query_string"]
        target = raw_path + b"?" + query if query else raw_path
        rank = head.repeated.rank if exchange.trusted else None
        delivery = Delivery(exchange, downstream, debug)
        asking = EngineRequest(
            exchange,
            shared.pool,
            shared.timeouts,
            cluster,
            method.encode(),
            target,
            head,
            body,
            rank,
            delivery.pass_head,
            shared.legs.get(cluster.name) if shared.legs else None,
        )
        return cls(
            exchange=exchange,
            cluster=cluster,
            clock=shared.clock,
            model=model,
            excluded=NO_ENDPOINTS if rank is None else asking.other_ranks(),
            _shared=shared,
            _asking=asking,
            _delivery=delivery,
        )

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
                    pause_s = self._earlier.next_round() if self._earlier is not None else None
                    if pause_s is None:
                        raise GaveUp(self._last, self.cluster)
                else:
                    next_step = await self._attempt(pick)
                    if next_step is _Next.DELIVERED:
                        return
                    if next_step is _Next.RESUME:
                        pause_s = 0.0
                    else:
                        pause_s = self._count_failed(pick.endpoint) if next_step is _Next.RETRY else None
                    if pause_s is None:
                        raise GaveUp(self._last, self.cluster)
                if pause_s:
                    await asyncio.sleep(pause_s)
                self._exclude_tried()
                now = shared.clock()
        finally:
            if self._suspects:
                self._blame_suspects()

    def level(self) -> int:
        """As of Placement."""
        return self._asking.level

    async def wait_turn(self, turn: Awaitable[Pick | None]) -> Pick | None:
        """As of Placement."""
        with self._delivery.commenting():
            return await turn

    def _exclude_tried(self) -> None:
        """Place the next attempt without the endpoints that failed already, or where it is to be made again."""
        earlier = self._earlier
        self.excluded = self._lost
        if earlier is not None:
            self.excluded |= earlier.excluded
            self.instead = earlier.again or self._holder
        if self._asking.own_rank is not None:
            self.excluded |= self._asking.other_ranks()

    def _count_failed(self, endpoint: Endpoint) -> float | None:
        if self._earlier is None:
            self._earlier = RetryState(rng=self._shared.rng)
        return self._earlier.count_failure(endpoint)

    async def _attempt(self, pick: Pick) -> _Next:
        response: UpstreamResponse | None = None
        pick.on_unhealthy(self._give_back)
        try:
            if "attempt_began" in self.exchange.hooks:
                notify(RequestObserver.attempt_began, self.exchange, pick)
            if "before_sending" in self.exchange.hooks:
                await self.wait_to_send(pick)
            racing = self._race(pick) if self._shared.hedges else None
            if racing is None:
                response, status, first = await self._asking.ask_engine(pick)
            else:
                pick, (response, status, first) = self._note_winner(pick, *await racing)
            if status >= 500 and status != NOT_IMPLEMENTED:
                first, whole = await read_short(response, first)
                if whole:
                    return self._server_error(pick, response, first, status)
            elif status == _NOT_FOUND and self._is_history_elsewhere(pick.endpoint):
                first, whole = await read_short(response, first)
                if whole:
                    return self._not_here(pick, response, first)
            elif status == _NOT_FOUND and self._may_know_elsewhere(pick):
                first, whole = await read_short(response, first)
                if whole and names_no_model(first):
                    return self._unknown_model(pick, response, first)
            delivery = self._delivery
            if delivery.downstream.status and (
                status != 200 or not (delivery.passed is response or is_event_stream(response.headers))
            ):
                await self._cannot_follow(pick, response, first)
            return await self._deliver(pick, response, first)
        except UpstreamError as error:
            return self._failed(pick, error)
        except asyncio.CancelledError:
            if not self._interrupted_by_give_back():
                raise
            return self._move_away(pick)
        finally:
            if response is not None and not response.complete:
                response.abort()
            if not pick.reservation.released:
                pick.endpoint.metrics.count_request(CLIENT_CLOSED_REQUEST)
                pick.settle(AttemptOutcome.CANCELLED, now=self._shared.clock())

    def _race(self, pick: Pick) -> Coroutine[None, None, tuple[Pick, Answer]] | None:
        """Return the faster of two answers; None: the request is sent once."""
        hedges = self._shared.hedges.get(self.cluster.name)
        if hedges is None or self._lost or self._moves:
            return None
        return hedges.race(self._asking, pick, self._may_send_twice)

    def _may_send_twice(self) -> bool:
        """Return whether the request may be sent to a second engine beside the first, which is then an attempt."""
        if self._why_no_retry(unprocessed=False):
            return False
        self.exchange.outcome.attempts += 1
        return True

    def _note_winner(self, pick: Pick, winner: Pick, answer: Answer) -> tuple[Pick, Answer]:
        """Record that another endpoint answers than that of the attempt."""
        if winner is not pick:
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

    def _failed(self, pick: Pick, error: UpstreamError) -> _Next:
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
            self._suspect(pick, error.reason, now)
        self._last = error
        pick.endpoint.metrics.attempt_failure(error.reason)
        if isinstance(error, ResponseHeadTooLarge):
            return self._after_failure(error.reason, "same_anywhere")
        unprocessed = isinstance(error, ConnectError | PoolFull)
        return self._after_failure(error.reason, self._why_no_retry(unprocessed=unprocessed))

    def _server_error(self, pick: Pick, response: UpstreamResponse, body: bytes, status: int) -> _Next:
        """Return a 5xx, or a 200 whose first event is an error (an engine that died in its prefill answers so).

        The short answer is kept and another endpoint tried if that is allowed.
        """
        busy = status == 503
        now = self._shared.clock()
        if busy:
            pick.settle(AttemptOutcome.BUSY, now=now)
        else:
            self._suspect(pick, f"status_{status}", now)
        self._hold_reply(pick, response, body)
        reason = "busy" if busy else "status_5xx"
        pick.endpoint.metrics.attempt_failure(reason)
        return self._after_failure(reason, self._why_no_retry(unprocessed=busy))

    def _hold_reply(self, pick: Pick, response: UpstreamResponse, body: bytes) -> None:
        headers = response_headers(response.headers, endpoint=pick.endpoint.id.encode(), origin=pick.endpoint.origin)
        if not response.complete:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        self._last = HeldReply(pick.endpoint, response.status, headers, body)

    def _is_history_elsewhere(self, endpoint: Endpoint) -> bool:
        """Return True if another endpoint answered the response that this request continues: engines keep responses to
        themselves."""
        facts = self.exchange.facts
        if facts is None or self.exchange.inference is None or self.exchange.inference.continues is None:
            return False
        holders = (name for name, one in facts.by_endpoint.items() if one.source is FactSource.SESSION)
        self._holder = next(holders, None)
        return self._holder is not None and self._holder != endpoint.id

    def _not_here(self, pick: Pick, response: UpstreamResponse, body: bytes) -> _Next:
        """Handle an endpoint without the history of the request: send it to the one that has it."""
        pick.settle(AttemptOutcome.CLIENT_ERROR, now=self._shared.clock())
        self._hold_reply(pick, response, body)
        return self._after_failure("history_elsewhere", self._why_no_retry(unprocessed=True))

    def _may_know_elsewhere(self, pick: Pick) -> bool:
        """Return True if another engine may serve a model that this one lacks; once a request."""
        if self._asked_elsewhere or not self.model or self.exchange.inference is None:
            return False
        engine = pick.endpoint.engine
        endpoints = self.cluster.endpoints
        return any(one.engine is not engine and one.serves(self.model) for one in endpoints)

    def _unknown_model(self, pick: Pick, response: UpstreamResponse, body: bytes) -> _Next:
        """Handle an adapter that this engine has not loaded, or no longer has. Its answer is kept in case no other
        engine has it."""
        self._asked_elsewhere = True
        pick.settle(AttemptOutcome.CLIENT_ERROR, now=self._shared.clock())
        engine = pick.endpoint.engine
        self.cluster.adapters.record_missing(str(engine.id), engine.adapters, self.model)
        self._hold_reply(pick, response, body)
        pick.endpoint.metrics.attempt_failure("unknown_model")
        return self._after_failure("unknown_model", self._why_no_retry(unprocessed=True))

    def _suspect(self, pick: Pick, how: str, now: float) -> None:
        """Suspect the endpoint of a failed attempt; it is to blame if another one serves the request."""
        pick.suspend(now)
        self._suspects.append((pick, how))

    def _blame_suspects(self, *, proven: bool = False) -> None:
        """Blame the suspected endpoints, unless the request failed in the same way on several and none served it."""
        verdicts = self.cluster.verdicts
        now = self._shared.clock()
        suspects = self._suspects
        self._suspects = []
        for pick, how in suspects:
            shared = not proven and any(
                kind == how and one.endpoint.engine is not pick.endpoint.engine for one, kind in suspects
            )
            if shared:
                verdicts.record_shared_failure(how, now)
            spared = shared or (not proven and self._is_spared(pick.endpoint, how, now))
            pick.blame(AttemptOutcome.UNPROVEN if spared else AttemptOutcome.FAILURE, now)

    def _is_spared(self, endpoint: Endpoint, reason: str, now: float) -> bool:
        client = client_of(self.exchange, self._delivery.downstream.scope)
        verdicts = self.cluster.verdicts
        return verdicts.is_spared(endpoint, self.model, reason=reason, client=client, now=now)

    def _give_back(self) -> None:
        """Interrupt the wait on an unhealthy endpoint if that helps.

        Without another endpoint to go to the attempt may as well wait on, since verdicts on all of them are often
        wrong; without budget the next failed probe tries again; a request that can never be sent again ends now."""
        if self._given_back is not None or not self.cluster.screening.may_serve(self.model, self._shared.clock()):
            return
        refusal = self._why_no_retry(unprocessed=False)
        if refusal not in ("outage", "budget"):
            assert self._task is not None
            self._given_back = refusal
            self._task.cancel()

    def _interrupted_by_give_back(self) -> bool:
        """Return True if the cancellation just caught is that of `_give_back` alone."""
        return self._given_back is not None and self._task is not None and self._task.uncancel() == 0

    def _move_away(self, pick: Pick) -> _Next:
        pick.settle(AttemptOutcome.CANCELLED, now=self._shared.clock())  # the endpoint has been judged by its probes
        self._last = error = EndpointUnhealthy(f"{pick.endpoint.id} became unhealthy before it answered")
        pick.endpoint.metrics.attempt_failure(error.reason)
        refusal = self._given_back or ""
        self._given_back = None
        return self._after_failure(error.reason, refusal)

    def _why_no_retry(self, *, unprocessed: bool) -> str:
        """Why the request may not be sent again, a metric label; "" if it may, which is then taken from the budget."""
        shared = self._shared
        safe = unprocessed or self.exchange.inference is not None or self._asking.method in _IDEMPOTENT
        if not (safe and self._asking.body.replayable):
            return "not_replayable"
        if self.exchange.outcome.attempts - self._moves >= shared.retry.attempts:
            return "attempts"
        if self._lost and not unprocessed:  # the prompt itself may have killed both engines
            return "engines_lost"
        now = shared.clock()
        if self.cluster.verdicts.has_outage(self.model, now):
            return "outage"
        return "" if shared.budget.withdraw_retry(now) else "budget"

    def _after_failure(self, reason: str, refusal: str) -> _Next:
        metrics = self._shared.metrics
        notify(RequestObserver.attempt_failed, self.exchange, reason, self._shared.clock())
        if refusal:
            metrics.group(RequestMetrics).retries_refused.labels(refusal).inc()
            return _Next.GIVE_UP
        metrics.group(RequestMetrics).retries.labels(reason).inc()
        return _Next.RETRY

    def _note_first_token(self, pick: Pick) -> None:
        now = self._shared.clock()
        pick.first_token(now)
        if self._lost or self._moves:  # of the rest of a stream
            return
        self.exchange.outcome.ttft_s = now - self.exchange.received_at
        if "first_byte" in self.exchange.hooks:
            notify(RequestObserver.first_byte, self.exchange, now)

    async def _cannot_follow(self, pick: Pick, response: UpstreamResponse, first: bytes) -> None:
        """End a stream whose head came from an attempt that failed, and that this answer cannot go on with."""
        first, _ = await read_short(response, first)
        self._hold_reply(pick, response, first)
        pick.endpoint.metrics.count_request(response.status)
        pick.settle(verdict_on(response.status, None), now=self._shared.clock())
        raise GaveUp(self._last, self.cluster)

    async def _deliver(self, pick: Pick, response: UpstreamResponse, first: bytes) -> _Next:
        if self._suspects and response.status < 500:
            self._blame_suspects(proven=True)
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
            if self._is_spared(pick.endpoint, reason, now):
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
        if self._lost or self._moves:  # the counts are those of several engines
            outcome.cached_tokens = None
            return _Next.DELIVERED
        policies = self.cluster.policies
        reused = outcome.cached_tokens if outcome.prefill_endpoint is None else None
        if policies.observes_reuse and reused is not None:
            pick.observe_reuse(reused, now)
        return _Next.DELIVERED

    async def _resume(self, pick: Pick, relay: Relay, headers: Headers, error: UpstreamError) -> _Next:
        """Prepare the request for the rest of a stream that broke, or end the stream."""
        continuation = self.exchange.continuation
        assert continuation is not None
        leg = continuation.next_leg(error, debug=self._delivery.debug)
        if leg is not None:
            self._last = error
            if leg.moved:
                self._moves += 1
                notify(RequestObserver.attempt_failed, self.exchange, error.reason, self._shared.clock())
                return self._go_on(leg)
            refusal = self._why_no_retry(unprocessed=False)
            self._lost |= {pick.endpoint.id, *pick.endpoint.engine.members}
            if self._after_failure(error.reason, refusal) is _Next.RETRY:
                return self._go_on(leg)
            continuation.refuse(refusal)
        await relay.tell_broken(headers, error)
        return _Next.DELIVERED

    def _go_on(self, leg: Leg) -> _Next:
        self._asking = self._asking.with_leg(leg)
        return _Next.RESUME


def client_of(exchange: Exchange, scope: Scope) -> str:
    """Return the name of the client's API key, or its address where no key is asked for."""
    address = scope.get("client")
    return exchange.tenant or (str(address[0]) if address else "")
