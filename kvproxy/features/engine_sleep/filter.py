"""Filter `engine_sleep`: stands right before the router and holds requests while an engine wakes."""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import ASGIApp

from kvproxy.base.types import Headers
from kvproxy.features.engine_sleep.engines import EngineSleep
from kvproxy.proxy.filters.chain import FilterContext, FilterType
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange


class SleepFilter(Step):
    """Holds a request for a model whose engines all sleep."""

    reads_state = False

    def __init__(self, app: ASGIApp, context: FilterContext) -> None:
        super().__init__(app, metrics=context.metrics, clock=context.clock)
        self._routes = context.services.routes
        self._kvcaches = context.kvcaches  # filled by a filter that is built after this one

    @property
    def engines(self) -> EngineSleep | None:
        """Return what calls the engines."""
        return next((found for one in self._kvcaches.values() if (found := one.observers.find(EngineSleep))), None)

    def before(self, exchange: Exchange, downstream: Downstream) -> Awaitable[None] | None:
        """Wait only while no engine of the model is awake."""
        return self._hold(exchange, downstream.scope["path"])

    def reads_bodies(self, method: str) -> bool:
        """As of RequestGuard."""
        return False

    async def examine(self, exchange: Exchange, path: str, headers: Headers, body: bytes | None) -> None:
        """As of RequestGuard."""
        held = self._hold(exchange, path)
        if held is not None:
            await held

    def _hold(self, exchange: Exchange, path: str) -> Awaitable[None] | None:
        request = exchange.inference
        target = None if request is None else self._routes.resolve(path, request.model)
        engines = self.engines
        if request is None or target is None or engines is None:
            return None
        return engines.wake_for(target.cluster, target.upstream_model or request.model)


def build(app: ASGIApp, settings: object, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`."""
    made = SleepFilter(app, context)
    context.guards.append(made)
    return made


FILTER = FilterType(None, build)
