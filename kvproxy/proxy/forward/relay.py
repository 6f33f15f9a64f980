"""Raw pieces from an engine's response to the client, until the end or until the client leaves: nothing is parsed on
the way, the end is looked at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
from starlette.types import Receive

from kvproxy.base.errors import EngineReportedError, UpstreamError
from kvproxy.base.types import ClientConnection, Headers, RequestKind
from kvproxy.base.upstream.pool import UpstreamResponse
from kvproxy.proxy.request.body import SharedTimer
from kvproxy.proxy.request.continuation import Continuation
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.error_reply import error_event
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.usage import ERROR_MARK, calls_tool, error_status, read_response_id, read_usage

#: A longer answer that is to be edited, or event of a stream, is forwarded unchanged.
MAX_HELD_BYTES = 1024 * 1024
#: Bytes examined of an answer's end, in all pieces but the last.
TAIL_BYTES = 16 * 1024
#: Pieces that may hold its last events, wherever the network cuts them.
LAST_PIECES = 4
_NO_PIECES = deque[bytes](maxlen=0)
#: End of an event.
_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
_LAST_EVENTS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")
#: Content types of answers that may count tokens.
_TELLING = (b"application/json", b"text/event-stream")

#: Kinds of requests whose answers may call tools.
_CONVERSATIONS = (RequestKind.CHAT, RequestKind.MESSAGES, RequestKind.RESPONSES)

#: Most unary replies are complete by then and need no watcher (a task waiting on `receive` costs 11 us).
ARM_DELAY_S = 0.02
#: Watchers whose delay has not passed.
Arming = SharedTimer["DisconnectWatcher"]


class AnswerEdit(Protocol):
    """Changes one answer on its way down."""

    #: False: it needs all of the answer.
    streams: bool

    def next_piece(self, piece: bytes) -> bytes:
        """Return what of a stream goes down now: whole events."""
        ...

    def finish(self, rest: bytes) -> bytes:
        """Return the end of a stream, or the whole of another answer."""
        ...


class EditsAnswers(Protocol):
    """Changes answers of one router."""

    def follow(self, exchange: Exchange, response: UpstreamResponse) -> AnswerEdit | None:
        """Return what changes this answer; None: it goes down as it comes."""
        ...


class Relay(msgspec.Struct, eq=False):
    """Sends one response down. From the first byte on nothing is retried here: a break is reported, never hidden,
    unless a continuation has another engine go on behind it.

    A piece in the middle of a stream goes on in the call that brings it, without waking this request's task, as long as
    the client takes what it gets.
    """

    _exchange: Exchange
    _response: UpstreamResponse
    _downstream: Downstream
    _post: bool = False
    _change: AnswerEdit | None = None  # None: the answer is forwarded unchanged
    _continuation: Continuation | None = None  # None: a stream that breaks ends there
    #: Called before the first piece with an event, since comments before it do not mean a token.
    on_event: Callable[[], None] | None = None
    _first: bytes = b""
    _last: deque[bytes] = _NO_PIECES  # of a stream, its end; of any other answer all pieces
    _failure: Exception | None = None  # from a piece that could not be forwarded
    #: The stream broke and the client was not notified: another engine may go on, or `tell_broken` must follow.
    broken: bool = False

    async def run(self, headers: Headers, first: bytes) -> UpstreamError | None:
        """Return the failure that cut the response short; None when it was complete. The client has been notified
        either way, unless the stream is `broken`."""
        response = self._response
        downstream = self._downstream
        outcome = self._exchange.outcome
        status = outcome.status = response.status
        chunk = self._first = first
        if self._change is not None and not self._change.streams:
            chunk = await self._hold(chunk)
        streams = self._continuation is not None or (bool(chunk) and not response.complete)
        try:
            if streams:
                self._last = deque(maxlen=LAST_PIECES)
                begun = self._edit(chunk)
                if downstream.status:
                    await downstream.write(begun, more=True)
                else:
                    await downstream.start(status, headers, begun, more=True)
                if self.on_event is not None:
                    await self._pass_comments(self.on_event)
                if downstream.connection is not None:
                    response.on_piece = self._pass_on
                while not response.complete:
                    piece = response.take()
                    if piece is None:
                        await response.changed()
                    elif piece and (piece := self._edit(piece)):
                        await downstream.write(piece, more=True)
                chunk = b""
            if rest := response.take():  # complete: the bytes after the last piece go with it
                chunk += rest
        except UpstreamError as error:
            if self._failure is not None:
                raise self._failure from None
            if not self._has_end(headers):
                return await self._end_broken(headers, error.with_traceback(None))  # kept, and its frames hold this
            chunk = b""
        finally:
            response.on_piece = None
        outcome.end = "completed"
        if not streams:
            whole = chunk if self._change is None else self._change.finish(chunk)
            if downstream.status:
                await downstream.write(whole, more=False)
            else:
                headers = headers if whole is chunk else _with_length(headers, len(whole))
                await downstream.start(status, headers, whole, more=False)
            return read_end(self._exchange, status, headers, first=self._first, tail=chunk, post=self._post)
        if self._continuation is not None:
            chunk = self._continuation.finish(chunk)
            if (failure := self._continuation.failure) is not None:
                await self._write_before_break(chunk)
                return await self._end_broken(headers, failure)
        if chunk:
            self._last.append(chunk)
        await downstream.write(chunk if self._change is None else self._change.finish(chunk), more=False)
        *earlier, last = self._last
        tail = b"".join(earlier)[-TAIL_BYTES:] + last
        return read_end(self._exchange, status, headers, first=self._first, tail=tail, post=self._post)

    def _has_end(self, headers: Headers) -> bool:
        """Return whether the last event of a stream came: a break behind it takes nothing away."""
        failed = self._continuation is not None and self._continuation.failure is not None
        last = b"".join(self._last).rstrip().rpartition(b"\n\n")[2]
        return not failed and last.startswith(_LAST_EVENTS) and is_event_stream(headers)

    def _edit(self, piece: bytes) -> bytes:
        """Return what goes down of a piece of a stream, and keep the piece for the end."""
        continuation = self._continuation
        if continuation is not None:
            piece = continuation.next_piece(piece)
            if continuation.failure is not None:
                self._response.abort()
        if piece:
            self._last.append(piece)
        return piece if self._change is None else self._change.next_piece(piece)

    async def _pass_comments(self, on_event: Callable[[], None]) -> None:
        """Pass pieces on until one is an event, or the end came."""
        response = self._response
        comments_only = True
        while comments_only and not response.complete:
            piece = await response.next_chunk()
            if piece:
                comments_only = is_comment(piece)
                if not comments_only:
                    on_event()
                if piece := self._edit(piece):
                    await self._downstream.write(piece, more=True)

    async def _hold(self, first: bytes) -> bytes:
        """Return an answer that is not streamed, whole, so that its length can change; of a longer one, or one that
        breaks off, its beginning."""
        response = self._response
        pieces = [first]
        held_bytes = len(first)
        with contextlib.suppress(UpstreamError):  # reported behind the bytes before it
            while not response.complete and held_bytes <= MAX_HELD_BYTES:
                pieces.append(await response.next_chunk())
                held_bytes += len(pieces[-1])
        if not response.complete or held_bytes > MAX_HELD_BYTES:
            self._change = None
        return b"".join(pieces)

    def _pass_on(self, piece: bytes) -> bool:
        """Forward a piece that arrived while the task waits for one; False: the task has to take it, and wait for the
        client."""
        downstream = self._downstream
        connection = downstream.connection
        if connection is None or not connection.writable:
            return False
        if self._continuation is None and self._change is None:
            self._last.append(piece)
        elif not (piece := self._edit(piece)):
            return True
        try:
            if "body_piece" not in self._exchange.hooks:
                connection.write(piece, more=True)
                downstream.sent_bytes += len(piece)
            else:
                downstream.write_now(piece)
        except Exception as error:  # noqa: BLE001 - the waiting task raises it, as if it had written
            self._failure = error
            self._response.abort()
        return True

    async def _write_before_break(self, piece: bytes) -> None:
        if piece and self._change is not None:
            piece = self._change.next_piece(piece)
        if piece:
            await self._downstream.write(piece, more=True)

    async def _end_broken(self, headers: Headers, error: UpstreamError) -> UpstreamError:
        """Return the failure that ended the response; the client is notified unless another engine may go on."""
        if self._continuation is None:
            await self.tell_broken(headers, error)
            return error
        self.broken = True
        return self._continuation.failure or error

    async def tell_broken(self, headers: Headers, error: UpstreamError) -> None:
        """End an event stream that broke between two events with an error event. Any other answer is left incomplete,
        which cuts the connection: clients drop an unfinished event."""
        self._exchange.outcome.end = "engine_error" if isinstance(error, EngineReportedError) else "upstream_died"
        withheld = b"" if self._continuation is None else self._continuation.withheld
        if withheld:
            await self._downstream.write(withheld, more=False)
            return
        if not is_event_stream(headers) or self._exchange.breaks_off:
            return
        kind = self._exchange.inference.kind if self._exchange.inference else None
        tail = b"".join(self._last)[-4:]
        # with an edit or a continuation only whole events were forwarded
        if self._change is None and self._continuation is None and tail and not tail.endswith(_BLANK_LINES):
            return
        message = "The engine failed in the middle of this response."
        event = error_event(kind, message=message, reason=error.reason)
        await self._downstream.write(event, more=False)


def read_end(
    exchange: Exchange, status: int, headers: Headers, *, first: bytes, tail: bytes, post: bool
) -> UpstreamError | None:
    """Read an answer's `first` piece and its `tail`: store token counts in the outcome, or return the reported
    error."""
    inference = exchange.inference
    outcome = exchange.outcome
    if inference is None:
        if not (post and _may_tell_usage(headers)):  # its usage is not in a readable body
            return None
    elif status == 200 and ERROR_MARK in tail and (reported := error_status(tail)) is not None:
        if reported >= 500:  # else a client's mistake, found late
            outcome.end = "engine_error"
        return EngineReportedError("the engine ended its stream with an error event", status=reported)
    head = first if inference is None or inference.kind is RequestKind.MESSAGES else b""
    usage = read_usage(tail, head, native=inference is None)
    if usage is not None:
        outcome.prompt_tokens = usage.prompt_tokens
        outcome.cached_tokens = usage.cached_tokens
        outcome.media_tokens = usage.media_tokens
        outcome.completion_tokens = usage.completion_tokens
    if inference is not None and inference.kind in _CONVERSATIONS:
        # The tools that an answer of /responses repeats stand behind its output, and may be longer than what is kept.
        cut = inference.kind is RequestKind.RESPONSES and b'"output":' not in tail
        outcome.calls_tool = cut or calls_tool(tail)
    if inference is not None and inference.continuable:
        outcome.response_id = read_response_id(first)
    return None


def is_event_stream(headers: Headers) -> bool:
    """Return True if an answer's fields announce events without a length."""
    fields = dict(headers)
    return fields.get(b"content-type", b"").startswith(b"text/event-stream") and b"content-length" not in fields


