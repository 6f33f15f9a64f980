"""The last filter: finds the cluster, forwards, and turns errors into local replies (the only filter that does)."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.cluster.pick import Refusal
from kvproxy.cluster.router_queue import QueueFull
from kvproxy.cluster.routes import Routes, RouteTarget
from kvproxy.config.filter_schema import RequestIdSettings, RouterSettings
from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.config.schema import Config
from kvproxy.errors import UnsafeRequest
from kvproxy.filters.chain import FilterContext
from kvproxy.forward import models as model_list
from kvproxy.forward.alias import with_model
from kvproxy.forward.body_guard import BodyGuard
from kvproxy.forward.disconnect import DisconnectWatcher, new_arming
from kvproxy.forward.forwarder import CLIENT_CLOSED_REQUEST, Forwarder, Forwarding, GaveUp, HeldReply, local_status
from kvproxy.forward.headers import RequestHeaders, RequestLoops
from kvproxy.forward.metrics import RouteMetrics
from kvproxy.forward.models import ModelList
from kvproxy.forward.policy_choice import NotOffered, chosen_policy
from kvproxy.forward.public_pages import PublicSide
from kvproxy.forward.public_paths import PublicPaths
from kvproxy.forward.request_body import RequestBody, Uploads
from kvproxy.forward.served_models import ServedModels
from kvproxy.request.body_bounds import BodyRefused, refuse_body
from kvproxy.request.body_reader import ClientLeft
from kvproxy.request.error_reply import local_reply
from kvproxy.request.exchange import SCOPE_KEY, Exchange
from kvproxy.request.observer import RequestObserver, notify
from kvproxy.resilience.budget import RetryBudget
from kvproxy.types import Headers
from kvproxy.upstream.pool import Timeouts

_MESSAGES = {
    404: "No engine serves this model.",
    502: "The engine failed before it answered.",
    503: "No engine can take this request now.",
    504: "The engine did not answer in time.",
}


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What the router is made of; put together by the application."""

    routes: Routes
    forwarder: Forwarder
    models: ModelList
    headers: RequestHeaders
    metrics: RouteMetrics
    public: PublicSide
    guard: BodyGuard
    uploads: Uploads
    debug_header: bytes
    trust_clients: bool = False
    policy_header: bytes = b""  # b"": no cluster lets clients choose
    observers: Sequence[RequestObserver] = ()


def build(inner: ASGIApp, settings: RouterSettings, context: FilterContext) -> RouterFilter:
    """The router for these settings; `inner` is never called, since the router answers everything."""
    config, services, metrics = context.config, context.services, context.metrics
    retry = config.retry
    request_id = next((spec.settings for spec in config.filters if spec.name == "request_id"), None)
    policy_header = settings.policy_header.lower().encode()
    id_header = request_id.header if isinstance(request_id, RequestIdSettings) else RequestIdSettings().header
    headers = RequestHeaders(
        request_id_header=id_header.lower().encode(), dropped=[policy_header], own=_preference_headers(config)
    )
    models = ModelList(
        tuple(services.clusters.values()),
        config.routes,
        pool=services.pool,
        metrics=metrics,
        clock=context.clock,
        via=headers.via,
    )
    served = ServedModels(models.names, clock=context.clock)
    context.lifetimes.append(served)
    return RouterFilter(
        RouterParts(
            routes=services.routes,
            forwarder=Forwarder(
                pool=services.pool,
                timeouts=Timeouts(config.timeouts.connect, config.timeouts.first_byte, config.timeouts.idle),
                retry=retry,
                budget=RetryBudget(share=retry.budget, min_per_second=retry.min_per_second),
                metrics=metrics,
                clock=context.clock,
                rng=context.rng,
            ),
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
            guard=BodyGuard(),
            uploads=Uploads(
                limit_bytes=config.limits.body,
                timeout_s=config.limits.body_timeout,
                held=services.bodies,
                max_streams=config.pool.max_connections // 2,
            ),
            debug_header=settings.debug_header.lower().encode(),
            trust_clients=settings.trust_clients,
            policy_header=policy_header if any(one.client_policies for one in config.clusters.values()) else b"",
            observers=context.observers,
        )
    )


def _preference_headers(config: Config) -> list[bytes]:
    """What `kvcache` adds for engines, whatever it is called."""
    settings = [spec.settings for spec in config.filters if isinstance(spec.settings, KvCacheSettings)]
    return [one.preference_header.lower().encode() for one in settings if one.preference_header]


