"""Strategies: what clients send, valid or not, and how the network cuts it."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st


class Sent(NamedTuple):
    """A valid request: its bytes, and what an app must see of it."""

    raw: bytes
    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    keep_alive: bool


_NAMES = st.sampled_from([b"accept", b"X-Request-ID", b"authorization", b"cookie", b"x_odd", b"te"])
_VALUES = st.sampled_from([b"", b"1", b"Bearer abc", b"text/event-stream, */*", b"a" * 300, b"caf\xc3\xa9", b"x: y"])
_TARGETS = st.sampled_from([b"/v1/chat/completions", b"/", b"/a%20b?c=d&e", b"/" + b"p" * 200, b"http://h/x"])
_BODIES = st.one_of(st.binary(max_size=40), st.sampled_from([b"{}", b"\r\n\r\nGET / HTTP/1.1\r\n\r\n", b"x" * 5000]))


@st.composite
def valid_requests(draw: st.DrawFn, *, last: bool = False) -> Sent:
    """One request; `last` ones ask to close the connection (or are HTTP/1.0)."""
    old = last and draw(st.booleans())
    body = draw(_BODIES)
    method = draw(st.sampled_from(["POST", "POST", "PUT", "GET"]))
    headers = [(b"host", b"x"), *draw(st.lists(st.tuples(_NAMES, _VALUES), max_size=4))]
    if last and not old:
        headers.append((b"Connection", b"close"))
    upgrade = draw(st.integers(0, 9)) == 0
    if upgrade:
        headers += [(b"connection", b"Upgrade"), (b"upgrade", b"h2c")]
    wire = body
    if body and not old and draw(st.booleans()):
        headers.append((b"Transfer-Encoding", b"chunked"))
        wire = draw(_chunks(body))
    elif body or draw(st.booleans()):
        headers.append((b"Content-Length", b"%d" % len(body)))
    target = draw(_TARGETS)
    lines = [b"%b %b HTTP/%b" % (method.encode(), target, b"1.0" if old else b"1.1")]
    lines += [b"%b: %b" % pair for pair in headers]
    raw = b"\r\n" * draw(st.integers(0, 1)) + b"\r\n".join([*lines, b"", wire])
    seen = [(name.lower(), value) for name, value in headers if not upgrade or name != b"upgrade"]
    return Sent(raw, method, target, seen, body, not last)


@st.composite
def _chunks(draw: st.DrawFn, body: bytes) -> bytes:
    size = draw(st.integers(1, len(body)))
    extension = draw(st.sampled_from([b"", b";a=b", b';q="x y"']))
    trailers = draw(st.sampled_from([b"", b"x-trailer: 1\r\n", b"host: evil\r\nauthorization: Bearer t\r\n"]))
    pieces = [body[at : at + size] for at in range(0, len(body), size)] if len(body) // size < 50 else [body]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces) + b"0\r\n%b\r\n" % trailers


#: Not HTTP, not one request, or not ours to serve; with the status each deserves.
INVALID: list[tuple[bytes, int]] = [
    (b"hello\r\n\r\n", 400),
    (b"\0\0\0\0", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\nhost: x\n\n", 400),
    (b"GET / HTTP/1.1\r\nhost : x\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nhost: x\r\na: b\0c\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\nabc", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -3\r\n\r\nabc", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +3\r\n\r\nabc", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0x3\r\n\r\nabc", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\nabc", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    (b"CONNECT a.example:443 HTTP/1.1\r\nhost: a.example:443\r\n\r\n", 405),
    (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", 505),
    (b"GET / HTTP/0.9\r\nhost: x\r\n\r\n", 505),
    (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
]


@st.composite
def cuts(draw: st.DrawFn, raw: bytes) -> list[bytes]:
    """Return the same bytes in pieces, many small ones or few."""
    if draw(st.booleans()):
        at = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))
        return [raw[low:high] for low, high in zip([0, *at], [*at, len(raw)], strict=True) if low < high]
    step = draw(st.integers(1, 64))
    return [raw[low : low + step] for low in range(0, len(raw), step)]
