"""The kvcache filter for another ASGI app: `from kvproxy import KVCacheMiddleware`."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Awaitable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.decode import decode_model
from kvproxy.base.settings.model import Model, parse_size_bytes
from kvproxy.base.settings.paths import dotted_path
from kvproxy.base.types import Clock, EndpointId, Headers, RequestKind
from kvproxy.cache.service import KvCache
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routes import RouteTarget
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings
from kvproxy.proxy.filters.embedded_body import ReadAhead
from kvproxy.proxy.filters.embedded_choice import EmbeddedChoice
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH
from kvproxy.proxy.filters.kvcache import STATE_KEY, KvCacheFilter
from kvproxy.proxy.request.body import HeldBodies
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import SCOPE_KEY, Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.request.usage import read_response_id, read_usage

log = logging.getLogger("kvproxy.kvcache")

M = TypeVar("M", bound=Model)

#: Where the app may say which endpoint it used; else the response's `x-kvproxy-endpoint` header says it.
SERVED_KEY = "llm_served_endpoint_id"
#: Where a request's EmbeddedChoice is.
CHOICE_KEY = "kvproxy_choice"
_OWN_KEYS = (SERVED_KEY, STATE_KEY, CHOICE_KEY)
_SERVED_HEADER = b"x-kvproxy-endpoint"
_CLUSTER = "default"
#: Whose first event counts the prompt, or names the response.
_SAID_FIRST = frozenset({RequestKind.MESSAGES, RequestKind.RESPONSES})
_TAIL_BYTES = 16 * 1024
_KEPT_BYTES = 256 * 1024  # of a piece of the answer
#: After a start that failed, requests pass without facts for so long before the next try.
RETRY_S = 60.0


class HasScope(Protocol):
    """A request of Starlette, FastAPI or anything else that keeps its ASGI scope."""

    @property
    def scope(self) -> MutableMapping[str, Any]: ...


def preferred(request: HasScope | MutableMapping[str, Any]) -> str | None:
    """Return the endpoint that holds most of this request's prompt, by its id; None when no endpoint is known to hold
    any.

    `request` is the one the app got, or its ASGI scope.
    """
    endpoint = _state(request).get(STATE_KEY)
    return None if endpoint is None else str(endpoint)


def served(request: HasScope | MutableMapping[str, Any], endpoint: str) -> None:
    """Tells the middleware which endpoint this request went to; called before the response ends."""
    _state(request)[SERVED_KEY] = endpoint


async def choose(request: HasScope | MutableMapping[str, Any], *, exclude: Iterable[str] = ()) -> str | None:
    """Return the endpoint that this request should go to, by the proxy's own policy: what endpoints hold of the prompt,
    and what they have to do. The request counts there until its response ends.

    Call it once the body was read. To try another endpoint call it again, with those that failed in `exclude`; None
    means that no endpoint may take the request. Raises LookupError for a request that is no inference request behind
    KVCacheMiddleware.
    """
    choice = _state(request).get(CHOICE_KEY)
    if not isinstance(choice, EmbeddedChoice):
        raise LookupError("choose() is for inference requests behind KVCacheMiddleware; this request is none")
    return await choice.choose(exclude)


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
        limit_bytes: int | str = 32 * 1024 * 1024,
        limit_all_bytes: int | str = 1024 * 1024 * 1024,
        session_header: str = "",
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._app = app
        self.metrics = Metrics() if metrics is None else metrics
        rng = random.Random() if rng is None else rng
        if not isinstance(settings, KvCacheSettings):
            settings = _decoded(composed(KvCacheSettings), dict(settings or {}), "settings")
        if isinstance(endpoints, Mapping):
            endpoints = [
                _decoded(EndpointSettings, {"id": name, "url": url}, f"endpoints.{name}")
                for name, url in endpoints.items()
            ]
        if not endpoints:
            raise ConfigError([Problem("endpoints", "there are none", "{id: url} of each engine")])
        if faults := [Problem(f"endpoints.{one.id}.url", why) for one in endpoints if (why := url_fault(one.url))]:
            raise ConfigError(faults)
        members = ClusterSettings(endpoints=tuple(endpoints))
        self._cluster = Cluster(_CLUSTER, members, metrics=self.metrics, clock=clock, rng=rng)
        self._cluster.show()
        self._held = HeldBodies(_size("limit_all_bytes", limit_all_bytes), metrics=self.metrics)
        self._limit_bytes = _size("limit_bytes", limit_bytes)
        self._session_header = session_header
        self._clock = clock
        self._enabled = settings.enabled
        self._header = settings.preference_header.lower().encode()
        self._make_service = functools.partial(
            KvCache, settings, clusters={_CLUSTER: self._cluster}, metrics=self.metrics, clock=clock, rng=rng
        )
        #: That of the latest start; what was learned goes on in the next.
        self.service = self._make_service()
        self._lives: dict[asyncio.AbstractEventLoop, _Life] = {}
        self._started = False  # the service above is used up
        self._retry_at = float("-inf")

    async def __aenter__(self) -> Self:
        life = self._life()
        if life is None:
            raise RuntimeError("this KVCacheMiddleware runs in another event loop; make one for each loop")
        async with life.changing:
            await self._start(life)
        return self

    async def __aexit__(self, *_: object) -> None:
        life = self._lives.get(asyncio.get_running_loop())
        if life is not None:
            async with life.changing:
                await self._end(life)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        if scope["type"] == "http":
            scope = self._without_others(scope)
        known = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in KIND_OF_PATH
        if not known:
            await self._app(scope, receive, send)
            return
        filters = await self._running() if self._enabled else None
        state = scope.setdefault("state", {})  # here, so that copies of the scope further in share it
        choice = state[CHOICE_KEY] = EmbeddedChoice(self._cluster, self._clock)
        try:
            if filters is None:
                await self._app(scope, receive, send)
            else:
                state[SERVED_KEY] = None
                await filters({key: value for key, value in scope.items() if key != SCOPE_KEY}, receive, send)
        finally:
            choice.release()

    def _without_others(self, scope: Scope) -> Scope:
        """Take away what a client may have set as its preference, and ids that another request, or another middleware
        of this kind, put into a state that both share."""
        state = scope.get("state")
        if state and not state.keys().isdisjoint(_OWN_KEYS):
            scope["state"] = {key: value for key, value in state.items() if key not in _OWN_KEYS}
        if self._header and any(name == self._header for name, _ in scope["headers"]):
            scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != self._header]}
        return scope

    async def _behind_the_filters(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app. Its own kvproxy filters, if it has any, begin with an exchange of theirs."""
        self._tap(scope.pop(SCOPE_KEY), scope)
        await self._app(scope, receive, send)

    def _tap(self, exchange: Exchange, scope: Scope) -> None:
        """Follow the answer to a request of which there are facts."""
        choice: EmbeddedChoice = scope["state"][CHOICE_KEY]
        choice.exchange = exchange
        if exchange.facts is not None and exchange.inference is not None:
            exchange.attach(_UsageTap(exchange.inference.kind, scope["state"], choice, self._clock))

    # its life

    def _life(self) -> _Life | None:
        """Return that of the running event loop. None if another thread runs the service in a loop of its own: nothing
        of it may be touched from here."""
        loop = asyncio.get_running_loop()
        life = self._lives.get(loop)
        if life is None:
            self._lives = {other: one for other, one in self._lives.items() if not other.is_closed()}
            if any(other.is_running() for other in self._lives):
                return None
            life = self._lives[loop] = _Life()
        return life

    async def _running(self) -> ASGIApp | None:
        """Return the filters; None if the service cannot run here. Without lifespan events the first request
        starts it."""
        life = self._lives.get(asyncio.get_running_loop()) or self._life()
        if life is not None and life.filters is None:
            async with life.changing:
                if life.filters is None and self._clock() >= self._retry_at:
                    await self._try_to_start(life)
        return None if life is None else life.filters

    async def _try_to_start(self, life: _Life) -> None:
        try:
            await self._start(life)
        except Exception:
            self._retry_at = self._clock() + RETRY_S
            log.exception("[kvcache] the service cannot start: requests pass without facts; next try in %g s", RETRY_S)

    async def _start(self, life: _Life) -> None:
        """Start a service in the running loop, with what earlier ones learned. Raises what its parts raise."""
        if life.filters is not None:
            return
        service = self.service
        if self._started:
            service = self._make_service(state=service.state)
        self._started = True
        await service.__aenter__()
        service.show()
        self.service = life.service = service
        life.filters = self._filters(service)

    async def _end(self, life: _Life) -> None:
        service = life.service
        life.service = None
        life.filters = None
        if service is not None:
            await service.__aexit__()

    def _filters(self, service: KvCache) -> ASGIApp:
        """Those around the app, made again for each event loop: their locks and timers belong to it."""
        filtered = KvCacheFilter(
            self._behind_the_filters,
            service,
            routes=_OneCluster(self._cluster),
            prefer={_CLUSTER: False},
            metrics=self.metrics,
            clock=self._clock,
        )

        async def on_late_body(exchange: Exchange, downstream: Downstream) -> None:
            waits: Awaitable[None] | None = filtered.before(exchange, downstream)
            if waits is not None:
                await waits
            self._tap(exchange, downstream.scope)

        return ReadAhead(
            filtered,
            on_late_body=on_late_body,
            session_header=self._session_header,
            held=self._held,
            limit_bytes=self._limit_bytes,
            metrics=self.metrics,
            clock=self._clock,
        )

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start when the app has started, end when it has ended. The app's messages go on, whatever becomes of it."""

        async def send_after(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._running()
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                try:
                    await self.__aexit__()
                except Exception:
                    log.exception("[kvcache] the service cannot end in order")
            await send(message)

        await self._app(scope, receive, send_after)


class _Life:
    """The service and its filters in one event loop; neither while it does not run there."""

    __slots__ = ("changing", "filters", "service")

    def __init__(self) -> None:
        self.changing = asyncio.Lock()  # it starts, or ends
        self.service: KvCache | None = None
        self.filters: ASGIApp | None = None


def _decoded(model: type[M], raw: Mapping[str, Any], name: str) -> M:
    """Return these settings; raise ConfigError with the configuration file's words for everything wrong with them."""
    decoded = decode_model(model, raw, lambda path: f"{name}.{dotted_path(path)}" if path else name)
    if decoded.problems or decoded.value is None:
        raise ConfigError(decoded.problems)
    return decoded.value


def _size(name: str, value: int | str) -> int:
    try:
        return parse_size_bytes(value)
    except ValueError as error:
        raise ConfigError([Problem(name, str(error))]) from None


class _OneCluster:
    """Routes that all lead to one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._target = RouteTarget(cluster)

    def resolve(self, path: str, model: str) -> RouteTarget:
        return self._target


class _UsageTap(RequestObserver):
    """Stands in for the router: fills in the outcome by what the app sends, and says when the request is over."""

    __slots__ = ("_choice", "_clock", "_endpoint", "_first", "_kind", "_last", "_previous", "_state")

    def __init__(self, kind: RequestKind, state: Mapping[str, Any], choice: EmbeddedChoice, clock: Clock) -> None:
        self._kind = kind
        self._choice = choice
        self._state = state  # of the scope, which the app may write to
        self._clock = clock
        self._endpoint = ""
        self._first = self._previous = self._last = b""

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        exchange.outcome.status = status
        self._choice.answer(status)
        named = (value.decode("latin-1") for name, value in headers if name == _SERVED_HEADER)
        self._endpoint = next(named, "")

    def body_piece(self, exchange: Exchange, piece: bytes) -> None:
        if exchange.outcome.ttft_s is None:
            exchange.outcome.ttft_s = self._clock() - exchange.received_at
            self._choice.first_piece()
            if self._kind in _SAID_FIRST:
                self._first = bytes(piece[:_KEPT_BYTES])
        self._previous = self._last
        self._last = bytes(piece[-_KEPT_BYTES:])

    def ended(self, exchange: Exchange, status: int, crash: str) -> None:
        outcome = exchange.outcome
        chosen = self._choice.pick
        served = self._state.get(SERVED_KEY) or self._endpoint or (chosen.endpoint.id if chosen is not None else "")
        outcome.endpoint = EndpointId(served) if served else None
        usage = read_usage(self._previous[-_TAIL_BYTES:] + self._last, self._first)
        if usage is not None:
            outcome.prompt_tokens = usage.prompt_tokens
            outcome.cached_tokens = usage.cached_tokens
            outcome.completion_tokens = usage.completion_tokens
            outcome.media_tokens = usage.media_tokens
        if exchange.inference is not None and exchange.inference.continuable:
            outcome.response_id = read_response_id(self._first)
        self._choice.end(outcome.cached_tokens)
        notify(RequestObserver.finished, exchange, self._clock())