class RouterFilter:
    """Terminal ASGI app of the chain."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts
        self._observers = (parts.metrics, *parts.observers)
        self._arming = new_arming()
        self._pace = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parts = self._parts
        path: str = scope["path"]
        exchange: Exchange = scope.get(SCOPE_KEY) or Exchange.of(scope, now=parts.forwarder.clock())
        if path not in parts.public.exact and await parts.public.answered(scope, send):
            parts.metrics.observe_end(exchange)
            notify(RequestObserver.finished, exchange, parts.forwarder.clock())
            return
        listing = model_list.PATH
        if path.startswith(listing) and scope["method"] == "GET" and path[len(listing) :][:1] in ("", "/"):
            await self._list_models(scope, send)
            return
        if parts.trust_clients:
            exchange.trusted = True
        exchange.observers += self._observers
        notify(RequestObserver.received, exchange, parts.forwarder.clock())
        inference = exchange.inference
        target = parts.routes.resolve(path, inference.model if inference else "")
        try:
            if target is None:
                await self._no_route(exchange, scope, send)
            else:
                exchange.outcome.cluster = target.cluster.name
                if parts.policy_header:
                    exchange.policy = chosen_policy(scope["headers"], parts.policy_header, target.cluster)
                await self._forward(exchange, target, scope, receive, send)
        except (NotOffered, RequestLoops) as error:
            await self._refuse(error, scope, send)
        finally:
            notify(RequestObserver.finished, exchange, parts.forwarder.clock())

    async def _forward(
        self, exchange: Exchange, target: RouteTarget, scope: Scope, receive: Receive, send: Send
    ) -> None:
        parts = self._parts
        received: Headers = scope["headers"]
        headers = parts.headers.build(scope, request_id=exchange.request_id, trusted=exchange.trusted)
        body = RequestBody(receive, received, whole=exchange.body, uploads=parts.uploads)
        query: bytes = scope["query_string"]
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        forwarding = Forwarding(
            parts.forwarder,
            exchange,
            cluster=target.cluster,
            model=target.upstream_model or (exchange.inference.model if exchange.inference else ""),
            method=scope["method"],
            target=raw_path + b"?" + query if query else raw_path,
            headers=headers,
            body=body,
            send=send,
            debug=exchange.debug or (exchange.may_debug and parts.debug_header in [name for name, _ in received]),
        )
        watcher = DisconnectWatcher(scope, receive, self._arming)
        try:
            if not body.consumed:
                await body.begin(whole=lambda start: parts.guard.looks_at(start, exchange, received))
            if body.whole is not None and (target.upstream_model or not parts.guard.passes(body.whole, exchange)):
                body.whole = await self._as_engines_get_it(body.whole, exchange, target, received)
            if body.consumed:
                watcher.arm()
            else:
                body.on_consumed = functools.partial(watcher.arm, asyncio.current_task())
            await forwarding.run()
        except GaveUp as error:
            await self._give_up(exchange, error, scope, send)
        except QueueFull as error:
            await self._queue_full(error, scope, send)
        except UnsafeRequest as error:
            message = f"This request cannot be forwarded safely: {error}"
            metrics = parts.metrics.catalog
            await local_reply(scope, send, status=400, reason="unsafe_request", message=message, metrics=metrics)
        except BodyRefused as error:
            if exchange.outcome.status:  # an engine's answer is on its way already: all that is left is to cut it
                exchange.outcome.end = "local_reply"
            else:
                await refuse_body(error, scope, receive, send, metrics=parts.metrics.catalog)
        except ClientLeft:
            _client_gone(exchange)
        except asyncio.CancelledError:
            _client_gone(exchange)
            if not watcher.claims():
                raise
        finally:
            watcher.disarm()
            body.end()

    async def _as_engines_get_it(
        self, body: bytes, exchange: Exchange, target: RouteTarget, received: Headers
    ) -> bytes:
        """Without what clients may not say, salted, and with the engine's name for the model."""
        body = await self._parts.guard.checked(body, exchange, received)
        if target.upstream_model:
            named = exchange.inference.model if exchange.inference else ""
            body = await with_model(body, target.upstream_model, named=named, pace=self._pace)
        return body

    async def _list_models(self, scope: Scope, send: Send) -> None:
        try:
            self._parts.headers.check_loop(next((value for name, value in scope["headers"] if name == b"via"), None))
        except RequestLoops as error:
            await self._refuse(error, scope, send)
        else:
            await self._parts.models.answer(scope, send)

    async def _refuse(self, why: NotOffered | RequestLoops, scope: Scope, send: Send) -> None:
        status, reason = (508, "loop") if isinstance(why, RequestLoops) else (400, "policy_not_offered")
        metrics = self._parts.metrics.catalog
        await local_reply(scope, send, status=status, reason=reason, message=str(why), metrics=metrics)

    async def _no_route(self, exchange: Exchange, scope: Scope, send: Send) -> None:
        model = exchange.inference.model if exchange.inference else ""
        message = f"The model `{model[:200]}` does not exist." if model else "No route leads there."
        reason = "unknown_model" if model else "no_route"
        metrics = self._parts.metrics.catalog
        await local_reply(scope, send, status=404, reason=reason, message=message, metrics=metrics)

    async def _queue_full(self, error: QueueFull, scope: Scope, send: Send) -> None:
        message = "Too many requests are waiting; try again later."
        after = str(math.ceil(error.retry_after_s)).encode()
        headers = [(b"retry-after", after)]
        metrics = self._parts.metrics.catalog
        await local_reply(
            scope, send, status=429, reason="queue_full", message=message, metrics=metrics, headers=headers
        )

    async def _give_up(self, exchange: Exchange, error: GaveUp, scope: Scope, send: Send) -> None:
        """An engine's own error answer if there is one, else ours."""
        why = error.why
        if isinstance(why, HeldReply):
            exchange.outcome.status, exchange.outcome.end = why.status, "completed"
            why.endpoint.metrics.request(why.status)
            await send({"type": "http.response.start", "status": why.status, "headers": why.headers})
            await send({"type": "http.response.body", "body": why.body})
            return
        status = local_status(why)
        await local_reply(
            scope,
            send,
            status=status,
            reason=why.value if isinstance(why, Refusal) else why.reason,
            message=_MESSAGES[status],
            metrics=self._parts.metrics.catalog,
            headers=[(b"retry-after", b"1")] if status == 503 else None,
        )


def _client_gone(exchange: Exchange) -> None:
    outcome = exchange.outcome
    outcome.end = "client_disconnected"
    outcome.status = outcome.status or CLIENT_CLOSED_REQUEST
