"""The kvcache filter for another ASGI app: `from kvproxy import KVCacheMiddleware`."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol, Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, Headers, RequestKind
from kvproxy.cache.service import KvCache
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routes import RouteTarget
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH, ReadIfPossible
from kvproxy.proxy.filters.kvcache import STATE_KEY, KvCacheFilter
from kvproxy.proxy.request.body import BodyReader, HeldBodies
from kvproxy.proxy.request.exchange import SCOPE_KEY, Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.request.usage import read_response_id, read_usage

log = logging.getLogger("kvproxy.kvcache")

#: Where the app may say which endpoint it used; else the response's `x-kvproxy-endpoint` header says it.
SERVED_KEY = "llm_served_endpoint_id"
_SERVED_HEADER = b"x-kvproxy-endpoint"
_CLUSTER = "default"
#: Whose first event counts the prompt, or names the response.
_SAID_FIRST = frozenset({RequestKind.MESSAGES, RequestKind.RESPONSES})
_TAIL_BYTES = 16 * 1024
_KEPT_BYTES = 256 * 1024  # of a piece of the answer
_PATIENCE_S = 7 * 86400.0  # for a body: how long the client may take is the app's business


class HasScope(Protocol):
    """A request of Starlette, FastAPI or anything else that keeps its ASGI scope."""

    @property
    def scope(self) -> MutableMapping[str, Any]: ...


def preferred(request: HasScope | MutableMapping[str, Any]) -> str | None:
    """The endpoint that holds most of this request's prompt, by its id; None when no endpoint is known to hold any.

    `request` is the one the app got, or its ASGI scope.
    """
    endpoint = _state(request).get(STATE_KEY)
    return None if endpoint is None else str(endpoint)


def served(request: HasScope | MutableMapping[str, Any], endpoint: str) -> None:
    """Tells the middleware which endpoint this request went to; called before the response ends."""
    _state(request)[SERVED_KEY] = endpoint


def _state(request: HasScope | MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    scope = request if isinstance(request, MutableMapping) else request.scope
    state: MutableMapping[str, Any] = scope.setdefault("state", {})
    return state


class KVCacheMiddleware:
    """Names the endpoint that holds most of a prompt (`preferred`; also in `scope["state"]`, and in a request header
    with `settings.preference_header`); after the response it learns, pins, compresses and evicts.

    `endpoints` are the engines the app chooses from: `{id: url}`, or `EndpointSettings` of
    `kvproxy.cluster.settings`. `settings` are those of the `kvcache` filter, as `KvCacheSettings` or plain data.
    The app tells which endpoint it used with `served`, or by the response header `x-kvproxy-endpoint`; without either
    nothing is learned.

    It never answers, and never fails a request. Its background tasks run between ASGI's lifespan events, or inside
    `async with middleware`; under a server that sends neither they start with the first request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        endpoints: Mapping[str, str] | Sequence[EndpointSettings],
        settings: KvCacheSettings | Mapping[str, Any] | None = None,
        metrics: Metrics | None = None,
        limit_bytes: int = 32 * 1024 * 1024,
        limit_all_bytes: int = 1024 * 1024 * 1024,
        session_header: str = "",
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._app = app
        self.metrics = Metrics() if metrics is None else metrics
        rng = random.Random() if rng is None else rng
        if not isinstance(settings, KvCacheSettings):
            settings = KvCacheSettings.model_validate(settings or {})
        if isinstance(endpoints, Mapping):
            endpoints = [EndpointSettings(id=name, url=url) for name, url in endpoints.items()]
        members = ClusterSettings(endpoints=tuple(endpoints))
        cluster = Cluster(_CLUSTER, members, metrics=self.metrics, clock=clock, rng=rng)
        cluster.show()
        self.service = KvCache(settings, clusters={_CLUSTER: cluster}, metrics=self.metrics, clock=clock, rng=rng)
        filtered = KvCacheFilter(
            self._behind_the_filters,
            self.service,
            routes=_OneCluster(cluster),
            prefer={_CLUSTER: False},
            metrics=self.metrics,
            clock=clock,
        )
        held = HeldBodies(limit_all_bytes, metrics=self.metrics)
        reader = BodyReader(limit_bytes=limit_bytes, timeout_s=_PATIENCE_S, held=held)
        self._filters = ReadIfPossible(
            filtered, session_header=session_header, reader=reader, held=held, metrics=self.metrics, clock=clock
        )
        self._clock = clock
        self._enabled = settings.enabled
        self._started = False
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        async with self._starting:
            if not self._started:
                await self.service.__aenter__()
                self.service.show()
                self._started = True
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._starting:
            if self._started:
                self._started = False
                await self.service.__aexit__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        known = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in KIND_OF_PATH
        if not (known and self._enabled and await self._running()):
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})  # here, so that copies of the scope further in share it
        own = {key: value for key, value in scope.items() if key != SCOPE_KEY}
        await self._filters(own, receive, send)

    async def _behind_the_filters(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app. Its own kvproxy filters, if it has any, begin with an exchange of theirs."""
        exchange: Exchange = scope.pop(SCOPE_KEY)
        if exchange.facts is not None and exchange.inference is not None:
            exchange.attach(_UsageTap(exchange.inference.kind, scope["state"], self._clock))
        await self._app(scope, receive, send)

    async def _running(self) -> bool:
        """Whether the service runs; under a server without lifespan events the first request starts it."""
        if not self._started:
            try:
                await self.__aenter__()
            except Exception:
                log.exception("[kvcache] no facts: the service cannot start")
        return self._started

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start when the app has started, end when it has ended."""

        async def send_after(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self.__aenter__()
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await self.__aexit__()
            await send(message)

        await self._app(scope, receive, send_after)


class _OneCluster:
    """Routes that all lead to one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._target = RouteTarget(cluster)

    def resolve(self, path: str, model: str) -> RouteTarget:
        return self._target


class _UsageTap(RequestObserver):
    """Stands in for the router: fills in the outcome by what the app sends, and says when the request is over."""

    __slots__ = ("_clock", "_endpoint", "_first", "_kind", "_last", "_previous", "_state")

    def __init__(self, kind: RequestKind, state: Mapping[str, Any], clock: Clock) -> None:
        self._kind = kind
        self._state = state  # of the scope, which the app may write to
        self._clock = clock
        self._endpoint = ""
        self._first = self._previous = self._last = b""

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        exchange.outcome.status = status
        named = (value.decode("latin-1") for name, value in headers if name == _SERVED_HEADER)
        self._endpoint = next(named, "")

    def body_piece(self, exchange: Exchange, piece: bytes) -> None:
        if exchange.outcome.ttft_s is None:
            exchange.outcome.ttft_s = self._clock() - exchange.received_at
            if self._kind in _SAID_FIRST:
                self._first = bytes(piece[:_KEPT_BYTES])
        self._previous, self._last = self._last, bytes(piece[-_KEPT_BYTES:])

    def ended(self, exchange: Exchange, status: int, crash: str) -> None:
        outcome, served = exchange.outcome, self._state.get(SERVED_KEY) or self._endpoint
        outcome.endpoint = EndpointId(served) if served else None
        usage = read_usage(self._previous[-_TAIL_BYTES:] + self._last, self._first)
        if usage is not None:
            outcome.prompt_tokens, outcome.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            outcome.completion_tokens, outcome.media_tokens = usage.completion_tokens, usage.media_tokens
        if exchange.inference is not None and exchange.inference.continuable:
            outcome.response_id = read_response_id(self._first)
        notify(RequestObserver.finished, exchange, self._clock())
