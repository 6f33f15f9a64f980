"""Raw chunks from an engine's response to the client: nothing is parsed on the way, the end is looked at once."""

from __future__ import annotations

from collections import deque

from starlette.types import Send

from kvproxy.errors import EngineReportedError, UpstreamError
from kvproxy.request.exchange import Exchange
from kvproxy.request.sse import error_event, error_status
from kvproxy.request.usage import read_usage
from kvproxy.types import BODY_FOLLOWS, Headers, RequestKind
from kvproxy.upstream.pool import UpstreamResponse

_TAIL_BYTES = 16 * 1024
#: Pieces its last events may come in, however the network cuts them.
_LAST_PIECES = 4
#: Content types of answers that may count tokens.
_TELLING = (b"application/json", b"text/event-stream")


class Relay:
    """Sends one response down. From the first byte on nothing is retried: a break is told, never hidden."""

    __slots__ = ("_exchange", "_first", "_last", "_post", "_response", "_send")

    def __init__(self, exchange: Exchange, response: UpstreamResponse, *, send: Send, post: bool = False) -> None:
        self._exchange = exchange
        self._response = response
        self._send = send
        self._post = post
        self._first = b""
        self._last = deque[bytes](maxlen=_LAST_PIECES)

    async def run(self, headers: Headers, first: bytes) -> UpstreamError | None:
        """The failure that cut the response short; None when it was complete. The client has been told either way."""
        response, send = self._response, self._send
        self._exchange.outcome.status = response.status
        start = {"type": "http.response.start", "status": response.status, "headers": headers, BODY_FOLLOWS: True}
        await send(start)
        chunk = self._first = first
        try:
            while chunk and not response.complete:
                self._last.append(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await response.chunk()
            if chunk:  # complete: what came since the last piece goes with it
                chunk += response.take() or b""
        except UpstreamError as error:
            await self._broken(headers, error)
            return error
        if chunk:
            self._last.append(chunk)
        outcome = self._exchange.outcome
        outcome.end = "completed"
        await send({"type": "http.response.body", "body": chunk, "more_body": False})
        if self._exchange.inference is None:
            if self._post and _may_tell_usage(headers):  # no body hides it
                self._read_usage(self._tail(), None)
            return None
        tail = self._tail()
        if response.status == 200 and (reported := error_status(tail)) is not None:
            if reported >= 500:  # else a client's mistake, found late
                outcome.end = "engine_error"
            return EngineReportedError("the engine ended its stream with an error event", status=reported)
        self._read_usage(tail, self._exchange.inference.kind)
        return None

    def _tail(self) -> bytes:
        *earlier, last = self._last or (b"",)
        return b"".join(earlier)[-_TAIL_BYTES:] + last

    def _read_usage(self, tail: bytes, kind: RequestKind | None) -> None:
        head = self._first if kind in (RequestKind.MESSAGES, None) else b""
        usage = read_usage(tail, head, native=kind is None)
        if usage is not None:
            outcome = self._exchange.outcome
            outcome.prompt_tokens = usage.prompt_tokens
            outcome.cached_tokens = usage.cached_tokens
            outcome.completion_tokens = usage.completion_tokens

    async def _broken(self, headers: Headers, error: UpstreamError) -> None:
        """An event stream ends with an error event; anything else is left incomplete, which cuts the connection."""
        self._exchange.outcome.end = "upstream_died"
        event_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
        )
        if not event_stream or any(name == b"content-length" for name, _ in headers):
            return
        kind = self._exchange.inference.kind if self._exchange.inference else None
        last = self._last[-1] if self._last else b""
        message = "The engine failed in the middle of this response."
        event = error_event(kind, message=message, reason=error.reason, tail=last)
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _may_tell_usage(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(_TELLING) for name, value in headers)
