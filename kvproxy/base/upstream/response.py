"""One response of an engine: parsed from the bytes of its connection, then on its way through: head first, then
whatever has arrived so far, until the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import httptools
import msgspec

from kvproxy.base.errors import ResponseHeadTooLarge, UpstreamDisconnected, UpstreamProtocolError
from kvproxy.base.types import Headers

#: Bound of a head, and of all else besides the body; engines put the index of binary embeddings into a header field.
MAX_HEAD_BYTES = 1024 * 1024
MAX_HEADERS = 256

_BODILESS = frozenset({204, 304})
#: Of a parser, for its `explain`.
PARSER_ERRORS = (httptools.HttpParserError, httptools.HttpParserUpgrade, UpstreamProtocolError)


class ResponseParser:
    """Parser of one response at a time over httptools, for its connection.

    `expect_response` begins one, `feed` advances it, `take_body` takes the body that arrived. All else (interim
    responses, chunk extensions, trailers) is dropped, and bounded like the head."""

    def __init__(self, *, max_head_bytes: int = MAX_HEAD_BYTES) -> None:
        self._max_head_bytes = max_head_bytes
        self.body: list[bytes] = []
        self.on_body = self.body.append  # bound to C: a burst of chunks costs one call each
        self._begin_connection()
        self.expect_response(b"")

    def _begin_connection(self) -> None:
        self._head_request = False
        self._parser = httptools.HttpResponseParser(self)
        #: Takes what arrived. Raises PARSER_ERRORS. (C without a call of ours around it: streams have many pieces.)
        self.feed: Callable[[bytes], None] = self._parser.feed_data

    def close(self) -> None:
        """Nothing is fed any more: leave no cycle behind, which only the garbage collector could free."""
        del self._parser, self.feed

    def expect_response(self, method: bytes) -> None:
        """Begin the response to a request with this method."""
        self.body.clear()
        self.status = 0
        self.headers: Headers = []
        self.heard = False  # any byte at all
        self.head_complete = False
        self.complete = False
        self.reusable = False  # meaningful once complete: the connection is at a message boundary
        self.framing_bytes = 0  # since the last byte of the body
        self._until_eof = False
        self._head_bytes = 0
        if self._head_request:  # the engine may still wait for the body announced by content-length
            self._begin_connection()
        self._head_request = method == b"HEAD"

    def count_framing(self, size_bytes: int) -> None:
        """Count what arrived without a byte of the body. Raises UpstreamProtocolError beyond the bound."""
        self.framing_bytes += size_bytes
        if self.framing_bytes > self._max_head_bytes and not self.complete:
            raise self._too_large("head or framing without a body byte")

    def explain(self, error: Exception) -> UpstreamProtocolError | None:
        """Return what an error in the bytes means for the response; None: it is complete, and only its connection
        cannot be used again."""
        self.reusable = False
        if self.complete:
            return None
        cause = error.__context__ or error
        if isinstance(cause, UpstreamProtocolError):  # raised by a callback
            return type(cause)(str(cause))
        if isinstance(error, httptools.HttpParserError):
            return UpstreamProtocolError(f"not HTTP: {error}")
        return UpstreamProtocolError("an upgrade that was not asked for")

    def feed_eof(self) -> None:
        """End the input. Raises UpstreamDisconnected if the response is not complete by that."""
        self.reusable = False
        if self._until_eof:
            self.complete = True
        if not self.complete:
            where = "in the body" if self.head_complete else "in the head" if self.heard else "without a response"
            raise UpstreamDisconnected(f"closed {where}")

    def _too_large(self, of_what: str) -> UpstreamProtocolError:
        kind = UpstreamProtocolError if self.head_complete else ResponseHeadTooLarge
        return kind(f"over {self._max_head_bytes} bytes of {of_what}")

    def take_body(self) -> bytes:
        """Everything of the body that arrived since the last call, as one piece."""
        body = self.body
        if body and self._head_request:  # bytes after the end
            self.reusable = False
            body.clear()
        data = b"".join(body)  # a single piece is not copied
        body.clear()
        return data

    # callbacks of httptools; an exception in one stops the parser

    def on_message_begin(self) -> None:
        self.heard = True
        if self.complete:
            raise UpstreamProtocolError("bytes after the end of the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_complete:  # else a trailer
            self.headers.append((name.lower(), value))
            self._head_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        self.status = status = self._parser.get_status_code()
        if status < 100:
            raise UpstreamProtocolError(f"status {status}")
        if status < 200:
            if status == 101:
                raise UpstreamProtocolError("101 without a request to upgrade")
            return
        if status > 599:
            raise UpstreamProtocolError(f"status {status}")
        headers = self.headers
        if len(headers) > MAX_HEADERS:
            raise ResponseHeadTooLarge(f"over {MAX_HEADERS} header fields")
        if self._head_bytes > self._max_head_bytes:
            raise self._too_large("head")
        self.head_complete = True
        self.reusable = self._parser.should_keep_alive()
        # End of this response where httptools does not report it: at once, or with the connection.
        chunked = framed = False
        for name, value in headers:
            if name == b"content-length":
                framed = True
            elif name == b"transfer-encoding":
                if chunked or value.strip().lower() != b"chunked":  # the header is dropped, so the coding must be ours
                    raise UpstreamProtocolError("a transfer coding that was not asked for")
                chunked = framed = True
        if not self.reusable and self._parser.get_http_version() not in ("1.0", "1.1"):
            raise UpstreamProtocolError("not HTTP/1")
        if self._head_request:
            self.complete = True
        elif status not in _BODILESS:
            self._until_eof = not framed

    def on_message_complete(self) -> None:
        if self.status < 200:  # an interim response: the real one follows
            self.headers = []
            self._head_bytes = 0
        else:
            self.complete = True


class Source(Protocol):
    """The connection a response still comes from."""

    def take(self) -> bytes | None:
        """Return the body that arrived, None when there is none yet."""
        ...

    def cancel(self) -> None:
        """Give the response up and close the connection."""
        ...


class UpstreamResponse(msgspec.Struct, eq=False):
    """`status` and `headers` (lower-case names) are there once `UpstreamPool.request` returned it.

    One reader at a time; one that does not read to the end calls `abort()`. (A struct: one is made in C.)
    """

    _source: Source | None
    _loop: asyncio.AbstractEventLoop  # kept, since asking for it costs a system call (getpid)
    #: Wake the reader by the head alone, not only by the bytes after it.
    early: bool = True
    #: Called with the response when its head has come without a part of its body. It must not raise.
    on_head: Callable[[UpstreamResponse], None] | None = None
    status: int = 0
    headers: Headers = []
    #: True once the last bytes arrived (they may still wait to be read); the connection is given back.
    complete: bool = False
    #: Called with a part of the body that arrives while the reader waits. True: the part was forwarded and the reader
    #: goes on waiting; False: the reader takes it. It must not raise.
    on_piece: Callable[[bytes], bool] | None = None
    error: BaseException | None = None  # error that ended the response early
    _rest: bytes = b""
    waiter: asyncio.Future[None] | None = None  # done: the reader is woken, or gave up

    def take(self) -> bytes | None:
        """Return what has arrived and was not taken yet, b"" after the end, None when `chunk()` would have to wait.

        Raises what ended the response too early (kvproxy.base.errors), after everything that came before it was taken.
        """
        if self._source is not None:
            return self._source.take()
        rest = self._rest
        if rest:
            self._rest = b""
        elif self.error is not None:
            raise self.error
        return rest

    async def next_chunk(self) -> bytes:
        """Like `take`, but waits for the next bytes or the end."""
        while (data := self.take()) is None:
            await self.changed()
        return data

    def changed(self) -> asyncio.Future[None]:
        """Done when something has arrived, or the end; a future and no coroutine, which would be resumed as well."""
        self.waiter = waiter = self._loop.create_future()
        return waiter

    def abort(self) -> None:
        """Close the connection at once, unless the response is complete."""
        if self._source is not None:
            self._source.cancel()

    def take_error(self) -> BaseException:
        """Return what ended the response, which keeps it no longer: its frames hold the response."""
        assert self.error is not None
        error, self.error = self.error, None
        return error

    # called by the connection

    def finish(self, rest: bytes) -> None:
        """Complete the response; `rest` is the part of the body not taken yet. The source is let go."""
        self._source = None
        self._rest = rest
        self.complete = True
        self.wake()

    def fail(self, error: BaseException, *, rest: bytes) -> None:
        """End the response early with `error`. The source is let go."""
        self._source = None
        self._rest = rest
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Something changed for a waiting reader."""
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
