"""The kvcache filter for another ASGI app: `from kvproxy import KVCacheMiddleware`."""

from __future__ import annotations

import functools
import logging
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.model import Model, parse_size_bytes
from kvproxy.base.settings.paths import Finding, dotted_path
from kvproxy.base.types import Clock, EndpointId, RequestKind
from kvproxy.cache.service import KvCache
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings
from kvproxy.embed.hosted import SERVED_KEY, HostedRequest
from kvproxy.embed.paths import CoveredPaths
from kvproxy.embed.read_ahead import ReadAhead
from kvproxy.embed.service import Filters, HostedService, OneCluster
from kvproxy.operate.config.decode import decode_model
from kvproxy.operate.config.load import load_config
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.verify import find_faults
from kvproxy.proxy.filter_settings import InferenceRequestSettings
from kvproxy.proxy.filters.chain import RequestGuard
from kvproxy.proxy.filters.kvcache import NAME, STATE_KEY, KvCacheFilter, announce
from kvproxy.proxy.request.body import HeldBodies
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import SCOPE_KEY, Exchange

log = logging.getLogger("kvproxy.kvcache")

M = TypeVar("M", bound=Model)
#: Any framework's app, whatever types it has for scopes and messages.
HostApp = Callable[[Any, Any, Any], Awaitable[None]]

#: State key of a request's HostedRequest.
HOSTED_KEY = "kvproxy_request"
#: Key of the server's scope within that of our filters.
_OUTER = "kvproxy.outer"
_CLUSTER = "default"
_OWN_KEYS = (SERVED_KEY, STATE_KEY, HOSTED_KEY)
#: Reasons why a request had no preferred endpoint.
_NOT_PREFERRED = ("not_running", "unread", "short", "unknown", "down", "refused")
#: Hooks of observers that see the answer.
_OF_ANSWERS = frozenset({"response_started", "body_piece", "ended"})


class HasScope(Protocol):
    """A request of Starlette, FastAPI or anything else that keeps its ASGI scope."""

    @property
    def scope(self) -> Any: ...


def preferred(request: HasScope | Mapping[str, Any]) -> str | None:
    """Return the endpoint that holds most of this request's prompt, by its id, of those that answer; None when no such
    endpoint is known to hold any.

    `request` is the one the app got, or its ASGI scope.
    """
    endpoint = _state(request).get(STATE_KEY)
    return None if endpoint is None else str(endpoint)


def matches(request: HasScope | Mapping[str, Any]) -> Mapping[str, int]:
    """Return the tokens of this request's prompt that endpoints hold, by id, of those that hold any and answer."""
    hosted = _state(request).get(HOSTED_KEY)
    return hosted.matches() if isinstance(hosted, HostedRequest) else {}


def served(request: HasScope | Mapping[str, Any], endpoint: str) -> None:
    """Report the endpoint that this request goes to; called before the response ends, best before it begins: requests
    with the same beginning count on it from then on."""
    state = _state(request)
    state[SERVED_KEY] = endpoint
    hosted = state.get(HOSTED_KEY)
    if isinstance(hosted, HostedRequest):
        hosted.went_to(endpoint)


def failed(request: HasScope | Mapping[str, Any], endpoint: str | None = None) -> None:
    """Report that an endpoint could not be reached, or broke off: by default the one the request was sent to. After
    three failures in a row an endpoint is not named for a while."""
    hosted = _state(request).get(HOSTED_KEY)
    if isinstance(hosted, HostedRequest):
        hosted.failed(endpoint)


async def choose(request: HasScope | Mapping[str, Any], *, exclude: Iterable[str] = ()) -> str | None:
    """Return the endpoint that this request should go to, by the proxy's own policy: what endpoints hold of the prompt,
    and what they have to do. The request counts there until its response ends.

    Call it once the body was read. To try another endpoint call it again, with those that failed in `exclude`; None
    means that no endpoint may take the request. Raises NoEndpoint, with the `status` to answer, where the engines have
    no memory for another session, or the shield refuses the request; LookupError for a request that is no inference
    request behind KVCacheMiddleware.
    """
    hosted = _state(request).get(HOSTED_KEY)
    if not isinstance(hosted, HostedRequest):
        raise LookupError("choose() is for inference requests behind KVCacheMiddleware; this request is none")
    return await hosted.choose(exclude)


def _state(request: HasScope | Mapping[str, Any]) -> MutableMapping[str, Any]:
    scope: Any = getattr(request, "scope", request)  # a Starlette request is a mapping as well
    state: MutableMapping[str, Any] | None = scope.get("state")
    return {} if state is None else state


