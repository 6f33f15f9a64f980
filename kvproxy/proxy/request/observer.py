"""The one way to watch a request: a base class with a hook for each stage, and the call of a hook.

Metrics, kvcache learning, receipts, spans and rate limits are observers, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar, TypeVarTuple, Unpack, cast

from kvproxy.base.types import Headers
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.proxy.request.exchange import Exchange

log = logging.getLogger("kvproxy.request")

Ts = TypeVarTuple("Ts")

HOOKS = (
    "facts_began",
    "facts_known",
    "received",
    "deciding",
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
