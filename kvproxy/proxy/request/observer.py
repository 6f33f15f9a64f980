"""The one way to watch a request: a base class with a hook for each stage, the call of a hook, and the observer that
keeps the latest requests.

Metrics, kvcache learning, receipts, spans and rate limits are observers, too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, ClassVar, TypeAlias, TypeVarTuple, Unpack, cast

from kvproxy.base.types import EndpointId, Headers
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.policy import NO_FACTS, OverlapFacts, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.proxy.request.exchange import MAX_REMEMBERED, Exchange, Outcome, result_of

log = logging.getLogger("kvproxy.request")

Ts = TypeVarTuple("Ts")

HOOKS = (
    "facts_began",
    "facts_known",
    "received",
    "deciding",
    "queued",
    "placed",
    "refused",
    "attempt_began",
    "before_sending",
    "attempt_failed",
    "first_byte",
    "finished",
    "response_started",
    "body_piece",
    "ended",
)
#: A request as kept, in the order of the fields above but without its number, and with its arrival in place of its
#: duration: a tuple costs a fraction of an object. No prompt text, and nothing that keeps a body alive.
_Kept: TypeAlias = tuple[float, float, str, str, str, bool, OverlapFacts, Outcome]
#: Cluster, endpoint (None: not reached) and result, with the number of requests.
Tally = dict[tuple[str, EndpointId | None, str], int]
#: Cluster, endpoint (None: not reached) and cause of failure, with the number of requests.
FailureTally = dict[tuple[str, EndpointId | None, str], int]


class RequestObserver:
    """Observer of the stages of a request, in this order; every hook does nothing unless a subclass overrides it.

    One observer may serve all requests (`context.observers`) or one (`exchange.attach`, with which it lives as long as
    the request; it must not hold the exchange, which would be a cycle). A hook must not wait. Its errors are logged and
    fail no request. `now` is the proxy's clock, in seconds."""

    __slots__ = ()

    #: Names of the hooks a class overrides; the others are not called.
    hooks: ClassVar[frozenset[str]] = frozenset()
    #: Whether requests are matched against the caches even if no policy needs that.
    wants_facts: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.hooks = frozenset(name for name in HOOKS if getattr(cls, name) is not getattr(RequestObserver, name))

    def facts_began(self, exchange: Exchange) -> None:
        """Note that the prompt is about to be matched against the endpoints' caches."""

    def facts_known(self, exchange: Exchange) -> None:
        """Note that all facts that arrive in time are there."""

    def received(self, exchange: Exchange, now: float) -> None:
        """Note that the router begins with the request, which is read and will be routed."""

    def deciding(self, exchange: Exchange, asked: PickRequest, now: float) -> PickRequest:
        """Return the question of the first attempt with what it adds. Before each decision, so again after a wait."""
        return asked

    def queued(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        """Note that the request enters the router queue; its endpoint may have changed when its turn comes."""

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        """Note that an endpoint was chosen; its load does not count the request yet. A retry is placed again."""

    def refused(self, exchange: Exchange, refusal: str, now: float) -> None:
        """No endpoint may take the request."""

    def attempt_began(self, exchange: Exchange, pick: Pick) -> None:
        """Note that the request is about to be sent to the endpoint of its pick."""

    async def before_sending(self, exchange: Exchange) -> bool:
        """Wait, within a bound. True: the place is to be counted by the facts that the exchange has now."""
        return False

    def attempt_failed(self, exchange: Exchange, reason: str, now: float) -> None:
        """Nothing of this attempt reached the client; another one may follow."""

    def first_byte(self, exchange: Exchange, now: float) -> None:
        """Note the first byte of the body from the endpoint."""

    def finished(self, exchange: Exchange, now: float) -> None:
        """Note the end of the request, whatever that is; called once."""

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        """Note that the head of the response goes to the client."""

    def body_piece(self, exchange: Exchange, piece: bytes) -> None:
        """Note that a piece of the response's body went to the client."""

    def ended(self, exchange: Exchange, status: int, crash: str) -> None:
        """All filters are through with the request, also with one that never reached the router: `status` was sent (0:
        nothing), an exception of type `crash` (mostly "") came out."""


def notify(hook: Callable[[RequestObserver, Exchange, Unpack[Ts]], None], exchange: Exchange, *args: *Ts) -> None:
    """Call this hook of every observer of the exchange that has it, such as `notify(RequestObserver.finished,
    exchange, now)`. An observer that fails is logged, and the others go on.

    Where few requests have an observer with the hook, look into `exchange.hooks` first: that is cheaper than a call.
    """
    name = hook.__name__
    for observer in exchange.observers:
        if name in observer.hooks:
            try:
                getattr(observer, name)(exchange, *args)
            except Exception:
                log.exception("an observer of requests failed: %s at `%s`", type(observer).__name__, name)


def extend_question(exchange: Exchange, asked: PickRequest, now: float) -> PickRequest:
    """Return the question with what observers add (`deciding`); one that fails adds nothing."""
    for observer in exchange.observers:
        if "deciding" in observer.hooks:
            try:
                asked = cast("RequestObserver", observer).deciding(exchange, asked, now)
            except Exception:
                log.exception("an observer of requests failed: %s at `deciding`", type(observer).__name__)
    return asked


async def wait_to_send(exchange: Exchange) -> bool:
    """Wait for all observers that want that (`before_sending`); return whether one of them changed the facts."""
    waits = [one for one in exchange.observers if "before_sending" in one.hooks]
    return any([await cast("RequestObserver", one).before_sending(exchange) for one in waits])


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One finished request."""

    number: int  # number of the finished request since the start, from 1
    ended_at: float  # on the proxy's clock
    duration_s: float
    request_id: str
    tenant: str
    model: str
    streamed: bool
    facts: OverlapFacts  # at the last pick; of a fleet of more than MAX_REMEMBERED only what the endpoint held
    outcome: Outcome

    @property
    def prompt_tokens(self) -> int:
        """As known before the pick; 0: unknown."""
        return self.facts.prompt_tokens

    @property
    def matched_tokens(self) -> int:
        """Of the prompt's tokens, what the endpoint that served was estimated to hold."""
        endpoint = self.outcome.endpoint
        return 0 if endpoint is None else self.facts.matched_tokens(endpoint)

    @property
    def result(self) -> str:
        """Result of the request, one of RESULTS."""
        return result_of(self.outcome.end, self.outcome.status)


class RecentDecisions(RequestObserver):
    """Bounded in requests. `finished` is called once a request and costs about a microsecond."""

    def __init__(self, limit: int = 1000) -> None:
        self._kept: deque[_Kept] = deque(maxlen=limit)
        self._tally: Tally = {}
        self._failures: FailureTally = {}
        self._recorded = 0

    def __len__(self) -> int:
        return len(self._kept)

    def finished(self, exchange: Exchange, now: float) -> None:
        """Record the end of the request."""
        outcome = exchange.outcome
        inference = exchange.inference
        facts = exchange.facts
        facts = facts or NO_FACTS
        endpoint = outcome.endpoint
        if len(facts.by_endpoint) > MAX_REMEMBERED:
            held = None if endpoint is None else facts.by_endpoint.get(endpoint)
            by_endpoint = {} if endpoint is None or held is None else {endpoint: held}
            facts = OverlapFacts(facts.prompt_tokens, by_endpoint, searched=facts.searched)
        model, streamed = ("", False) if inference is None else (inference.model, inference.stream)
        self._kept.append(
            (now, exchange.received_at, exchange.request_id, exchange.tenant, model, streamed, facts, outcome)
        )
        self._recorded += 1
        result = "ok"
        if outcome.status >= 400 or outcome.end != "completed":
            result = result_of(outcome.end, outcome.status)
            self._count_failure(outcome)
        key = (outcome.cluster, endpoint, result)
        tally = self._tally
        tally[key] = tally.get(key, 0) + 1

    def _count_failure(self, outcome: Outcome) -> None:
        if cause := outcome.failure_cause():
            key = (outcome.cluster, outcome.endpoint, cause)
            self._failures[key] = self._failures.get(key, 0) + 1

    def latest(self) -> Iterator[RecentRequest]:
        """Yield the newest first."""
        return map(_recent_request, count(self._recorded, -1), reversed(self._kept))

    def numbered(self, number: int) -> RecentRequest | None:
        """Return the request of this number; None when it is not kept any more, or not there yet."""
        index = number - self._recorded - 1
        return _recent_request(number, self._kept[index]) if -len(self._kept) <= index < 0 else None

    def ttfts_since(self, moment: float) -> list[float]:
        """Seconds to the first byte of the streamed answers that ended after `moment`. The first byte of an answer that
        is not streamed is its end: another figure."""
        recent = takewhile(lambda kept: kept[0] > moment, reversed(self._kept))
        return [ttft_s for kept in recent if kept[5] and (ttft_s := kept[7].ttft_s) is not None]

    def ttfts_by_endpoint(self, moment: float) -> dict[tuple[str, EndpointId], list[float]]:
        """Return the same by cluster and endpoint."""
        found: dict[tuple[str, EndpointId], list[float]] = {}
        for kept in takewhile(lambda kept: kept[0] > moment, reversed(self._kept)):
            outcome = kept[7]
            if kept[5] and outcome.ttft_s is not None and outcome.endpoint is not None:
                found.setdefault((outcome.cluster, outcome.endpoint), []).append(outcome.ttft_s)
        return found

    def take_failures(self) -> FailureTally:
        """Return requests since the last call that were not served, by cause."""
        failures = self._failures
        self._failures = {}
        return failures

    def take_tally(self) -> Tally:
        """Return the tally of all requests since the last call, which may be more than are kept here. The caller must
        add it to its own."""
        tally = self._tally
        self._tally = {}
        return tally


def _recent_request(number: int, kept: _Kept) -> RecentRequest:
    ended_at, received_at, request_id, tenant, model, streamed, facts, outcome = kept
    duration_s = ended_at - received_at
    return RecentRequest(number, ended_at, duration_s, request_id, tenant, model, streamed, facts, outcome)
