"""The parser and its connection, without a socket: what counts as one HTTP/1.1 response, and what never may be
reused."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproxy.base.errors import ResponseHeadTooLarge, UpstreamDisconnected, UpstreamError, UpstreamProtocolError
from kvproxy.base.upstream.connection import Connection, Timeouts
from kvproxy.base.upstream.request import WireRequest
from kvproxy.base.upstream.response import MAX_HEADERS, ResponseParser, UpstreamResponse
from tests.support.examples import examples

MAX_HEAD_BYTES = 64 * 1024

Seen = tuple[int, list[tuple[bytes, bytes]], bytes, bool, bool]


class Socket(asyncio.Transport):
    """Takes what is sent."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class Clock(asyncio.AbstractEventLoop):
    """Event loop whose time stands still."""

    def time(self) -> float:
        return 0.0


class Engine:
    """A connection whose engine sends what a test does. It belongs to itself."""

    def __init__(self) -> None:
        self.connection = Connection(loop=Clock(), high_water_bytes=1 << 20)
        self.connection.connection_made(Socket())
        self.connection.parser = ResponseParser(max_head_bytes=MAX_HEAD_BYTES)
        self.connection.owner = self
        self.reusable = False

    def ask(self, method: bytes) -> UpstreamResponse:
        """Begin a request."""
        self.reusable = False
        return self.connection.send(WireRequest(method, (b"",), None, None), Timeouts(0, 0, 0))

    def release(self, connection: Connection) -> None:
        self.reusable = True

    def retire(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...


def read(*pieces: bytes, method: bytes = b"POST", eof: bool = False) -> Seen:
    """Send this as a response; returns the reader's view, whether it is complete, and the connection reusable."""
    engine = Engine()
    response = engine.ask(method)
    body = b""
    for piece in pieces:
        engine.connection.data_received(piece)
        while data := response.take():
            body += data
    if eof:
        engine.connection.eof_received()
        body += response.take() or b""
    return response.status, response.headers, body, response.complete, engine.reusable


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
VALID: dict[str, tuple[bytes, bytes, bytes, bool]] = {  # raw, method, body, reusable
    "length": (OK + b"Content-Length: 3\r\n\r\nabc", b"POST", b"abc", True),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", b"POST", b"", True),
    "chunked": (CHUNKED + b"3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\n\r\n", b"POST", b"abcde", True),
    "trailers": (CHUNKED + b"3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n", b"POST", b"abc", True),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: </a>\r\n\r\n" + OK + b"content-length: 1\r\n\r\nx",
        b"POST", b"x", True,
    ),
    "HEAD with a length": (OK + b"Content-Length: 300\r\n\r\n", b"HEAD", b"", True),
    "HEAD chunked": (CHUNKED, b"HEAD", b"", True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", b"POST", b"", True),
    "304 with a length": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", b"GET", b"", True),
    "connection: close": (OK + b"connection: close\r\ncontent-length: 3\r\n\r\nabc", b"POST", b"abc", False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"POST", b"abc", False),
    "no reason": (b"HTTP/1.1 200\r\ncontent-length: 3\r\n\r\nabc", b"POST", b"abc", True),
    "upgrade offered": (OK + b"upgrade: h2c\r\ncontent-length: 1\r\n\r\nx", b"POST", b"x", True),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "method", "body", "reusable"), VALID.values(), ids=VALID.keys())
def test_a_valid_response_is_complete_at_its_end(raw: bytes, method: bytes, body: bytes, reusable: bool) -> None:
    """Framing decides where a response ends, and whether the connection may serve another."""
    seen = read(raw, method=method)
    assert seen[2:] == (body, True, reusable)


def test_fields_of_an_interim_response_are_not_the_responses() -> None:
    """Status and fields are those of the last head alone."""
    raw, method, _, _ = VALID["interim"]
    assert read(raw, method=method)[:2] == (200, [(b"content-length", b"1")])


@settings(max_examples=examples(150))
@given(data=st.data())
def test_cuts_change_nothing(data: st.DataObject) -> None:
    """A valid response gives the same result however the network cuts it."""
    raw, method, _, _ = data.draw(st.sampled_from(list(VALID.values())))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=12)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert read(*pieces, method=method) == read(raw, method=method)


def test_no_length_ends_with_the_connection() -> None:
    """A response without length or chunks is complete when, and only when, the peer closes; never reused."""
    raw = OK + b"content-type: text/plain\r\n\r\nabc"
    assert read(raw)[2:] == (b"abc", False, False)
    assert read(raw, b"def", eof=True)[2:] == (b"abcdef", True, False)


