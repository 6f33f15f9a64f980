"""A client connection under anything a client may send: requests good and bad, cut anywhere, left at any time."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.base.types import CONNECTION
from kvproxy.proxy.listener.parser import ListenerLimits
from tests.proxy.listener.requests import INVALID, Sent, cuts, valid_requests
from tests.proxy.listener.wire import Wire
from tests.support.until import until

FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
_RESPONSE = re.compile(
    rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n(?:[^\r\n]+\r\n)*?content-length: (\d+)\r\n(?:[^\r\n]+\r\n)*\r\n"
)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def run(work: Coroutine[Any, Any, None], quiet: pytest.LogCaptureFixture) -> None:
    """On a loop of its own; an exception that was not caught, or a line in the log, is a failure."""
    problems: list[Any] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        await work

    asyncio.run(watched())
    assert not problems
    assert not quiet.records


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers what was asked, by one of the ways a request can be read and answered."""
    client = scope[CONNECTION]
    body = client.take_body() if len(scope["raw_path"]) % 2 else None
    if body is None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
    text = b"%b %b %b" % (scope["method"].encode(), scope["raw_path"], body)
    headers = [(b"content-length", b"%d" % len(text))]
    if len(body) % 2:
        client.start(200, headers, text[:3], more=True)
        client.write(text[3:], more=False)
    else:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


def answer_to(sent: Sent) -> bytes:
    path = sent.target.removeprefix(b"http://h").partition(b"?")[0]
    return b"%b %b %b" % (sent.method.encode(), path, sent.body)


def responses_in(output: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each; nothing may be left over."""
    found, at = [], 0
    while match := _RESPONSE.match(output, at):
        at = match.end() + int(match[2])
        found.append((int(match[1]), output[match.end() : at]))
    assert at == len(output), output[at:]
    return found


@FUZZ
@given(st.data())
def test_every_good_request_is_answered_in_order(quiet: pytest.LogCaptureFixture, data: st.DataObject) -> None:
    """Whatever the packets, and whether or not the client waits for answers."""
    sent = data.draw(st.lists(valid_requests(), min_size=1, max_size=6))
    if data.draw(st.booleans()):
        sent.append(data.draw(valid_requests(last=True)))
    pieces = data.draw(cuts(b"".join(request.raw for request in sent)))
    patient = data.draw(st.booleans())

    async def work() -> None:
        wire = Wire(echo)
        await wire.say(pieces, patient=patient)
        assert responses_in(wire.output) == [(200, answer_to(request)) for request in sent]
        assert wire.closing == (not sent[-1].keep_alive)
        wire.leave()
        await wire.settle()
        assert not wire.state.tasks
        assert not wire.state.connections

    run(work(), quiet)


@FUZZ
@given(st.data())
def test_a_bad_request_ends_the_connection(quiet: pytest.LogCaptureFixture, data: st.DataObject) -> None:
    """With its status, behind whole answers to requests before it; nothing behind it is answered."""
    sent = data.draw(st.lists(valid_requests(), max_size=3))
    bad, status = data.draw(st.sampled_from(INVALID))
    raw = b"".join(request.raw for request in sent) + bad + data.draw(valid_requests()).raw
    pieces = data.draw(cuts(raw))
    patient = data.draw(st.booleans())

    async def work() -> None:
        wire = Wire(echo, ListenerLimits(linger_s=0.01))
        await wire.say(pieces, patient=patient)
        *before, last = responses_in(wire.output)
        assert last[0] == status
        assert before == [(200, answer_to(request)) for request in sent][: len(before)]
        assert wire.ended or wire.closing
        wire.leave()
        await wire.settle()
        assert not wire.state.tasks

    run(work(), quiet)


@FUZZ
@given(st.data())
def test_a_client_may_leave_at_any_time(quiet: pytest.LogCaptureFixture, data: st.DataObject) -> None:
    """By closing one direction or both, in the middle of anything: nothing stays behind, and nothing is logged."""
    sent = data.draw(st.lists(valid_requests(), min_size=1, max_size=3))
    raw = b"".join(request.raw for request in sent)
    pieces = data.draw(cuts(raw[: data.draw(st.integers(0, len(raw)))]))
    half = data.draw(st.booleans())

    async def work() -> None:
        wire = Wire(echo)
        await wire.say(pieces)
        if half:
            wire.protocol.eof_received()
            wire.close()
        else:
            wire.leave()
        await wire.settle()
        assert wire.gone
        assert not wire.state.tasks
        assert not wire.state.connections

    run(work(), quiet)


@FUZZ
@given(st.data())
def test_no_bytes_upset_the_listener(quiet: pytest.LogCaptureFixture, data: st.DataObject) -> None:
    """Requests with bytes changed, removed and added: whole responses, or a connection that ends."""
    noisy = bytearray(
        b"".join(request.raw for request in data.draw(st.lists(valid_requests(), min_size=1, max_size=3)))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(noisy) - 1)))
        noisy[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    pieces = data.draw(cuts(bytes(noisy)))

    async def work() -> None:
        wire = Wire(echo, ListenerLimits(linger_s=0.01))
        await wire.say(pieces)
        if not wire.closing or wire.ended:
            responses_in(wire.output.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""))
        wire.leave()
        await wire.settle()
        assert not wire.state.tasks

    run(work(), quiet)


async def test_batches_are_held_as_bytes() -> None:
    """A client that pipelines behind a slow answer costs what it sent, not a request object for each."""
    started = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal started
        started += 1
        if started == 1:
            await go.wait()
        scope[CONNECTION].start(200, [(b"content-length", b"2")], b"ok", more=False)

    go = asyncio.Event()
    many = 8000
    wire = Wire(app)
    gc.collect()
    before = len(gc.get_objects())
    wire.protocol.data_received(b"GET / HTTP/1.1\r\nhost:x\r\n\r\n" * many)
    assert not wire.reading
    assert len(gc.get_objects()) - before < 3000
    go.set()
    async with asyncio.timeout(60):
        await until(lambda: started == many)
    await wire.settle()
    assert len(responses_in(wire.output)) == many
    assert wire.reading
    wire.leave()
    await wire.settle()


@pytest.mark.parametrize("how", ["idle", "half-closed", "closed behind its answer", "lingering"])
async def test_a_client_that_takes_nothing_cannot_keep_a_closed_connection(how: str) -> None:
    """Closing waits for what was written to go out, but not for ever."""
    keep = 0.01 if how == "idle" else 0.0
    wire = Wire(echo, ListenerLimits(keep_alive_s=keep, stall_timeout_s=0.03, linger_s=0.01))
    wire.stuck_bytes = 5
    close = b"connection: close\r\n" if "behind" in how else b""
    await wire.say([b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % close])
    if how == "half-closed":
        wire.protocol.eof_received()
        wire.close()
    elif how == "lingering":
        await wire.say([b"\0\0\0"])
        assert wire.ended
        wire.stuck_bytes = 0
    async with asyncio.timeout(60):
        await until(lambda: wire.gone)
    await wire.settle()
    assert not wire.state.connections


async def test_a_connection_leaves_no_reference_cycle() -> None:
    """Protocol, parser and requests are gone with the connection, without the garbage collector."""
    gc.disable()
    try:
        wire = Wire(echo)
        await wire.say([b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok"] * 3)
        wire.leave()
        await wire.settle()
        protocol = weakref.ref(wire.protocol)
        del wire.protocol
        wire.loop.call_soon(lambda: None)
        await asyncio.sleep(0)
        assert protocol() is None
    finally:
        gc.enable()