class KVCacheMiddleware:
    """Finds the endpoint of an inference request for an app that forwards by itself: `choose` by cache and load,
    `preferred` by cache alone (also in `scope["state"]`, and in a request header with `settings.preference_header`).
    After the response it learns, pins, compresses and evicts.

    `endpoints` are the engines the app chooses from: `{id: url}`, or `EndpointSettings` of
    `kvproxy.cluster.settings`. `settings` are those of the `kvcache` filter, as `KvCacheSettings` or plain data.
    `paths` are the inference paths; None: the usual ones below any prefix. `filters` are ASGI middlewares that see
    what is known of a request. Where `choose` is not called the app reports the endpoint it used by `served`, or by the
    response header `x-kvproxy-endpoint`; else nothing is learned. `name` is the label of its metrics. `shield` is as in
    the configuration: with `refuse`, `choose` raises NoEndpoint for a request that would harm the engines.

    It never answers, and never fails a request. Its background tasks run between ASGI's lifespan events, or inside
    `async with middleware`; under a server that sends neither they start with the first request. asyncio only. Raises
    ConfigError for what `kvproxy check` refuses.
    """

    def __init__(
        self,
        app: HostApp,
        *,
        endpoints: Mapping[str, str] | Sequence[EndpointSettings],
        settings: KvCacheSettings | Mapping[str, Any] | None = None,
        paths: Mapping[str, str] | Iterable[str] | None = None,
        filters: Sequence[Callable[[ASGIApp], HostApp]] = (),
        metrics: Metrics | None = None,
        name: str = "default",
        limit_bytes: int | str = 32 * 1024 * 1024,
        limit_all_bytes: int | str = 1024 * 1024 * 1024,
        session_header: str = "",
        shield: str | None = None,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._app = app
        self.metrics = Metrics() if metrics is None else metrics
        if not isinstance(self.metrics, Metrics):
            raise ConfigError([Problem("metrics", "must be a Metrics of kvproxy")])
        if not isinstance(name, str):
            raise ConfigError([Problem("name", "must be text")])
        rng = random.Random() if rng is None else rng
        settings, config = _checked(endpoints, settings, shield)
        sessions = _decoded(InferenceRequestSettings, {"session_header": session_header})
        members = config.clusters[_CLUSTER]
        self._cluster = Cluster(name, members, metrics=self.metrics, clock=clock, rng=rng)
        self._cluster.bind_gauges()
        self._paths = CoveredPaths(paths)
        self._ends = self._paths.ends
        self._held = HeldBodies(_size("limit_all_bytes", limit_all_bytes), metrics=self.metrics)
        self._limit_bytes = _size("limit_bytes", limit_bytes)
        self._session_header = sessions.session_header
        self._clock = clock
        self._header = settings.preference_header.lower().encode()
        if not isinstance(filters, Sequence) or not all(callable(make) for make in filters):
            raise ConfigError([Problem("filters", "must be a list of ASGI middlewares")])
        inner: HostApp = self._host
        for make in reversed(filters):
            inner = make(inner)
        self._behind = inner
        self._filtered = bool(filters)
        self._counts = dict.fromkeys(("requests", "preferred", *_NOT_PREFERRED), 0)
        self._hosted = HostedService(
            self._host,
            settings,
            config=config,
            cluster=self._cluster,
            held=self._held,
            make_filters=self._make_filters,
            metrics=self.metrics,
            clock=clock,
            rng=rng,
        )

    def status(self) -> dict[str, object]:
        """Return what it does now: whether it runs, the condition of its endpoints, and how many requests it covered.

        Of those that are over, `preferred` had an endpoint that holds some of the prompt. The others had none as it was
        `not_running`, as the body was `unread` (too long, encoded, no inference request), the prompt `short` (less than
        a block), `unknown` to every endpoint, all that hold it `down`, or the request `refused` by the shield.
        `not_covered` is a path that looked like inference.
        """
        now = self._clock()
        return {
            "running": self._hosted.runs,
            "endpoints": {str(one.id): one.condition(now).value for one in self._cluster.endpoints},
            **self._counts,
            "not_covered": self._paths.missed,
        }

    @property
    def service(self) -> KvCache:
        """The service of the latest start."""
        return self._hosted.service

    async def __aenter__(self) -> Self:
        await self._hosted.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._hosted.leave()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if self._header or scope.get("state"):
                scope = self._without_others(scope)
            if scope["path"].endswith(self._ends) and scope["method"] == "POST":
                await self._serve(scope, receive, send)
                return
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the app serve a request, with facts if it is an inference request and the service runs."""
        kind = self._paths.kind_of(scope)
        if kind is None:
            await self._app(scope, receive, send)
            return
        filters = None
        if (life := self._hosted.find_life()) is not None:
            filters = life.filters or await self._hosted.start_late(life)
        state = scope.setdefault("state", {})  # here, so that copies of the scope further in share it
        hosted = state[HOSTED_KEY] = HostedRequest(self._cluster, self._clock, state)
        self._counts["requests"] += 1
        try:
            if filters is None:
                await self._app(scope, receive, send)
            else:
                state[SERVED_KEY] = None
                hosted.finding = "unread"
                await self._serve_with_facts(filters, kind, scope, receive, send)
        finally:
            self._counts[hosted.finding] += 1
            hosted.release()

    async def _serve_with_facts(
        self, filters: Filters, kind: RequestKind, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Call the filters' hooks in turn. (By itself each would be an app around the next, which costs more than their
        work.)"""
        exchange = Exchange(received_at=self._clock(), followed=True)
        inner = {**scope, SCOPE_KEY: exchange, _OUTER: scope}
        downstream = Downstream(exchange, inner, receive, send, (), None, True)
        try:
            waits = filters.reading.read_ahead(exchange, downstream, kind)
            if waits is not None:
                await waits
            await self._inform(filters, exchange, downstream)
            watched = self._filtered or not exchange.hooks.isdisjoint(_OF_ANSWERS)
            await self._behind(inner, downstream.receive, downstream.send if watched else send)
        finally:
            if exchange.held_bytes and exchange.release is not None:
                exchange.release(exchange.held_bytes)
            if "ended" in exchange.hooks:
                error = sys.exception()
                downstream.end(type(error).__name__ if isinstance(error, Exception) else "")

    async def _inform(self, filters: Filters, exchange: Exchange, downstream: Downstream) -> None:
        """Gather what is known of a request whose body was read, for the app and for the end of its answer.

        It is examined before anything names an endpoint for it. A guard's refusal is kept for the app's question: the
        app decides what a refused client gets."""
        waits = filters.facts.before(exchange, downstream)
        if waits is not None:
            await waits
        scope = downstream.scope
        hosted: HostedRequest = scope["state"][HOSTED_KEY]
        if exchange.body is not None:
            try:
                for guard in filters.guards:
                    await guard.examine(exchange, scope["path"], scope["headers"], exchange.body)
            except LocalReply as why:
                hosted.refusal = why
        self._note(exchange, scope, hosted)

    def _without_others(self, scope: Scope) -> Scope:
        """Take away what a client may have set as its preference, and ids that another request, or another middleware
        of this kind, put into a state that both share."""
        state = scope.get("state")
        if state and not state.keys().isdisjoint(_OWN_KEYS):
            scope["state"] = {key: value for key, value in state.items() if key not in _OWN_KEYS}
        if self._header and any(name == self._header for name, _ in scope["headers"]):
            scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != self._header]}
        return scope

    def _note(self, exchange: Exchange, scope: Scope, hosted: HostedRequest) -> None:
        """Note the end of reading: follow the answer to a request with facts."""
        hosted.follow(exchange)
        best = scope["state"].get(STATE_KEY)
        usable = hosted.usable(best)
        if usable != best:
            del scope["state"][STATE_KEY]
            announce(scope, usable, header=self._header)
        hosted.finding = _finding(hosted, exchange.facts, best, usable)
        if exchange.facts is not None:
            exchange.body = exchange.names = None  # the app has it: one copy is enough

    async def _host(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with the scope of its server. Its own kvproxy filters, if it has any, begin with an exchange of
        theirs."""
        hosted: HostedRequest = scope["state"][HOSTED_KEY]
        outer: Scope = scope[_OUTER]
        if SCOPE_KEY in outer:
            outer = {key: value for key, value in outer.items() if key != SCOPE_KEY}
        if self._header:
            outer["headers"] = scope["headers"]

        async def send_and_learn(message: Message) -> None:
            headers = message.get("headers", ())
            if not isinstance(headers, list | tuple):  # an iterator, which one reader uses up
                message = {**message, "headers": list(headers)}
            await send(message)
            hosted.sent(message)

        await self._app(outer, receive, send_and_learn)

    def _make_filters(self, service: KvCache, guards: Sequence[RequestGuard]) -> Filters:
        """Return those of one event loop, to which their locks and timers belong."""
        reading = ReadAhead(
            self._host,
            session_header=self._session_header,
            held=self._held,
            limit_bytes=self._limit_bytes,
            metrics=self.metrics,
            clock=self._clock,
        )
        facts = KvCacheFilter(
            self._host,
            service,
            routes=OneCluster(self._cluster),
            prefer={self._cluster.name: False},
            metrics=self.metrics,
            clock=self._clock,
        )
        filters = Filters(reading, facts, guards)
        reading.on_late_body = functools.partial(self._inform, filters)
        return filters

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start when the app has started, end when it has ended. The app's messages go on, whatever becomes of it."""

        async def send_after(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._hosted.hold()
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                try:
                    await self.__aexit__()
                except Exception:
                    log.exception("[kvcache] the service cannot end in order")
            await send(message)

        await self._app(scope, receive, send_after)


def _checked(
    endpoints: Mapping[str, str] | Sequence[EndpointSettings],
    settings: KvCacheSettings | Mapping[str, Any] | None,
    shield: str | None,
) -> tuple[KvCacheSettings, Config]:
    """Return what was given as settings; raise ConfigError for what `kvproxy check` refuses, by argument."""
    if not isinstance(settings, KvCacheSettings):
        settings = _decoded(composed(KvCacheSettings), {} if settings is None else settings, ("settings",))
    if isinstance(endpoints, Mapping):
        endpoints = [
            _decoded(EndpointSettings, {"id": name, "url": url}, ("endpoints", str(name)))
            for name, url in endpoints.items()
        ]
    if not endpoints:
        raise ConfigError([Problem("endpoints", "there are none", "{id: url} of each engine")])
    if not isinstance(endpoints, Sequence) or not all(isinstance(one, EndpointSettings) for one in endpoints):
        raise ConfigError([Problem("endpoints", "must be a mapping of ids to URLs", "{id: url} of each engine")])
    if faults := [Problem(f"endpoints.{one.id}.url", why) for one in endpoints if (why := url_fault(one.url))]:
        raise ConfigError(faults)
    return settings, _verified(settings, ClusterSettings(endpoints=tuple(endpoints)), shield)


def _verified(settings: KvCacheSettings, members: ClusterSettings, shield: str | None) -> Config:
    chosen = {} if shield is None else {"shield": shield}
    usual = load_config({"endpoints": {"a": "http://127.0.0.1:1"}, **chosen})
    at = next(index for index, spec in enumerate(usual.filters) if spec.name == NAME)
    filters = [
        *usual.filters[:at],
        usual.filters[at].model_copy(update={"settings": settings}),
        *usual.filters[at + 1 :],
    ]
    config = usual.model_copy(update={"clusters": {_CLUSTER: members}, "filters": tuple(filters)})
    problems = [one for finding in find_faults(config) if (one := _by_argument(finding, at)) is not None]
    _settle(problems)
    return config


def _by_argument(finding: Finding, at: int) -> Problem | None:
    """Return it under the argument's name; None for what no argument sets."""
    path = finding.path
    if path[:2] == ("filters", at):
        path = ("settings", *path[2:])
    elif path[:2] == ("clusters", _CLUSTER):
        path = path[2:]
    else:
        return None
    return Problem(dotted_path(path), finding.message, finding.hint, finding.severity)


def _settle(problems: list[Problem]) -> None:
    """Raise ConfigError for errors; log warnings."""
    if any(one.severity == "error" for one in problems):
        raise ConfigError(problems)
    for one in problems:
        log.warning("[kvcache] %s", one.located())


def _decoded(model: type[M], raw: Any, at: tuple[str, ...] = ()) -> M:
    """Return these settings; raise ConfigError with the configuration file's words for everything wrong with them."""
    decoded = decode_model(
        model, dict(raw) if isinstance(raw, Mapping) else raw, lambda path: dotted_path((*at, *path))
    )
    _settle(decoded.problems)
    assert decoded.value is not None  # there is no error
    return decoded.value


def _size(name: str, value: int | str) -> int:
    try:
        return parse_size_bytes(value)
    except ValueError as error:
        raise ConfigError([Problem(name, str(error))]) from None


def _finding(
    hosted: HostedRequest, facts: OverlapFacts | None, best: EndpointId | None, usable: EndpointId | None
) -> str:
    """Return the name under which `status` counts a request."""
    if usable is not None:
        return "preferred"
    if hosted.refusal is not None:
        return "refused"
    if facts is None:
        return "unread"
    if best is not None:
        return "down"
    return "unknown" if facts.blocks else "short"
