"""The request head: complete, unambiguous, and nothing of the client's can break out of its line."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvproxy.base.errors import UnsafeRequest
from kvproxy.base.types import Headers
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.request import SLICE_BYTES, RepeatedFields, encode_head, encode_request

ORIGIN = Origin("http", "engine", 8000, b"/base")


def encode(
    headers: Headers, *, method: bytes = b"POST", target: bytes = b"/v1?x=1", size: int | None = 3, body: bool = True
) -> tuple[bytes, int | None]:
    return encode_head(ORIGIN, method, target=target, headers=headers, body_bytes=size, has_body=body)


def test_host_and_length_are_written_when_absent() -> None:
    """The pool completes the head; the base path goes before the target."""
    expected = b"POST /base/v1?x=1 HTTP/1.1\r\nhost: engine:8000\r\na: b\r\ncontent-length: 3\r\n\r\n"
    assert encode([(b"a", b"b")]) == (expected, 3)


def test_given_host_and_length_stand() -> None:
    """Headers of the caller are not doubled."""
    head, _ = encode([(b"host", b"other"), (b"content-length", b"3")])
    assert head == b"POST /base/v1?x=1 HTTP/1.1\r\nhost: other\r\ncontent-length: 3\r\n\r\n"


def test_unknown_length_is_chunked() -> None:
    """A body that arrives piece by piece is chunked unless its length is stated."""
    head, length = encode([], size=None)
    assert head.endswith(b"transfer-encoding: chunked\r\n\r\n")
    assert length is None
    assert encode([(b"content-length", b"77")], size=None)[1] == 77


@pytest.mark.parametrize(("method", "stated"), [(b"POST", True), (b"PUT", True), (b"GET", False), (b"DELETE", False)])
def test_no_body_states_zero_only_where_one_is_expected(method: bytes, stated: bool) -> None:
    """RFC 9110 8.6: content-length: 0 for POST without content, nothing for GET."""
    assert (b"content-length: 0" in encode([], method=method, size=0, body=False)[0]) is stated


@pytest.mark.parametrize(
    "headers",
    [
        [(b"a", b"b\r\nx: y")],
        [(b"a", b"b\nx: y")],
        [(b"a", b"b\0")],
        [(b"a", b"b\x7f")],
        [(b"a\r\nx", b"b")],
        [(b"a b", b"c")],
        [(b"a:", b"c")],
        [(b"", b"c")],
        [(b"host", b"a"), (b"host", b"b")],
        [(b"content-length", b"4")],
        [(b"content-length", b"+3")],
        [(b"content-length", b"3, 3")],
        [(b"content-length", b"3"), (b"content-length", b"3")],
        [(b"content-length", b"3"), (b"transfer-encoding", b"chunked")],
        [(b"transfer-encoding", b"gzip, chunked")],
        [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")],
    ],
)
def test_request_smuggling_is_refused(headers: Headers) -> None:
    """CR, LF, NUL, non-tokens and contradicting lengths never reach the wire."""
    with pytest.raises(UnsafeRequest):
        encode(headers)


@pytest.mark.parametrize("target", [b"", b"v1", b"/a b", b"/a\r\nx: y", b"/a\n", b"/\0", b"http://other/"])
def test_a_broken_target_is_refused(target: bytes) -> None:
    """The request line has exactly two spaces."""
    with pytest.raises(UnsafeRequest):
        encode([], target=target)


@pytest.mark.parametrize("method", [b"", b"PO ST", b"GET / HTTP/1.1\r\nx:"])
def test_a_broken_method_is_refused(method: bytes) -> None:
    """The method is a token."""
    with pytest.raises(UnsafeRequest):
        encode([], method=method)


def test_chunked_without_a_body_is_refused() -> None:
    """It would leave the engine waiting for chunks that never come."""
    with pytest.raises(UnsafeRequest):
        encode([(b"transfer-encoding", b"chunked")], size=0, body=False)


def test_tabs_and_latin_values_pass() -> None:
    """Field values may hold what RFC 9110 5.5 lets them hold."""
    assert b"a: b\tc \xe9\r\n" in encode([(b"a", b"b\tc \xe9")])[0]


@pytest.mark.parametrize("size", [1, 5000, 64 * 1024, SLICE_BYTES, SLICE_BYTES + 1])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_not_copied(size: int, chunked: bool) -> None:
    """It goes to the kernel as the object it is, behind its head or piece by piece."""
    body = b"x" * size
    headers = [(b"transfer-encoding", b"chunked")] if chunked else []
    request = encode_request(ORIGIN, b"POST", target=b"/", headers=headers, body=body)
    assert request.replayable
    whole = b"".join(request.buffers).partition(b"\r\n\r\n")[2]
    if chunked:
        assert whole == b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
        assert request.length_bytes is None
    elif size <= SLICE_BYTES:
        assert whole == body
        assert request.length_bytes == size
    else:
        assert whole == b""
        assert request.upload() is not None
    assert any(piece is body for piece in request.buffers) == (chunked or 16 * 1024 < size <= SLICE_BYTES)


async def test_a_body_on_its_way_cannot_be_sent_again() -> None:
    """Its pieces are gone once they were sent."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"abc"

    request = encode_request(ORIGIN, b"POST", target=b"/", headers=[], body=pieces())
    assert not request.replayable
    assert request.length_bytes is None
    upload = request.upload()
    assert upload is not None
    assert [piece async for piece in upload] == [b"abc"]


def test_repeated_fields_stand_behind_those_of_the_request() -> None:
    """Encoded once, they are the same bytes in every head."""
    repeated = RepeatedFields([(b"a", b"b"), (b"c", b"d")])
    head, _ = encode_head(
        ORIGIN, b"POST", target=b"/", headers=[(b"x", b"y")], body_bytes=3, has_body=True, repeated=repeated
    )
    lines = [b"POST /base/ HTTP/1.1", b"host: engine:8000", b"x: y", b"content-length: 3", b"a: b", b"c: d", b"", b""]
    assert head == b"\r\n".join(lines)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"a", b"b\r\nx: y")],
        [(b"a", b"b\0")],
        [(b"a b", b"c")],
        [(b"", b"c")],
        [(b"host", b"a")],
        [(b"content-length", b"3")],
        [(b"transfer-encoding", b"chunked")],
    ],
)
def test_repeated_fields_are_as_safe(headers: Headers) -> None:
    """Nothing breaks out of its line, and neither host nor framing is said twice."""
    with pytest.raises(UnsafeRequest):
        RepeatedFields(headers)
