"""Filter `request_id`: one id per request, from the client or new, known to the engine, the logs and the client."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter

from starlette.types import ASGIApp

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Headers
from kvproxy.proxy.filter_settings import RequestIdSettings
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange, RandomHex
from kvproxy.proxy.request.fields import is_request_id

_NAME = itemgetter(0)


class RequestIdFilter(Step):
    """Puts the id into the exchange, the request's headers and the response's, replacing what was there."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        header: str,
        trust_client: bool,
        metrics: Metrics,
        clock: Clock,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._header = header.lower().encode("latin-1")
        self._trust_client = trust_client
        self._make_id = partial(RandomHex().take, 32) if make_id is None else make_id  # 128 bits

    def before(self, exchange: Exchange, downstream: Downstream) -> None:
        """Take the client's id if it is one and may be trusted, else a new one, which gives way to one in the body."""
        header = self._header
        scope = downstream.scope
        headers: Headers = scope["headers"]
        given = [pair for pair in headers if pair[0] == header] if header in map(_NAME, headers) else []
        if self._trust_client and len(given) == 1 and is_request_id(given[0][1].decode("latin-1")):
            exchange.request_id = given[0][1].decode("ascii")
            return
        exchange.request_id = self._make_id()
        exchange.names_itself = self._trust_client and not given
        kept = [pair for pair in headers if pair[0] != header] if given else headers
        scope["headers"] = [*kept, (header, exchange.request_id.encode("latin-1"))]

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        """Set the id in the response, over an engine's own."""
        header = self._header
        if header in map(_NAME, headers):
            headers[:] = [pair for pair in headers if pair[0] != header]
        headers.append((header, exchange.request_id.encode("latin-1")))


def build(app: ASGIApp, settings: RequestIdSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`."""
    return RequestIdFilter(
        app,
        header=settings.header,
        trust_client=settings.trust_client,
        metrics=context.metrics,
        clock=context.clock,
    )
