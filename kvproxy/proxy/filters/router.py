"""The last filter: finds the cluster, forwards, and turns errors into local replies (the only filter that does)."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.errors import (
    EndpointUnhealthy,
    FirstByteTimeout,
    IdleTimeout,
    PoolFull,
    QueueFull,
    UnsafeRequest,
    UpstreamError,
)
from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.resilience.retry import RetryBudget
from kvproxy.base.types import CONNECTION, EndpointId, Headers
from kvproxy.base.upstream.pool import Timeouts
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import DOWN
from kvproxy.cluster.routes import RouteTarget
from kvproxy.cluster.screening import Refusal
from kvproxy.proxy.feature import ProxyFeature
from kvproxy.proxy.filter_settings import RequestIdSettings, RouterSettings
from kvproxy.proxy.filters.chain import FilterContext, ResolvesRoutes
from kvproxy.proxy.forward import models as model_list
from kvproxy.proxy.forward.body_guard import BodySanitizer, with_model
from kvproxy.proxy.forward.engine_request import HedgesRequests, SplitsRequests
from kvproxy.proxy.forward.forwarder import Forwarder, GaveUp, HeldReply, make_forwarding
from kvproxy.proxy.forward.headers import RequestHeaders
from kvproxy.proxy.forward.metrics import RouteMetrics
from kvproxy.proxy.forward.models import ModelList, ServedModels
from kvproxy.proxy.forward.public import PublicPaths, PublicSide
from kvproxy.proxy.forward.relay import DisconnectWatcher, EditsAnswers, new_arming
from kvproxy.proxy.forward.request_body import RequestBody, Uploads
from kvproxy.proxy.placement import POLICY_HEADER, chosen_policy
from kvproxy.proxy.request.body import LONG_BYTES, ClientLeft
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.error_reply import LocalReply, error_event, refuse
from kvproxy.proxy.request.exchange import QUEUE_FULL, SCOPE_KEY, Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.settings import ServingSettings


@dataclass(frozen=True, slots=True)
class RouterParts:
    """Parts of the router, put together by the application."""

    routes: ResolvesRoutes
    forwarder: Forwarder
    models: ModelList
    headers: RequestHeaders
    metrics: RouteMetrics
    public: PublicSide
    guard: BodySanitizer
    uploads: Uploads
    debug_header: bytes
    trust_clients: bool = False
    offers_policies: bool = False  # some cluster lets clients choose
    observers: Sequence[RequestObserver] = ()


def build(inner: ASGIApp, settings: RouterSettings, context: FilterContext) -> RouterFilter:
    """Return the router for these settings; `inner` is never called, since the router answers everything."""
    config = context.config
    services = context.services
    metrics = context.metrics
    retry = config.retry
    request_id = next((spec.settings for spec in config.filters if spec.name == "request_id"), None)
    id_header = request_id.header if isinstance(request_id, RequestIdSettings) else RequestIdSettings().header
    headers = RequestHeaders(
        request_id_header=id_header.lower().encode(), dropped=[POLICY_HEADER], own=_preference_headers(config)
    )
    models = ModelList(
        tuple(services.clusters.values()),
        config.routes,
        pool=services.pool,
        metrics=metrics,
        clock=context.clock,
        via=headers.via,
    )
    budget = RetryBudget(share=retry.budget, min_per_second=retry.min_per_second)
    context.budgets["router"] = budget
    served = ServedModels(models.names, clock=context.clock, change=models.has_adapters)
    context.lifetimes.append(served)
    return RouterFilter(
        RouterParts(
            routes=services.routes,
            forwarder=_build_forwarder(settings, context, budget),
            models=models,
            headers=headers,
            metrics=RouteMetrics(metrics, clusters=services.clusters, routes=config.routes, served=served.serves),
            public=PublicSide(
                PublicPaths(settings.paths, prefixes=[route.prefix for route in config.routes]),
                health_path=settings.health_path,
                clusters=services.clusters,
                metrics=metrics,
                clock=context.clock,
            ),
            guard=BodySanitizer(),
            uploads=Uploads(
                limit_bytes=config.limits.body,
                timeout_s=config.limits.body_timeout,
                held=services.bodies,
                max_streams=config.pool.max_connections // 2,
            ),
            debug_header=settings.debug_header.lower().encode(),
            trust_clients=settings.trust_clients,
            offers_policies=any(one.client_policies for one in config.clusters.values()),
            observers=context.observers,
        )
    )


def _build_forwarder(settings: RouterSettings, context: FilterContext, budget: RetryBudget) -> Forwarder:
    config = context.config
    services = context.services
    return Forwarder(
        pool=services.pool,
        timeouts=Timeouts(config.timeouts.connect, config.timeouts.first_byte, config.timeouts.idle),
        retry=config.retry,
        budget=budget,
        metrics=context.metrics,
        clock=context.clock,
        rng=context.rng,
        editor=_find_editor(settings, context.metrics),
        legs=_find_legs(services.clusters, config),
        hedges=_find_hedges(services.clusters, context),
    )


def _find_legs(clusters: Mapping[str, Cluster], config: ServingSettings) -> dict[str, SplitsRequests]:
    """Return the clusters whose requests a feature may send in legs."""
    found = {}
    for name, cluster in clusters.items():
        for feature in installed(ProxyFeature):
            if (legs := feature.split_requests(cluster, config.clusters[name])) is not None:
                found[name] = legs
    return found


def _find_hedges(clusters: Mapping[str, Cluster], context: FilterContext) -> dict[str, HedgesRequests]:
    """Return the clusters whose requests a feature may send twice."""
    found = {}
    for name, cluster in clusters.items():
        settings = context.config.clusters[name]
        for feature in installed(ProxyFeature):
            hedges = feature.hedge_requests(cluster, settings, metrics=context.metrics, clock=context.clock)
            if hedges is not None:
                found[name] = hedges
    return found


def _find_editor(settings: RouterSettings, metrics: Metrics) -> EditsAnswers | None:
    found = (feature.edit_answers(settings, metrics) for feature in installed(ProxyFeature))
    return next((editor for editor in found if editor is not None), None)


def _preference_headers(config: ServingSettings) -> list[bytes]:
    """Return the headers that `kvcache` filters add for engines."""
    settings = [spec.settings for spec in config.filters if isinstance(spec.settings, KvCacheSettings)]
    return [one.preference_header.lower().encode() for one in settings if one.preference_header]


class RouterFilter:
    """Terminal ASGI app of the chain."""

    reads_state = False

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts
        self._clock = parts.forwarder.clock
        self._observers = (parts.metrics, *parts.observers)
        self._hooks = frozenset[str]().union(*(observer.hooks for observer in self._observers))
        routed = parts.public.exact - model_list.ADAPTER_PATHS
        self._routed_paths = frozenset(path for path in routed if not path.startswith(model_list.PATH))
        self._arming = new_arming()
        self._pace = asyncio.Lock()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        if scope["type"] != "http":
            return _nothing()
        exchange: Exchange = scope.get(SCOPE_KEY) or Exchange.of(scope, now=self._clock())
        return self.serve_request(exchange, Downstream.of(exchange, scope, receive, send))

    def serve_request(self, exchange: Exchange, downstream: Downstream) -> Coroutine[Any, Any, None]:
        """Answer right behind steps, whose state of the request this is."""
        if downstream.scope["path"] in self._routed_paths:
            # returned as it is: a coroutine around it would be resumed with it
            return self._route(exchange, downstream)
        return self._answer(exchange, downstream)

    async def _answer(self, exchange: Exchange, downstream: Downstream) -> None:
        """Answer a rare path: a page of the proxy's own, the models, or routed after all."""
        parts = self._parts
        scope = downstream.scope
        path: str = scope["path"]
        if path not in parts.public.exact and await parts.public.answered(scope, downstream.send):
            parts.metrics.observe_end(exchange)
            notify(RequestObserver.finished, exchange, self._clock())
        elif path.startswith(model_list.PATH) and model_list.is_asked_for(scope):
            await self._list_models(scope, downstream)
        else:
            await self._route(exchange, downstream)
            if path in model_list.ADAPTER_PATHS:
                parts.models.forget()

    async def _route(self, exchange: Exchange, downstream: Downstream) -> None:
        """Forward the request, or answers in place of an engine."""
        parts = self._parts
        scope = downstream.scope
        streamed = None
        exchange.observers += self._observers
        exchange.hooks |= self._hooks
        exchange.trusted = exchange.trusted or parts.trust_clients
        if "received" in exchange.hooks:
            notify(RequestObserver.received, exchange, self._clock())
        watcher = DisconnectWatcher(scope.get(CONNECTION), downstream.receive, self._arming)
        try:
            target = self._target(exchange, scope)
            if exchange.body is None:
                body = streamed = RequestBody.of(downstream.receive, scope["headers"], uploads=parts.uploads)
            else:
                body = RequestBody(downstream.receive, parts.uploads, exchange.body)
            request_id = exchange.upstream_id or exchange.request_id
            head = parts.headers.build_head(scope, request_id=request_id, trusted=exchange.trusted)
            forwarding = make_forwarding(
                parts.forwarder,
                exchange,
                cluster=target.cluster,
                model=target.upstream_model or (exchange.inference.model if exchange.inference else ""),
                head=head,
                body=body,
                downstream=downstream,
                debug=exchange.debug or (exchange.may_debug and parts.debug_header in head.repeated.sent),
            )
            whole = body.whole
            if whole is not None and len(whole) > LONG_BYTES:
                await asyncio.sleep(0)
            if whole is None or target.upstream_model or not parts.guard.passes(whole, exchange):
                await self._make_ready(body, exchange, target, scope["headers"])
            connection = downstream.connection
            task = asyncio.current_task(None if connection is None else connection.loop)
            if body.consumed:
                watcher.arm(task)
            else:
                body.on_consumed = functools.partial(watcher.arm, task)
            await forwarding.run(task)
        except (GaveUp, LocalReply, QueueFull, UnsafeRequest) as error:
            await self._fail(exchange, error, downstream)
        except ClientLeft:
            exchange.outcome.client_left()
        except asyncio.CancelledError:
            exchange.outcome.client_left()
            if not watcher.caused_cancellation():
                raise
        finally:
            if downstream.connection is None or not downstream.complete:  # no disconnect will be reported any more
                watcher.disarm()
            if streamed is not None:
                streamed.release_bytes()
            notify(RequestObserver.finished, exchange, self._clock())

    def _target(self, exchange: Exchange, scope: Scope) -> RouteTarget:
        """Where the request goes. Raises LocalReply where there is no such place, or not by the policy asked for."""
        parts = self._parts
        model = exchange.inference.model if exchange.inference else ""
        target = parts.routes.resolve(scope["path"], model)
        if target is None:
            if model:
                raise LocalReply(404, "unknown_model", f"The model `{model[:200]}` does not exist.")
            raise LocalReply(404, "no_route", "No route leads there.")
        exchange.outcome.cluster = target.cluster.name
        exchange.addition = target.cluster.addition
        if parts.offers_policies:
            exchange.policy = chosen_policy(scope["headers"], target.cluster)
        return target

    async def _make_ready(self, body: RequestBody, exchange: Exchange, target: RouteTarget, received: Headers) -> None:
        """Prepare the body for engines: without forbidden fields, salted, and with their name for the model."""
        guard = self._parts.guard
        if not body.consumed:
            await body.read_beginning(whole=lambda start: guard.looks_at(start, exchange, received))
        whole = body.whole
        if whole is None:
            return
        if not guard.passes(whole, exchange):
            body.whole = whole = await guard.checked(whole, exchange, received)
        if target.upstream_model:
            named = exchange.inference.model if exchange.inference else ""
            body.whole = await with_model(whole, target.upstream_model, named=named, pace=self._pace)

    async def _list_models(self, scope: Scope, downstream: Downstream) -> None:
        try:
            self._parts.headers.check_loop(next((value for name, value in scope["headers"] if name == b"via"), None))
        except LocalReply as why:
            await self._refuse(why, downstream)
        else:
            await self._parts.models.answer(scope, downstream.send)

    async def _fail(
        self, exchange: Exchange, error: GaveUp | LocalReply | QueueFull | UnsafeRequest, downstream: Downstream
    ) -> None:
        """Answer a request that no engine answered."""
        if isinstance(error, GaveUp):
            await self._give_up(exchange, error, downstream)
        elif isinstance(error, QueueFull):
            await self._refuse_full(_queue_full(error), exchange, downstream)
        elif isinstance(error, UnsafeRequest):
            message = f"This request cannot be forwarded safely: {error}"
            await self._refuse(LocalReply(400, "unsafe_request", message), downstream)
        elif exchange.outcome.status or downstream.status:
            # An engine's answer has begun already, so it can only be cut.
            exchange.outcome.end = "local_reply"
        else:
            await self._refuse(error, downstream)

    async def _give_up(self, exchange: Exchange, error: GaveUp, downstream: Downstream) -> None:
        """Send an engine's own error answer if there is one, else ours."""
        why = error.why
        if downstream.status:
            await self._end_stream(exchange, error, downstream)
        elif isinstance(why, HeldReply):
            exchange.outcome.status = why.status
            exchange.outcome.end = "completed"
            why.endpoint.metrics.count_request(why.status)
            await downstream.start(why.status, why.headers, why.body, more=False)
        else:
            await self._refuse(reply_of(why, error.cluster, exchange.outcome.endpoint, self._clock()), downstream)

    async def _end_stream(self, exchange: Exchange, error: GaveUp, downstream: Downstream) -> None:
        """Send the failure as an event: the client has the head of a stream already, and nothing came behind it."""
        why = error.why
        kind = exchange.inference.kind if exchange.inference else None
        exchange.outcome.status = downstream.status
        exchange.outcome.end = "upstream_died"
        if exchange.breaks_off:
            return
        if not isinstance(why, HeldReply):
            reply = reply_of(why, error.cluster, exchange.outcome.endpoint, self._clock())
            event = error_event(kind, message=str(reply), reason=reply.reason)
        elif why.status == downstream.status:
            event = why.body  # an error event of the engine's own
        else:
            event = error_event(kind, message=f"The engine answered {why.status}.", reason=f"status_{why.status}")
        await downstream.write(event, more=False)

    async def _refuse_full(self, why: LocalReply, exchange: Exchange, downstream: Downstream) -> None:
        """Refuse a request that waited, by an event if it got comments meanwhile."""
        if not downstream.status:
            await self._refuse(why, downstream)
            return
        outcome = exchange.outcome
        outcome.status = downstream.status
        outcome.end = "local_reply"
        outcome.local_reason = why.reason
        kind = exchange.inference.kind if exchange.inference else None
        await downstream.write(error_event(kind, message=str(why), reason=why.reason), more=False)

    async def _refuse(self, why: LocalReply, downstream: Downstream) -> None:
        metrics = self._parts.metrics.catalog
        await refuse(why, downstream.scope, downstream.receive, downstream.send, metrics=metrics)


