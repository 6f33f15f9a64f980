"""One response after another from the bytes of one connection: httptools, and the framing rules it leaves to its user.

No I/O and no clock, so that a fuzzer can drive it.
"""

from __future__ import annotations

import httptools

from kvproxy.errors import UpstreamDisconnected, UpstreamProtocolError
from kvproxy.types import Headers

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256

_BODILESS = frozenset({204, 304})


class ResponseParser:
    """Feeds bytes to httptools and keeps what came out of them, one response at a time.

    `expect` begins a response, `feed` and `eof` advance it, `drain` takes the body that arrived. What is neither
    head nor body (interim responses, chunk extensions, trailers) is dropped, and bounded like the head.
    """

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.on_body = self.body.append  # bound to C: a burst of chunks costs one call each
        self._head_request = False
        self._parser = httptools.HttpResponseParser(self)
        self.expect(b"")

    def expect(self, method: bytes) -> None:
        """Begin the response to a request with this method."""
        self.body.clear()
        self.status = 0
        self.reason = b""
        self.headers: Headers = []
        self.heard = False  # any byte at all
        self.head_complete = False
        self.complete = False
        self.reusable = False  # meaningful once complete: the connection is at a message boundary
        self._until_eof = False
        self._framing_bytes = 0
        self._feeding_bytes = 0
        if self._head_request:  # the old one may still wait for the body that content-length spoke of
            self._parser = httptools.HttpResponseParser(self)
        self._head_request = method == b"HEAD"

    def feed(self, data: bytes) -> None:
        """Take what arrived. Raises UpstreamProtocolError for what is not HTTP; bytes after the end spoil reuse."""
        self.heard = True
        self._feeding_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.reusable = False
            if not self.complete:
                raise UpstreamProtocolError(_explain(error)) from None
        if self.body:
            self._framing_bytes = 0
            if self._head_request:
                self.reusable = False
                self.body.clear()
        else:
            self._framing_bytes += len(data)
            if self._framing_bytes > MAX_HEAD_BYTES and not self.complete:
                raise UpstreamProtocolError(f"over {MAX_HEAD_BYTES} bytes of head or framing without a body byte")

    def eof(self) -> None:
        """The peer will send no more. Raises UpstreamDisconnected unless that ends the response as it should."""
        self.reusable = False
        if self._until_eof:
            self.complete = True
        if not self.complete:
            where = "in the body" if self.head_complete else "in the head" if self.heard else "without a response"
            raise UpstreamDisconnected(f"closed {where}")

    def drain(self) -> bytes:
        """Everything of the body that arrived since the last call, as one piece."""
        body = self.body
        data = body[0] if len(body) == 1 else b"".join(body)
        body.clear()
        return data

    # callbacks of httptools; an exception in one stops the parser

    def on_message_begin(self) -> None:
        if self.complete:
            raise UpstreamProtocolError("bytes after the end of the response")

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_complete:  # else a trailer
            self.headers.append((name.lower(), value))

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
            raise UpstreamProtocolError(f"over {MAX_HEADERS} header fields")
        if self._framing_bytes + self._feeding_bytes > MAX_HEAD_BYTES and _size(headers) > MAX_HEAD_BYTES:
            raise UpstreamProtocolError(f"over {MAX_HEAD_BYTES} bytes of head")
        self.head_complete = True
        self.reusable = self._parser.should_keep_alive()
        # How this response ends, as far as httptools does not say it: at once, or with the connection.
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
            self.reason = b""
        else:
            self.complete = True


def _size(headers: Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _explain(error: Exception) -> str:
    cause = error.__context__
    if isinstance(cause, UpstreamProtocolError):
        return str(cause)
    return f"not HTTP: {error}" if isinstance(error, httptools.HttpParserError) else "an upgrade that was not asked for"
