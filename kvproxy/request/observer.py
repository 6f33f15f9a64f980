"""The one way to watch a request: a base class with a hook for each stage, and the call of a hook.

Metrics, kvcache learning, receipts, tracing, recent decisions and rate limits are observers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, ParamSpec

from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Pick
from kvproxy.request.exchange import Exchange
from kvproxy.routing.selector import Decision
from kvproxy.types import Headers

log = logging.getLogger("kvproxy.request")

P = ParamSpec("P")


class RequestObserver:
    """Hears of the stages of a request, in this order; every hook does nothing unless a subclass overrides it.

    One observer may serve all requests (`context.observers`) or one (`exchange.attach`, with which it lives as long as
    the request; it must not hold the exchange, which would be a cycle). A hook must not wait. What it raises is logged
    and fails no request. `now` is the proxy's clock, in seconds.
    """

    __slots__ = ()

    #: Names of the hooks a class overrides; the others are not called.
    hooks: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.hooks = frozenset(name for name in HOOKS if getattr(cls, name) is not getattr(RequestObserver, name))

    def facts_began(self, exchange: Exchange) -> None:
        """The prompt is about to be matched against what endpoints hold."""

    def facts_known(self, exchange: Exchange) -> None:
        """What can be known in time is known."""

    def received(self, exchange: Exchange, now: float) -> None:
        """The router begins with the request: it is read, and will be routed."""

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        """An endpoint was chosen; its load does not count the request yet. A retry is placed again."""

    def refused(self, exchange: Exchange, refusal: str, now: float) -> None:
        """No endpoint may take the request."""

    def attempt_began(self, exchange: Exchange, pick: Pick) -> None:
        """The request is about to be sent to the endpoint of its pick."""

    def attempt_failed(self, exchange: Exchange, reason: str, now: float) -> None:
        """Nothing of this attempt reached the client; another one may follow."""

    def first_byte(self, exchange: Exchange, now: float) -> None:
        """The first byte of an answer's body came from the endpoint."""

    def finished(self, exchange: Exchange, now: float) -> None:
        """The request is over, whatever its end; called once."""

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        """The head of the response goes to the client."""

    def body_piece(self, exchange: Exchange, piece: bytes) -> None:
        """A piece of the response's body went to the client."""

    def ended(self, exchange: Exchange, status: int, crash: str) -> None:
        """All filters are through with the request, also with one that never reached the router: `status` was sent (0:
        nothing), an exception of type `crash` (mostly "") came out."""


HOOKS = (
    "facts_began",
    "facts_known",
    "received",
    "placed",
    "refused",
    "attempt_began",
    "attempt_failed",
    "first_byte",
    "finished",
    "response_started",
    "body_piece",
    "ended",
)


def notify(
    hook: Callable[Concatenate[RequestObserver, Exchange, P], None],
    exchange: Exchange,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Calls this hook of every observer of the exchange that has it, such as `notify(RequestObserver.finished,
    exchange, now)`. An observer that fails is logged, and the others go on.

    Where few requests have an observer with the hook, look into `exchange.hooks` first: that is cheaper than a call.
    """
    name = hook.__name__
    for observer in exchange.observers:
        if name in observer.hooks:
            try:
                getattr(observer, name)(exchange, *args, **kwargs)
            except Exception:
                log.exception("an observer of requests failed: %s at `%s`", type(observer).__name__, name)
