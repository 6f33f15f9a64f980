"""Filter `stored_responses`: puts the history of a request in front of its input, and keeps the answer."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Raw
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Headers
from kvproxy.features.stored_responses.metrics import StoredResponsesMetrics
from kvproxy.features.stored_responses.settings import StoredResponsesSettings
from kvproxy.features.stored_responses.store import MAX_ENTRY_BYTES, ResponseStore, StoredResponse, key_of
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.forward.body_guard import is_examined
from kvproxy.proxy.request.body import BodyReader
from kvproxy.proxy.request.error_reply import LocalReply, refuse
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import decode_body, scan_body
from kvproxy.proxy.request.session import NO_CALLER

#: Of an answer, or of one event: more is not kept.
MAX_BYTES = 4 * 1024 * 1024
#: The events with a whole response; it is the last member of each.
_LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete")


class Response(msgspec.Struct):
    """Its members that matter here."""

    id: str
    output: list[Raw] = []


class _Item(msgspec.Struct):
    type: str = ""


class _Event(msgspec.Struct):
    response: Raw


_decode_response = msgspec.json.Decoder(Response).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_item = msgspec.json.Decoder(_Item).decode


class AnswerReader:
    """Takes an answer piece by piece; `whole` is the response once it is there."""

    def __init__(self) -> None:
        self.whole: bytes | None = None
        self.too_large = False
        self._streamed: bool | None = None  # None: an answer that is not kept
        self._rest = b""

    def begin(self, status: int, headers: Headers) -> None:
        """Take the head."""
        sent = dict(headers)
        if status == 200 and b"content-encoding" not in sent:
            kind = sent.get(b"content-type", b"").partition(b";")[0].strip()
            self._streamed = {b"application/json": False, b"text/event-stream": True}.get(kind)

    def add(self, piece: bytes, *, last: bool) -> None:
        """Take the next piece."""
        if self._streamed is None:
            return
        rest = self._rest + piece
        if self._streamed:
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if event.startswith(_LAST_EVENTS):
                    self.whole = _response_of(event)
        elif last:
            self.whole, rest = rest, b""
        if len(rest) > MAX_BYTES:
            self._streamed = None
            self.too_large = True
            rest = b""
        self._rest = rest


def _response_of(event: bytes) -> bytes | None:
    data = event.partition(b"\ndata:")[2]
    try:
        return bytes(_decode_event(data).response)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_response(whole: bytes) -> Response | None:
    """Return the response without its reasoning, which is no part of the next prompt; None: it cannot be read."""
    try:
        response = _decode_response(whole)
        response.output = [one for one in response.output if _decode_item(one).type != "reasoning"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return response if response.id else None


log = logging.getLogger("kvproxy.stored_responses")

PATH = "/v1/responses"
_STORED = re.compile(rf"{PATH}/([\w-]{{1,128}})")
_PREVIOUS = "previous_response_id"
_JSON = (b"content-type", b"application/json")

_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode


class _Asked(msgspec.Struct):
    """A request for a response, with all that leads to it."""

    previous: str | None
    members: dict[str, Raw]
    items: list[Raw]
    keeps: bool
    engine_keeps: bool = False


class StoredResponsesFilter:
    """Between `inference_request` and `kvcache`: what follows sees the request with its whole history, which any engine
    can answer. A history that is not here is the engine's: such requests pass as they are."""

    def __init__(
        self, app: ASGIApp, *, store: ResponseStore, reader: BodyReader, metrics: Metrics, clock: Clock
    ) -> None:
        self._app = app
        self._store = store
        self._reader = reader
        self._metrics = metrics
        self._counts = metrics.group(StoredResponsesMetrics)
        self._clock = clock
        self._pace = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PATH):
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope, now=self._clock())
        named = _STORED.fullmatch(scope["path"])
        if named is not None and scope["method"] in ("GET", "DELETE") and not scope["query_string"]:
            key = key_of(exchange.tenant, named[1])
            body = await (self._show(key) if scope["method"] == "GET" else self._delete(key, named[1]))
            if body is not None:
                await send({"type": "http.response.start", "status": 200, "headers": [_JSON, _length(body)]})
                await send({"type": "http.response.body", "body": body})
                return
        asked = self._read(exchange) if scope["method"] == "POST" and scope["path"] == PATH else None
        if asked is None:
            await self._app(scope, receive, send)
            return
        try:
            scope = await self._with_history(exchange, asked, scope)
        except LocalReply as why:
            await refuse(why, scope, receive, send, metrics=self._metrics)
            return
        await self._app(scope, receive, self._keeping(exchange.tenant, asked, send) if asked.keeps else send)

    def _read(self, exchange: Exchange) -> _Asked | None:
        """Return what is asked; None: it passes as it is."""
        if exchange.inference is None or exchange.body is None or len(exchange.body) > MAX_ENTRY_BYTES:
            return None
        try:
            members = _decode_members(exchange.body)
            previous = _scalar(members, _PREVIOUS)
            if _scalar(members, "conversation") or "input" not in members:
                return None
            is_listed = bytes(members["input"]).lstrip().startswith(b"[")
            in_background = bool(_scalar(members, "background"))  # its client asks the engine for the answer later
            return _Asked(
                previous if isinstance(previous, str) else None,
                members,
                _decode_items(members["input"]) if is_listed else [_as_item(members["input"])],
                keeps=_scalar(members, "store") is not False and not in_background,
                engine_keeps=in_background,
            )
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    async def _with_history(self, exchange: Exchange, asked: _Asked, scope: Scope) -> Scope:
        """Put the history into the request; returns its scope. Raises LocalReply where it is too long."""
        if asked.previous is not None:
            earlier = await self._find(key_of(exchange.tenant, asked.previous))
            if earlier is None:
                asked.keeps = False  # its beginning is not here
                return scope
            asked.items = [*earlier.items, *asked.items]
        elif not asked.keeps:
            return scope
        # A text becomes an item here already, so that the next turn begins with the same bytes. What an engine kept
        # itself, it would give to any tenant.
        members = {**asked.members, "input": asked.items}
        members.pop(_PREVIOUS, None)
        body = msgspec.json.encode(members if asked.engine_keeps else {**members, "store": False})
        await self._replace_body(exchange, body)
        headers = [_length(body) if name == b"content-length" else (name, value) for name, value in scope["headers"]]
        return {**scope, "headers": headers}

    async def _replace_body(self, exchange: Exchange, body: bytes) -> None:
        """Put another body in place of the request's. Raises LocalReply for one over the limits."""
        request = exchange.inference
        assert request is not None
        self._reader.accept_body(body)
        exchange.held_bytes += len(body)
        exchange.release = self._reader.release
        exchange.body = body
        exchange.members = exchange.names = exchange.repeats = None
        parsed = decode_body(request.kind, body, NO_CALLER)
        if parsed is None:
            parsed, exchange.members = await scan_body(request.kind, body, NO_CALLER, pace=self._pace, also=is_examined)
        assert parsed is not None  # members of one that was parsed
        exchange.inference = msgspec.structs.replace(request, prompt=parsed.prompt, continues=None)

    def _keeping(self, tenant: str, asked: _Asked, send: Send) -> Send:
        """Return a `send` that keeps the answer before its end goes out, so that the client finds it."""
        reader = AnswerReader()

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                reader.begin(message["status"], message.get("headers", []))
            elif message["type"] == "http.response.body":
                reader.add(message.get("body", b""), last=not message.get("more_body", False))
                if reader.whole is not None:
                    whole, reader.whole = reader.whole, None
                    await self._keep(tenant, asked, whole)
                elif reader.too_large:
                    reader.too_large = False
                    self._counts.answers.labels("too_large").inc()
            await send(message)

        return send_on

    async def _keep(self, tenant: str, asked: _Asked, whole: bytes) -> None:
        response = read_response(whole)
        if response is None:
            self._counts.answers.labels("unreadable").inc()
            return
        kept = StoredResponse([*asked.items, *response.output], Raw(whole))
        try:
            stored = await self._store.put(key_of(tenant, response.id), kept)
        except OSError as error:
            log.warning("[stored_responses] an answer is not kept: %s", error)
            self._counts.answers.labels("failed").inc()
        else:
            self._counts.answers.labels("stored" if stored else "too_large").inc()

    async def _find(self, key: str) -> StoredResponse | None:
        try:
            found = await self._store.get(key)
        except OSError as error:
            log.warning("[stored_responses] an answer cannot be read: %s", error)
            self._counts.lookups.labels("failed").inc()
            return None
        self._counts.lookups.labels("missing" if found is None else "found").inc()
        return found

    async def _show(self, key: str) -> bytes | None:
        found = await self._find(key)
        return None if found is None else bytes(found.response)

    async def _delete(self, key: str, name: str) -> bytes | None:
        try:
            removed = await self._store.remove(key)
        except OSError as error:
            log.warning("[stored_responses] an answer cannot be deleted: %s", error)
            return None
        return msgspec.json.encode({"id": name, "object": "response", "deleted": True}) if removed else None


def _scalar(members: Mapping[str, Raw], name: str) -> object:
    return msgspec.json.decode(members[name]) if name in members else None


def _as_item(text: Raw) -> Raw:
    return Raw(b'{"type":"message","role":"user","content":' + bytes(text) + b"}")


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % len(body)


def build(app: ASGIApp, settings: StoredResponsesSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`."""
    limits = context.config.limits
    return StoredResponsesFilter(
        app,
        store=ResponseStore(Path(settings.path), max_bytes=settings.max_bytes),
        reader=BodyReader(limit_bytes=limits.body, timeout_s=limits.body_timeout, held=context.services.bodies),
        metrics=context.metrics,
        clock=context.clock,
    )
