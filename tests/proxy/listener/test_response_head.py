"""The head of a response, byte by byte, and what no head may hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.proxy.listener.cycle import encode_head

Headers = list[tuple[bytes, bytes]]


def encoded(
    headers: Headers, status: int = 200, *, bodiless: bool = False, http_1_0: bool = False, keep_alive: bool = True
) -> tuple[bytes, int | None, bool]:
    return encode_head(status, headers, bodiless=bodiless, http_1_0=http_1_0, keep_alive=keep_alive)


def test_names_are_written_in_lower_case() -> None:
    """As ASGI wants them, also where an app does not."""
    head, length_bytes, keep_alive = encoded([(b"Content-Length", b"3"), (b"X-A", b"B"), (b"x-a", b"c")], 201)
    assert head == b"HTTP/1.1 201 Created\r\ncontent-length: 3\r\nx-a: B\r\nx-a: c\r\n\r\n"
    assert (length_bytes, keep_alive) == (3, True)


@pytest.mark.parametrize(
    ("how", "framing"),
    [
        ({}, b"transfer-encoding: chunked\r\n"),
        ({"bodiless": True}, b""),
        ({"http_1_0": True, "keep_alive": False}, b"connection: close\r\n"),
        ({"keep_alive": False}, b"transfer-encoding: chunked\r\nconnection: close\r\n"),
    ],
)
@pytest.mark.parametrize("theirs", [[], [(b"Transfer-Encoding", b"gzip, chunked")]])
def test_framing_is_the_listeners(how: dict[str, bool], framing: bytes, theirs: Headers) -> None:
    """Whatever transfer coding the app says."""
    assert encoded(theirs, **how)[0] == b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n"


@pytest.mark.parametrize("value", [b"close", b"Close", b"x, close"])
def test_the_app_may_close(value: bytes) -> None:
    """And says it once."""
    head, _, keep_alive = encoded([(b"connection", value)], keep_alive=False)
    assert head.count(b"connection") == 1
    assert not keep_alive
    assert not encoded([(b"connection", value)])[2]
    assert encoded([(b"connection", b"keep-alive")])[2]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"", b"x")],
        [(b"a b", b"x")],
        [(b"a:", b"x")],
        [(b"a\r\nb", b"x")],
        [(b"a", b"x\r\nb: c")],
        [(b"a", b"x\r\n\r\n")],
        [(b"a", b"x\n")],
        [(b"a", b"x\ry")],
        [(b"a", b"x\0")],
        [(b"a", b"\x7f")],
        [(b"caf\xc3\xa9", b"x")],
        [(b"content-length", b"3"), (b"content-length", b"3")],
        [(b"Content-Length", b"3"), (b"content-length", b"4")],
        *[[(b"content-length", value)] for value in (b"", b"-1", b"+1", b" 1", b"1_0", b"0x1", b"1" * 19)],
    ],
)
def test_invalid_heads(headers: Headers) -> None:
    """Nothing that could be read as another field, another response, or another length."""
    with pytest.raises(RuntimeError):
        encoded(headers)


@pytest.mark.parametrize("status", [0, 99, 100, 101, 199, 600, 1000])
def test_no_response_has_such_a_status(status: int) -> None:
    """Interim answers are the listener's business."""
    with pytest.raises(RuntimeError):
        encoded([], status)


@given(st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=12)), max_size=4), st.integers(200, 599))
def test_a_head_is_one_head(headers: Headers, status: int) -> None:
    """Refused, or as many lines as fields and one status line, and one end."""
    try:
        head = encoded(headers, status, bodiless=True)[0]
    except RuntimeError:
        return
    assert head.index(b"\r\n\r\n") == len(head) - 4
    _, *lines = head[:-4].split(b"\r\n")
    kept = [(name.lower(), value) for name, value in headers if name.lower() != b"transfer-encoding"]
    assert [tuple(line.split(b": ", 1)) for line in lines] == kept
