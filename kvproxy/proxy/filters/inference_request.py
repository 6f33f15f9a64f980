"""Filter `inference_request`: reads the body of an inference request once and parses what routing needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.types import ASGIApp

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Headers, RequestKind
from kvproxy.cache.metrics import IndexMetrics
from kvproxy.proxy.filter_settings import InferenceRequestSettings
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.forward.body_guard import is_examined
from kvproxy.proxy.metrics import ClientCounts
from kvproxy.proxy.request.body import LONG_BYTES, BodyReader
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import decode_body, scan_body
from kvproxy.proxy.request.repeats import CHATS, MIN_BYTES, EarlierBodies
from kvproxy.proxy.request.session import NO_CALLER, Caller, SessionHeaders

KIND_OF_PATH = {
    "/v1/chat/completions": RequestKind.CHAT,
    "/v1/completions": RequestKind.COMPLETION,
    "/v1/responses": RequestKind.RESPONSES,
    "/v1/embeddings": RequestKind.EMBEDDINGS,
    "/v1/messages": RequestKind.MESSAGES,
}


class InferenceRequestFilter(Step):
    """Filter that puts the raw body and the parsed `InferenceRequest` into the exchange of every inference request.

    Inner apps receive the body again, unchanged. A body over the limit gets 413, one that does not arrive in time 408;
    with too much held for others 503. A body that cannot be parsed goes on without an `InferenceRequest`. Other paths
    and methods pass unread."""

    def __init__(
        self, app: ASGIApp, *, session_header: str, reader: BodyReader, metrics: Metrics, clock: Clock
    ) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._session_headers = SessionHeaders(session_header)
        self._reader = reader
        self._pace = asyncio.Lock()
        self.earlier = EarlierBodies()
        self._clients = ClientCounts(metrics)

    def before(self, exchange: Exchange, downstream: Downstream) -> Awaitable[None] | None:
        """Wait only for a body that has not arrived yet, or where others have their turn because it is long."""
        scope = downstream.scope
        kind = KIND_OF_PATH.get(scope["path"]) if scope["method"] == "POST" else None
        if kind is None:
            return None
        length, encoded, caller = self._headers(scope["headers"])
        body = downstream.take_body()
        if body is None:
            self._reader.check_length(length)
            return self._read(exchange, downstream, None if encoded else kind, caller)
        self._reader.accept_body(body)
        return self._parse(exchange, downstream, body, None if encoded else kind, caller)

    async def _read(self, exchange: Exchange, downstream: Downstream, kind: RequestKind | None, caller: Caller) -> None:
        body = await self._reader.read(downstream.receive)
        waits = self._parse(exchange, downstream, body, kind, caller)
        if waits is not None:
            await waits

    def _parse(
        self, exchange: Exchange, downstream: Downstream, body: bytes, kind: RequestKind | None, caller: Caller
    ) -> Awaitable[None] | None:
        exchange.body = body
        exchange.held_bytes += len(body)
        exchange.release = self._reader.release
        downstream.replayed = body
        if kind is None:
            return None
        if len(body) >= MIN_BYTES and kind in CHATS:
            inference, exchange.repeats = self.earlier.decode(kind, body, caller)
        else:
            inference = decode_body(kind, body, caller)
        exchange.inference = inference
        if inference is None:
            return self._scan(exchange, kind, body, caller)
        self._clients.count_request(inference)
        if inference.request_id:
            _take_id(exchange, inference.request_id)
        return asyncio.sleep(0) if len(body) > LONG_BYTES else None

    async def _scan(self, exchange: Exchange, kind: RequestKind, body: bytes, caller: Caller) -> None:
        exchange.inference, exchange.members = await scan_body(kind, body, caller, pace=self._pace, also=is_examined)
        if exchange.inference is not None:
            self._clients.count_request(exchange.inference)
            _take_id(exchange, exchange.inference.request_id)

    def _headers(self, headers: Headers) -> tuple[int, bool, Caller]:
        """Return the declared length (0 without one), whether the body is compressed, and the caller."""
        sent = dict(headers)
        names = self._session_headers.names
        length = sent.get(b"content-length", b"")
        coding = sent.get(b"content-encoding", b"")
        caller = NO_CALLER
        if not names.isdisjoint(sent):
            caller = self._session_headers.read({name: sent[name] for name in names & sent.keys()})
        length_bytes = int(length) if length.isdigit() and len(length) < 20 else 0
        return length_bytes, coding.strip().lower() not in (b"", b"identity"), caller


def _take_id(exchange: Exchange, request_id: str) -> None:
    """Give a request the id in its body, if it has one."""
    if request_id and exchange.names_itself:
        exchange.request_id = request_id


def build(app: ASGIApp, settings: InferenceRequestSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`."""
    made = InferenceRequestFilter(
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
    held = context.metrics.group(IndexMetrics).index_bytes.labels("earlier_bodies")
    context.on_serving.append(lambda: held.set_function(lambda: made.earlier.held_bytes))
    return made