def is_comment(piece: bytes) -> bool:
    """Return True if a piece of an event stream has comments (`: keep-alive`) and blank lines alone."""
    return all(line.startswith((b":", b"\r")) or not line for line in piece.split(b"\n"))


def _with_length(headers: Headers, length: int) -> Headers:
    return [(name, b"%d" % length if name == b"content-length" else value) for name, value in headers]


def _may_tell_usage(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(_TELLING) for name, value in headers)


def new_arming(delay_s: float = ARM_DELAY_S) -> Arming:
    """One for all requests of a router."""
    return SharedTimer(delay_s, DisconnectWatcher.start)


class DisconnectWatcher(msgspec.Struct, eq=False):
    """Watcher that cancels the task it was armed in when the client leaves, as reported by our listener or, under
    another, by `receive`.

    The request body must have been read before arming. Works like `asyncio.timeout`: the task that catches the
    cancellation calls `caused_cancellation()` to find out whether it was this watcher's, and re-raises it otherwise."""

    _connection: ClientConnection | None  # None: another server's client
    _receive: Receive
    _arming: Arming
    _task: asyncio.Task[object] | None = None
    _watch: asyncio.Task[None] | None = None
    gone: bool = False

    def arm(self, task: asyncio.Task[object] | None = None) -> None:
        """Start watching on behalf of this task; None: the current one."""
        self._task = task or asyncio.current_task()
        connection = self._connection
        if connection is None:
            self._arming.add(self)
            return
        connection.on_disconnect = self._left
        if connection.disconnected:
            self._left()

    def disarm(self) -> None:
        """Stop watching; nothing is cancelled from here on."""
        if self._connection is not None:
            self._connection.on_disconnect = None
        elif self._watch is not None:
            self._watch.cancel()
        else:
            self._arming.remove(self)

    def caused_cancellation(self) -> bool:
        """Return True if the cancellation just caught came from here and from nowhere else."""
        return self.gone and self._task is not None and self._task.uncancel() == 0

    def start(self) -> None:
        """Wait for the disconnect message from now on."""
        self._watch = asyncio.get_running_loop().create_task(self._wait(), name="disconnect watcher")

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._left()

    def _left(self) -> None:
        self.gone = True
        assert self._task is not None
        self._task.cancel()