async def _nothing() -> None:
    """Answer a scope of another type than http."""


def _queue_full(error: QueueFull) -> LocalReply:
    after = (b"retry-after", b"%d" % math.ceil(error.retry_after_s))
    return LocalReply(429, QUEUE_FULL, "Too many requests are waiting; try again later.", headers=[after])


_HOW = {
    "connect_error": "no connection",
    "connect_timeout": "no connection in time",
    "first_byte_timeout": "no answer in time",
    "idle_timeout": "fell silent",
    "unhealthy": "became unhealthy",
    "upstream_disconnected": "closed the connection",
    "protocol_error": "sent no valid HTTP",
    "pool_full": "every connection is busy",
    "no_file_descriptors": "the proxy has no file descriptor left",
}
_REFUSED = {404: "No engine serves this model.", 503: "No engine can take this request now."}


def reply_of(why: UpstreamError | Refusal, cluster: Cluster, endpoint: EndpointId | None, now: float) -> LocalReply:
    """404 for a model that none serves, 503 for no endpoint or a full one, 504 for an engine too slow, 502 for a broken
    one. `endpoint` is the one that was tried last. Endpoint ids only: addresses and credentials are no client's
    business."""
    status = _status_of(why)
    headers = [(b"retry-after", b"1")] if status == 503 else []
    if isinstance(why, Refusal):
        return LocalReply(status, why.value, _REFUSED[status], headers=headers)
    if endpoint is not None:
        headers.append((b"x-kvproxy-endpoint", endpoint.encode()))
    return LocalReply(status, why.reason, _describe_failure(why, cluster, endpoint, now), headers=headers)


def _status_of(why: UpstreamError | Refusal) -> int:
    if isinstance(why, Refusal):
        return 404 if why is Refusal.MODEL_NOT_SERVED else 503
    if isinstance(why, FirstByteTimeout | IdleTimeout | EndpointUnhealthy):
        return 504
    return 503 if isinstance(why, PoolFull) else 502


def _describe_failure(why: UpstreamError, cluster: Cluster, endpoint: EndpointId | None, now: float) -> str:
    how = _HOW.get(why.reason, why.reason.replace("_", " "))
    if isinstance(why.__cause__, ConnectionRefusedError):
        how = "connection refused"
    conditions = [one.condition(now) for one in cluster.endpoints]
    down = sum(one in DOWN for one in conditions)
    return f"No engine answered: {endpoint or 'none'} {how} ({down} of {len(conditions)} down)."
