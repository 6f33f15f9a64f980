"""The parser of requests, without sockets: however the network cuts what a client sends, the same comes out of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.proxy.listener.parser import BadRequest, ListenerLimits, RequestParser
from tests.proxy.listener.requests import INVALID, Sent, cuts, valid_requests

BASE = {"type": "http", "scheme": "http"}


@dataclass
class Request:
    """The result of one request."""

    scope: dict[str, Any]
    keep_alive: bool
    expects_continue: bool
    pieces: list[bytes] = field(default_factory=list)
    complete: bool = False

    def body_arrived(self, pieces: Sequence[bytes], size_bytes: int, *, ended: bool = False) -> None:
        assert size_bytes == sum(map(len, pieces))
        assert not self.complete
        self.pieces += pieces
        self.complete = ended

    @property
    def told(self) -> tuple[Any, ...]:
        """Everything an app can see, however it was cut."""
        return self.scope, self.keep_alive, self.expects_continue, b"".join(self.pieces), self.complete


class Recorder:
    """An opener that keeps the requests, and the status of the refusal that ended them."""

    def __init__(self, limits: ListenerLimits | None = None) -> None:
        self.requests: list[Request] = []
        self.refusal = 0
        self.parser = RequestParser(self, limits or ListenerLimits(), base_scope=dict(BASE), root_path="")

    def open_request(self, scope: dict[str, Any], *, keep_alive: bool, expects_continue: bool) -> Request:
        self.requests.append(Request(scope, keep_alive, expects_continue))
        return self.requests[-1]

    def feed(self, *pieces: bytes) -> Recorder:
        for piece in pieces:
            try:
                if not self.refusal:
                    self.parser.feed(piece)
            except BadRequest as error:
                self.refusal = error.status
        return self

    @property
    def told(self) -> list[tuple[Any, ...]]:
        return [request.told for request in self.requests]


def is_as_sent(request: Request, sent: Sent) -> bool:
    return (
        request.complete
        and request.scope["method"] == sent.method
        and request.scope["headers"] == sent.headers
        and b"".join(request.pieces) == sent.body
        and request.keep_alive == sent.keep_alive
    )


@given(st.data())
def test_valid_requests_come_out_as_they_were_sent(data: st.DataObject) -> None:
    """Each whole and in order, alone in its read, in one read with others, or cut anywhere."""
    sent = data.draw(st.lists(valid_requests(), min_size=1, max_size=5))
    if data.draw(st.booleans()):
        sent.append(data.draw(valid_requests(last=True)))
    raw = b"".join(request.raw for request in sent)
    alone = Recorder().feed(*(request.raw for request in sent))
    assert len(alone.requests) == len(sent)
    assert all(map(is_as_sent, alone.requests, sent))
    assert Recorder().feed(raw).told == Recorder().feed(*data.draw(cuts(raw))).told == alone.told
    assert alone.refusal == 0


@given(st.data())
def test_bad_requests_are_refused_however_they_are_cut(data: st.DataObject) -> None:
    """Requests before them are complete, bytes behind them are nothing."""
    sent = data.draw(st.lists(valid_requests(), max_size=2))
    bad, status = data.draw(st.sampled_from(INVALID))
    raw = b"".join(request.raw for request in sent) + bad + data.draw(valid_requests()).raw
    whole, cut = Recorder().feed(raw), Recorder().feed(*data.draw(cuts(raw)))
    assert whole.refusal == cut.refusal == status
    assert all(map(is_as_sent, whole.requests, sent))
    assert all(map(is_as_sent, cut.requests, sent))
    assert sum(request.complete for request in whole.requests) == len(sent)
    assert sum(request.complete for request in cut.requests) == len(sent)


@given(st.data())
def test_noise_raises_nothing_but_bad_request(data: st.DataObject) -> None:
    """A valid request with bytes changed, removed and added: parsed or refused, and the same in pieces."""
    noisy = bytearray(
        b"".join(request.raw for request in data.draw(st.lists(valid_requests(), min_size=1, max_size=3)))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(noisy) - 1)))
        noisy[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    raw = bytes(noisy)
    whole, cut = Recorder().feed(raw), Recorder().feed(*data.draw(cuts(raw)))
    assert whole.refusal == cut.refusal
    assert [request for request in whole.told if request[-1]] == [request for request in cut.told if request[-1]]


@given(st.lists(st.tuples(st.sampled_from([b"/a", b"/b"]), st.binary(max_size=30), st.booleans()), min_size=3))
def test_a_repeated_head_is_what_it_was(requests: list[tuple[bytes, bytes, bool]]) -> None:
    """A client that repeats its head but for the length gets each request parsed as by a new connection."""
    one = Recorder()
    for target, body, split in requests:
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nX-A: 1\r\nContent-Length: %d\r\nX-B: 2\r\n\r\n" % (target, len(body))
        raw = head + body
        one.feed(*((raw[:40], raw[40:]) if split else (raw,)))
        assert one.requests[-1].told == Recorder().feed(raw).requests[0].told
    assert len(one.requests) == len(requests)


@pytest.mark.parametrize(
    "second",
    [
        b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nab",
        b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: +2\r\n\r\nab",
        b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: \r\n\r\nab",
        b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\nab",
        b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nabPOST /a HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["unfinished", "too much", "sign", "no number", "large", "two"],
)
def test_a_head_that_nearly_repeats_is_parsed(second: bytes) -> None:
    """Only a whole request with another plain number is taken for a repetition."""
    first = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok"
    known = Recorder().feed(first, first, second)
    fresh = Recorder().feed(second)
    assert known.told[2:] == fresh.told
    assert known.refusal == fresh.refusal


def test_the_apps_of_repeated_heads_share_no_state() -> None:
    """A filter may change its scope and the list of header fields."""
    raw = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok"
    recorder = Recorder()
    for _ in range(4):
        recorder.feed(raw)
        scope = recorder.requests[-1].scope
        assert scope["headers"] == [(b"host", b"x"), (b"content-length", b"2")]
        assert "mine" not in scope
        scope["mine"] = 1
        scope["headers"].clear()


def test_expect_is_heard_from_new_clients_only() -> None:
    """HTTP/1.0 has no interim answers (RFC 9110 10.1.1)."""
    raw = b"POST / HTTP/1.%d\r\nhost: x\r\nExpect: 100-Continue\r\ncontent-length: 2\r\n\r\n"
    assert [Recorder().feed(raw % n).requests[0].expects_continue for n in (0, 1)] == [False, True]


def test_bytes_after_the_last_request_are_dropped() -> None:
    """`connection: close` and HTTP/1.0 end the connection, whatever else is sent."""
    for raw in (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"):
        for behind in (raw, b"garbage", b"\0" * 1000):
            recorder = Recorder().feed(raw + behind, behind, behind)
            assert len(recorder.requests) == 1
            assert recorder.requests[0].complete
            assert not recorder.refusal
            assert recorder.parser.dropped_bytes >= 2 * len(behind)


def test_a_repeated_head_costs_no_parsing() -> None:
    """Kept connections save this: the second time on, nothing is called for each header field."""
    fields = b"".join(b"x-%d: 1\r\n" % n for n in range(50))
    raw = b"POST /a HTTP/1.1\r\nhost: x\r\n" + fields + b"content-length: 2\r\n\r\nok"
    recorder = Recorder()
    calls = [calls_of(lambda: recorder.feed(raw)) for _ in range(3)]
    assert calls[0] > 150
    assert calls[1] < 50
    assert calls[2] < 50


def calls_of(work: Callable[[], object]) -> int:
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
