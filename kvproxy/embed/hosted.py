"""Inference request of a host app: its overlaps, its endpoint, and the end of its answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import msgspec
from starlette.types import Message

from kvproxy.base.errors import QueueFull
from kvproxy.base.types import Clock, EndpointId, RequestKind
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import DOWN, Condition, Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.embed.no_endpoint import NoEndpoint, endpoint_ids
from kvproxy.operate.placing.external import full_reply
from kvproxy.proxy.filters.kvcache import KvCacheLearning
from kvproxy.proxy.placement import Placement
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.request.usage import read_response_id, read_usage

log = logging.getLogger("kvproxy.kvcache")

#: State key where the app may name the endpoint it used; else the response's `x-kvproxy-endpoint` header counts.
SERVED_KEY = "llm_served_endpoint_id"
_SERVED_HEADER = b"x-kvproxy-endpoint"
#: APIs whose first event counts the prompt, or names the response.
_SAID_FIRST = frozenset({RequestKind.MESSAGES, RequestKind.RESPONSES})
_TAIL_BYTES = 16 * 1024
_KEPT_BYTES = 256 * 1024  # of a piece of the answer
_NOT_NAMED = DOWN | {Condition.DRAINING}


class HostedRequest(msgspec.Struct, eq=False):
    """Stands in for the router: the app reports the endpoint of the request, or requests one, and the answer is read as
    it passes. Learned from once: at the last piece of the answer, or when the app is through."""

    cluster: Cluster
    clock: Clock
    state: MutableMapping[str, Any]  # of the scope; the app may write to it
    exchange: Exchange | None = None  # set once its body was read, with the facts
    pick: Pick | None = None
    learns: bool = False  # from its end, which did not come yet
    refusal: LocalReply | None = None  # by a guard: no endpoint may get it
    finding: str = "not_running"  # what became of the search for an endpoint that holds its prompt
    _outcome: AttemptOutcome = AttemptOutcome.CANCELLED  # until an answer arrives
    _named: str = ""  # from the response's header; in the end the endpoint it was sent to
    _first: bytes = b""
    _previous: bytes = b""
    _last: bytes = b""

    def follow(self, exchange: Exchange) -> None:
        """Follow the request once its body was read and its facts are in the exchange."""
        self.exchange = exchange
        self.learns = exchange.facts is not None and exchange.inference is not None

    # calls of the app

    def matches(self) -> Mapping[str, int]:
        """Tokens of the prompt by endpoint, of those that hold any and answer."""
        exchange = self.exchange
        if exchange is None or exchange.facts is None or self.refusal is not None:
            return {}
        now = self.clock()
        facts = exchange.facts
        return {
            str(one.id): facts.matched_tokens(one.id)
            for one in self.cluster.endpoints
            if one.id in facts.by_endpoint and self._may_get_it(one, now)
        }

    def usable(self, preferred: EndpointId | None) -> EndpointId | None:
        """Return `preferred` if it answers, else the endpoint that holds most of those that do."""
        if preferred is None:
            return None
        endpoint = self.cluster.find_endpoint(preferred)
        if endpoint is not None and self.refusal is None and self._may_get_it(endpoint, self.clock()):
            return preferred
        matches = self.matches()
        best = max(matches, key=lambda name: matches[name], default=None)
        return None if best is None else EndpointId(best)

    async def choose(self, exclude: Iterable[str] = ()) -> str | None:
        """Return the endpoint that this request should go to, and count the request there until its response ends.

        None: no endpoint may take it. A further call moves the request: the endpoint before has failed it. Raises
        NoEndpoint for a request that a guard refuses, or that has to come again later.
        """
        self._settle(AttemptOutcome.FAILURE)
        if self.refusal is not None:
            raise NoEndpoint(self.refusal)
        now = self.clock()
        exchange = Exchange(received_at=now) if self.exchange is None else self.exchange
        placement = Placement(
            exchange=exchange,
            cluster=self.cluster,
            clock=self.clock,
            model="" if exchange.inference is None else exchange.inference.model,
            excluded=endpoint_ids(exclude),
        )
        try:
            self.pick = await placement.place(now)
        except QueueFull as full:
            raise NoEndpoint(full_reply(full)) from None
        return None if self.pick is None else str(self.pick.endpoint.id)

    def went_to(self, name: str) -> None:
        """Record the endpoint the app chose, on which requests with the same beginning may count from now on."""
        endpoint = self.cluster.find_endpoint(EndpointId(name))
        if endpoint is None:
            known = ", ".join(str(one.id) for one in self.cluster.endpoints)
            log.warning("[kvcache] served(): no endpoint has the id %.100r (known: %s)", name, known)
        elif self.exchange is not None:
            for observer in self.exchange.observers:
                if isinstance(observer, KvCacheLearning):
                    observer.went_to(endpoint.id)

    def failed(self, name: str | None) -> None:
        """Record that the endpoint could not be reached, or broke off; None: the one it was sent to."""
        endpoint = self.cluster.find_endpoint(EndpointId(name or self._sent_to()))
        chosen = self.pick
        if chosen is not None and chosen.endpoint is endpoint:
            self._settle(AttemptOutcome.FAILURE)
        elif endpoint is not None:
            self.cluster.verdicts.record_outcome(endpoint.engine, AttemptOutcome.FAILURE, self.clock())

    # from the answer

    def sent(self, message: Message) -> None:
        """Read a message of the app's answer, which has gone out."""
        exchange = self.exchange
        if exchange is None or not self.learns:
            return
        if message["type"] == "http.response.start":
            self._read_head(exchange, message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body":
            if piece := message.get("body"):
                self._read_piece(exchange, piece)
            if not message.get("more_body", False):
                self.finish()

    def _read_head(self, exchange: Exchange, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        exchange.outcome.status = status
        if status >= 500:
            self._outcome = AttemptOutcome.FAILURE
        else:
            self._outcome = AttemptOutcome.CLIENT_ERROR if status >= 400 else AttemptOutcome.SUCCESS
        for name, value in headers:
            if name.lower() == _SERVED_HEADER:
                self._named = value.decode("latin-1")
                break

    def _read_piece(self, exchange: Exchange, piece: bytes) -> None:
        if exchange.outcome.ttft_s is None:
            now = self.clock()
            exchange.outcome.ttft_s = now - exchange.received_at
            if self.pick is not None:
                self.pick.first_token(now)
            if exchange.inference is not None and exchange.inference.kind in _SAID_FIRST:
                self._first = bytes(piece[:_KEPT_BYTES])
        self._previous = self._last
        self._last = bytes(piece[-_KEPT_BYTES:])

    def finish(self) -> None:
        """Finish after the answer, complete or not."""
        exchange = self.exchange
        if exchange is None or not self.learns:
            return
        self.learns = False
        outcome = exchange.outcome
        self._named = endpoint = self._sent_to()
        outcome.endpoint = EndpointId(endpoint) if endpoint else None
        usage = read_usage(self._previous[-_TAIL_BYTES:] + self._last, self._first)
        if usage is not None:
            outcome.prompt_tokens = usage.prompt_tokens
            outcome.cached_tokens = usage.cached_tokens
            outcome.completion_tokens = usage.completion_tokens
            outcome.media_tokens = usage.media_tokens
        if exchange.inference is not None and exchange.inference.continuable:
            outcome.response_id = read_response_id(self._first)
        self._judge(endpoint, outcome.cached_tokens)
        notify(RequestObserver.finished, exchange, self.clock())

    def release(self) -> None:
        """Finish, and release the place, once the app has returned; a place still held then counts neither for nor
        against its endpoint. Exchange and state are dropped: cycles would keep them until the garbage collector
        runs."""
        self.finish()
        self._settle(AttemptOutcome.CANCELLED)
        self._named = self._named or self._sent_to()
        self.exchange = None
        self.state = {}

    def _judge(self, name: str, cached_tokens: int | None) -> None:
        pick = self.pick
        if pick is not None:
            self._settle(self._outcome)
            if self._outcome is AttemptOutcome.SUCCESS and cached_tokens is not None:
                pick.observe_reuse(cached_tokens, self.clock())
            return
        endpoint = self.cluster.find_endpoint(EndpointId(name))
        if endpoint is None:
            return
        if self._outcome is AttemptOutcome.FAILURE:
            self.cluster.verdicts.record_outcome(endpoint.engine, AttemptOutcome.FAILURE, self.clock())
        elif self._outcome is AttemptOutcome.SUCCESS:
            endpoint.engine.health.record_success()

    def _sent_to(self) -> str:
        chosen = self.pick
        return self.state.get(SERVED_KEY) or self._named or (str(chosen.endpoint.id) if chosen is not None else "")

    def _may_get_it(self, endpoint: Endpoint, now: float) -> bool:
        barred = self.exchange is not None and endpoint.id in self.exchange.barred
        return not barred and endpoint.condition(now) not in _NOT_NAMED

    def _settle(self, outcome: AttemptOutcome) -> None:
        pick = self.pick
        self.pick = None
        if pick is not None:
            pick.settle(outcome, self.clock())