INVALID: dict[str, bytes] = {
    "both lengths": OK + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "both lengths, other order": OK + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "two lengths": OK + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "negative length": OK + b"content-length: -1\r\n\r\n",
    "length overflow": OK + b"content-length: 99999999999999999999999\r\n\r\n",
    "chunk size not hex": CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n",
    "chunk size overflow": CHUNKED + b"fffffffffffffffff\r\nabc",
    "chunk longer than it says": CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    "chunk with bare LF": CHUNKED + b"3\nabc\n0\n\n",
    "status line with bare LF": b"HTTP/1.1 200 OK\ncontent-length: 3\n\nabc",
    "header with bare LF": OK + b"x: a\ny: b\r\ncontent-length: 0\r\n\r\n",
    "header with NUL": OK + b"x: a\0b\r\n\r\n",
    "header with bare CR": OK + b"x: a\rb\r\n\r\n",
    "folded header": OK + b"x: a\r\n b\r\n\r\n",
    "space before the colon": OK + b"x : a\r\n\r\n",
    "a coding we did not ask for": OK + b"transfer-encoding: gzip, chunked\r\n\r\n",
    "chunked twice": OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked not last": OK + b"transfer-encoding: chunked, gzip\r\n\r\n",
    "101": b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nfoo",
    "101 without upgrade": b"HTTP/1.1 101 Switching\r\n\r\nfoo",
    "status 999": b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
    "HTTP/2.0": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "HTTP/0.9": b"hello\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "too many headers": OK + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n",
    "head too large in one piece": OK + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n",
}


@pytest.mark.parametrize("raw", INVALID.values(), ids=INVALID.keys())
@pytest.mark.parametrize("step", [1, 1 << 20], ids=["byte by byte", "at once"])
def test_broken_framing_is_refused(raw: bytes, step: int) -> None:
    """An ambiguous frame is an error, never a response, and its connection is never reused."""
    with pytest.raises(UpstreamProtocolError):
        read(*[raw[i : i + step] for i in range(0, len(raw), step)])


def test_a_head_over_the_bound_is_an_error_of_its_own() -> None:
    """It is the request that asks for such an answer, so the engine must not be blamed for it."""
    with pytest.raises(ResponseHeadTooLarge, match="over 65536 bytes of head"):
        read(OK + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n")
    with pytest.raises(ResponseHeadTooLarge, match="over 256 header fields"):
        read(OK + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n")


@pytest.mark.parametrize(
    "start", [OK, CHUNKED + b"1\r\na\r\n1;", CHUNKED + b"1\r\na\r\n0\r\nx: "], ids=["head", "ext", "trailer"]
)
def test_endless_framing_is_bounded(start: bytes) -> None:
    """Headers, chunk extensions and trailers without end are cut off, not collected."""
    with pytest.raises(UpstreamProtocolError, match="without a body byte"):
        read(start, *[b"x" * 1000] * (MAX_HEAD_BYTES // 1000 + 2))


def test_endless_interim_responses_are_bounded() -> None:
    """An engine that says 100 Continue for ever is cut off."""
    with pytest.raises(UpstreamProtocolError):
        read(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * (MAX_HEAD_BYTES // 25 + 2))


@pytest.mark.parametrize("extra", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"HTT"])
@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
def test_bytes_after_the_end_spoil_reuse_only(extra: bytes, method: bytes) -> None:
    """The response stands, the connection does not: its next bytes would be read as another request's response."""
    body = b"abc" if method == b"POST" else b""
    head = OK + b"content-length: 3\r\n\r\n"
    assert read(head + body + extra, method=method)[2:] == (body, True, False)


def test_after_head_the_next_response_is_read_afresh() -> None:
    """The length a HEAD response states is not waited for in the next one."""
    engine = Engine()
    engine.ask(b"HEAD")
    engine.connection.data_received(OK + b"content-length: 100\r\n\r\n")
    assert engine.reusable
    response = engine.ask(b"GET")
    engine.connection.data_received(OK + b"content-length: 1\r\n\r\nz")
    assert (response.complete, response.take()) == (True, b"z")


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b"", "without a response"),
        (b"HTTP/1.1 2", "in the head"),
        (OK + b"content-length: 9\r\n\r\nabc", "in the body"),
    ],
)
def test_an_early_end_is_a_disconnect(raw: bytes, where: str) -> None:
    """A close inside a framed response is an error that says how far it got."""
    with pytest.raises(UpstreamDisconnected, match=where):
        read(*([raw] if raw else []), eof=True)


@settings(max_examples=examples(300))
@given(
    prefix=st.sampled_from([b"", OK, CHUNKED, b"HTTP/1.1 ", OK + b"content-length: 5\r\n\r\n"]),
    pieces=st.lists(
        st.binary(min_size=1, max_size=40) | st.sampled_from([b"\r\n", b"0\r\n\r\n", b"5\r\n"]), max_size=12
    ),
    method=st.sampled_from([b"GET", b"HEAD", b"POST"]),
)
def test_garbage_raises_our_errors_only(prefix: bytes, pieces: list[bytes], method: bytes) -> None:
    """Whatever arrives: an UpstreamError or a response; reusable only with nothing of it left over."""
    engine = Engine()
    response = engine.ask(method)
    try:
        for piece in [prefix, *pieces] if prefix else pieces:
            engine.connection.data_received(piece)
            if response.complete:
                break
            response.take()
        if not response.complete:
            engine.connection.eof_received()
            response.take()
    except UpstreamError:
        return
    assert response.complete
    if engine.reusable:
        response = engine.ask(b"GET")
        engine.connection.data_received(OK + b"content-length: 2\r\n\r\nok")
        assert (response.status, response.take(), response.complete) == (200, b"ok", True)
