"""The last filter: finds the cluster, forwards, and turns errors into local replies (the only filter that does)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from kvproxy.cluster.routes import Routes, RouteTarget
from kvproxy.filters import models
from kvproxy.filters.alias import with_model
from kvproxy.filters.disconnect import DisconnectWatcher
from kvproxy.filters.exchange import Exchange
from kvproxy.filters.forward_headers import RequestHeaders
from kvproxy.filters.forwarding import Forwarder, Forwarding, GaveUp, HeldReply, local_status
from kvproxy.filters.local_reply import local_reply
from kvproxy.filters.models import ModelList
from kvproxy.filters.request_body import ClientGone, RequestBody
from kvproxy.filters.route_metrics import RouteMetrics
from kvproxy.types import RequestKind

logger = logging.getLogger("kvproxy.router")

#: nginx's word for it; never on the wire, only in logs and metrics.
_CLIENT_CLOSED_REQUEST = 499
_MESSAGES = {
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
    debug_header: bytes


class RouterFilter:
    """Terminal ASGI app of the chain."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parts = self._parts
        path: str = scope["path"]
        exchange = Exchange.of(scope, now=parts.forwarder.clock())
        if path.startswith(models.PATH) and scope["method"] == "GET" and path[len(models.PATH) :][:1] in ("", "/"):
            await parts.models.answer(path, send)
            return
        inference = exchange.inference
        target = parts.routes.resolve(path, inference.model if inference else "")
        try:
            if target is None:
                await self._no_route(exchange, send)
            else:
                exchange.outcome.cluster = target.cluster.name
                await self._forward(exchange, target, scope, receive, send)
        finally:
            parts.metrics.observe(exchange, parts.forwarder.clock())
            _complete(exchange)

    async def _forward(
        self, exchange: Exchange, target: RouteTarget, scope: Scope, receive: Receive, send: Send
    ) -> None:
        parts = self._parts
        received: Sequence[tuple[bytes, bytes]] = scope["headers"]
        whole = exchange.body
        if whole is not None and target.upstream_model:
            whole = with_model(whole, target.upstream_model)
        body = RequestBody(receive, received, whole=whole)
        query: bytes = scope["query_string"]
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        forwarding = Forwarding(
            parts.forwarder,
            exchange,
            cluster=target.cluster,
            method=scope["method"],
            target=raw_path + b"?" + query if query else raw_path,
            headers=parts.headers.build(scope, request_id=exchange.request_id),
            body=body,
            send=send,
            debug=exchange.debug or any(name == parts.debug_header for name, _ in received),
        )
        watcher = DisconnectWatcher(receive)
        if body.consumed:
            watcher.arm()
        try:
            await forwarding.run()
        except GaveUp as error:
            await self._give_up(exchange, error, send)
        except ClientGone:
            _client_gone(exchange)
        except asyncio.CancelledError:
            _client_gone(exchange)
            if not watcher.claims():
                raise
        finally:
            watcher.disarm()

    async def _no_route(self, exchange: Exchange, send: Send) -> None:
        exchange.outcome.status, exchange.outcome.end = 404, "local_reply"
        model = exchange.inference.model if exchange.inference else ""
        message = f"The model `{model[:200]}` does not exist." if model else "No route leads there."
        reason = "unknown_model" if model else "no_route"
        await local_reply(send, status=404, message=message, reason=reason, metrics=self._parts.metrics.catalog,
                          anthropic=_speaks_anthropic(exchange))  # fmt: skip

    async def _give_up(self, exchange: Exchange, error: GaveUp, send: Send) -> None:
        """An engine's own error answer if there is one, else ours."""
        last = error.last
        outcome = exchange.outcome
        outcome.end = "local_reply"
        if isinstance(last, HeldReply):
            outcome.status, outcome.end = last.status, "completed"
            await send({"type": "http.response.start", "status": last.status, "headers": last.headers})
            await send({"type": "http.response.body", "body": last.body})
            return
        status = outcome.status = local_status(last)
        await local_reply(
            send,
            status=status,
            message=_MESSAGES[status],
            reason="no_endpoint" if last is None else last.reason,
            metrics=self._parts.metrics.catalog,
            anthropic=_speaks_anthropic(exchange),
            headers=[(b"retry-after", b"1")] if status == 503 else [],
        )


def _speaks_anthropic(exchange: Exchange) -> bool:
    return exchange.inference is not None and exchange.inference.kind is RequestKind.MESSAGES


def _client_gone(exchange: Exchange) -> None:
    outcome = exchange.outcome
    outcome.end = "client_disconnected"
    outcome.status = outcome.status or _CLIENT_CLOSED_REQUEST


def _complete(exchange: Exchange) -> None:
    for callback in exchange.on_complete:
        try:
            callback(exchange)
        except Exception:
            logger.exception("a completion callback failed")
