"""The filter: what runs, imported when a chain names it."""

from __future__ import annotations

from starlette.types import ASGIApp

from greeting.metrics import GreetingMetrics
from greeting.settings import GreetingPlace, GreetingSettings
from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import Headers
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.exchange import Exchange


class GreetingFilter(Step):
    """Adds the header to each answer."""

    def __init__(self, app: ASGIApp, settings: GreetingSettings, context: FilterContext) -> None:
        super().__init__(app, metrics=context.metrics, clock=context.clock)
        self._header = settings.header.lower().encode()
        self._text = part_of(context.config, GreetingPlace).greeting.encode()
        self._sent = context.metrics.group(GreetingMetrics).sent.labels()

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        headers.append((self._header, self._text))
        self._sent.inc()
