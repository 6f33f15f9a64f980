"""Filter `inference_request`: reads the body of an inference request once and parses what routing needs."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.config.filter_schema import InferenceRequestSettings
from kvproxy.filters.chain import FilterContext
from kvproxy.forward.body_guard import is_guarded
from kvproxy.metrics.catalog import Metrics
from kvproxy.request.body_bounds import BodyRefused, BodyTooLarge, refuse_body
from kvproxy.request.body_reader import BodyReader, ClientLeft, replay
from kvproxy.request.exchange import SCOPE_KEY, Exchange
from kvproxy.request.parse import decode_body, scan_body
from kvproxy.types import Clock, RequestKind

KIND_OF_PATH = {
    "/v1/chat/completions": RequestKind.CHAT,
    "/v1/completions": RequestKind.COMPLETION,
    "/v1/responses": RequestKind.RESPONSES,
    "/v1/embeddings": RequestKind.EMBEDDINGS,
    "/v1/messages": RequestKind.MESSAGES,
}

_CLIENT_CLOSED_REQUEST = 499  # never sent: it stands in logs and metrics


class InferenceRequestFilter:
    """Puts the raw body and the parsed `InferenceRequest` into the exchange of every request it knows.

    Inner apps receive the body again, unchanged. A body over the limit gets 413, one that does not arrive in time 408;
    with too much held for others 503. A body that cannot be parsed goes on without an `InferenceRequest`. Other paths
    and methods pass unread.
    """

    def __init__(
        self, app: ASGIApp, *, session_header: str, reader: BodyReader, metrics: Metrics, clock: Clock
    ) -> None:
        self._app = app
        self._session_header = session_header.lower().encode()
        self._reader = reader
        self._metrics = metrics
        self._clock = clock
        self._pace = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = KIND_OF_PATH.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if kind is None:
            await self._app(scope, receive, send)
            return
        exchange = scope.get(SCOPE_KEY) or Exchange.of(scope, now=self._clock())
        length, encoded, session = self._headers(scope)
        try:
            if length > self._reader.limit_bytes:
                raise BodyTooLarge(self._reader.limit_bytes)
            body = await self._reader.read(receive)
        except ClientLeft:
            exchange.outcome.end = "client_disconnected"
            exchange.outcome.status = _CLIENT_CLOSED_REQUEST
            return
        except BodyRefused as error:
            await refuse_body(error, scope, receive, send, metrics=self._metrics)
            return
        try:
            exchange.body = body
            if not encoded:
                exchange.inference = decode_body(kind, body, session)
                if exchange.inference is None:
                    exchange.inference, exchange.members = await scan_body(
                        kind, body, session, pace=self._pace, also=is_guarded
                    )
            await self._app(scope, replay(body, receive), send)
        finally:
            self._reader.release(body)

    def _headers(self, scope: Scope) -> tuple[int, bool, str]:
        """Declared length (0 when it says none), whether the body is compressed, and the session header."""
        length, encoded, session = 0, False, ""
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = int(value) if value.isdigit() and len(value) < 20 else 0
            elif name == b"content-encoding":
                encoded = value.strip().lower() not in (b"", b"identity")
            elif name == self._session_header:
                session = value.decode("latin-1").strip()
        return length, encoded, session


def build(app: ASGIApp, settings: InferenceRequestSettings, context: FilterContext) -> ASGIApp:
    """The filter around `app`."""
    return InferenceRequestFilter(
        app,
        session_header=settings.session_header,
        reader=BodyReader(
            limit_bytes=context.config.limits.body,
            timeout_s=context.config.limits.body_timeout,
            held=context.services.bodies,
        ),
        metrics=context.metrics,
        clock=context.clock,
    )
