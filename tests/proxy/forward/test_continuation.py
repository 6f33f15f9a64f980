"""Streams that break and go on with another engine: who is asked, and what the client gets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from starlette.types import Message, Send

from kvproxy.base.errors import EngineReportedError, UpstreamError
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.pick import Pick
from kvproxy.proxy.request.continuation import Leg
from kvproxy.proxy.request.exchange import SCOPE_KEY, Exchange
from tests.support.fake_engine import Call, FakeEngine, event, reply, start_stream
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, chat, running_proxy

PATH = "/v1/chat/completions"
ERROR = b'data: {"error": {"message": "dead", "code": 500}}\n\n'


class Following:
    """Passes everything on but an error event, and asks for the rest by a body of its own."""

    member = b'"marked":1,'

    def __init__(self, leg: Leg | None) -> None:
        self.leg = leg
        self.failure: UpstreamError | None = None
        self.withheld = b""
        self.endpoints: list[str] = []
        self.errors: list[str] = []
        self.refusals: list[str] = []
        self.asked: list[tuple[bytes, bytes | None]] = []

    def follow(self, pick: Pick, response: UpstreamResponse, *, target: bytes, body: bytes | None) -> bool:
        self.asked.append((target, body))
        self.endpoints.append(pick.endpoint.id)
        self.failure = None
        self.withheld = b""
        return True

    def next_piece(self, piece: bytes) -> bytes:
        good, mark, _ = piece.partition(b'data: {"error"')
        if mark:
            self.failure = EngineReportedError("dead")
            self.withheld = ERROR
        return good

    def finish(self, rest: bytes) -> bytes:
        return self.next_piece(rest)

    def next_leg(self, error: UpstreamError, *, debug: bool) -> Leg | None:
        self.errors.append(error.reason)
        self.member = b""
        return self.leg

    def refuse(self, reason: str) -> None:
        self.refusals.append(reason)


async def breaks_off(engine: FakeEngine, call: Call, send: Send) -> None:
    """Send two events and close the connection."""
    await start_stream(send)
    await event(send, b'{"n":1}')
    await event(send, b'{"n":2}')
    raise ConnectionResetError


async def reports_error(engine: FakeEngine, call: Call, send: Send) -> None:
    """Send an event and an error event, and end in order."""
    await start_stream(send)
    await event(send, b'{"n":1}')
    await event(send, b'{"n":2}')
    await send({"type": "http.response.body", "body": ERROR + b"data: [DONE]\n\n"})


async def goes_on(engine: FakeEngine, call: Call, send: Send) -> None:
    """Send the rest."""
    await start_stream(send)
    await event(send, b'{"n":3}')
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@contextlib.asynccontextmanager
async def gateway(*engines: FakeEngine, **config: object) -> AsyncIterator[RunningProxy]:
    """Run a proxy before these engines, asked in turn."""
    async with contextlib.AsyncExitStack() as stack:
        urls = {engine.name: await stack.enter_async_context(serve(engine)) for engine in engines}
        yield await stack.enter_async_context(running_proxy(urls, **config))


async def ask(proxy: RunningProxy, following: Following) -> tuple[bytes, Exchange]:
    """Send a streamed chat whose exchange has this continuation; return the answer's body."""
    exchange = Exchange(received_at=time.monotonic(), continuation=following)
    requests = [{"type": "http.request", "body": msgspec.json.encode(chat(stream=True))}]
    pieces: list[bytes] = []

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        pieces.append(message.get("body", b""))

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": PATH,
             "raw_path": PATH.encode(), "query_string": b"", "headers": [(b"host", b"x")],
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), SCOPE_KEY: exchange}  # fmt: skip
    await proxy.proxy(scope, receive, send)
    return b"".join(pieces), exchange


LEG = Leg(b"/v1/completions", b'{"rest":true}')


@pytest.mark.parametrize(("dies", "reason"), [(breaks_off, "upstream_disconnected"), (reports_error, "engine_error")])
async def test_another_engine_is_asked_for_the_rest(dies, reason: str) -> None:  # type: ignore[no-untyped-def]
    """However the stream broke, the client gets one stream."""
    a, b = FakeEngine("a", dies), FakeEngine("b", goes_on)
    following = Following(LEG)
    async with gateway(a, b) as proxy:
        body, exchange = await ask(proxy, following)
    assert body == b'data: {"n":1}\n\ndata: {"n":2}\n\ndata: {"n":3}\n\ndata: [DONE]\n\n'
    assert (following.errors, following.endpoints) == ([reason], ["a", "b"])
    assert following.asked[0][0] == PATH.encode()
    assert msgspec.json.decode(a.calls[0].body)["marked"] == 1
    assert (b.calls[0].path, b.calls[0].body) == ("/v1/completions", b'{"rest":true}')
    outcome = exchange.outcome
    assert (outcome.end, outcome.endpoint, outcome.attempts, outcome.status) == ("completed", "b", 2, 200)


async def test_a_move_is_no_retry() -> None:
    """A stream that leaves an engine by an operator's wish goes on where no attempt and no budget is left."""
    for leg, expected in ((LEG, ["a"]), (LEG._replace(moved=True), ["a", "b"])):
        following = Following(leg)
        a, b = FakeEngine("a", breaks_off), FakeEngine("b", goes_on)
        async with gateway(a, b, retry={"attempts": 1, "budget": 0.0, "min_per_second": 0}) as proxy:
            await ask(proxy, following)
            assert following.endpoints == expected
            assert following.refusals == ([] if leg.moved else ["attempts"])


async def test_an_endpoint_where_the_stream_broke_is_not_asked_again() -> None:
    """Not even if there is no other."""
    a = FakeEngine("a", breaks_off)
    async with gateway(a) as proxy:
        body, exchange = await ask(proxy, Following(LEG))
    assert len(a.calls) == 1
    assert body.endswith(b"data: [DONE]\n\n")
    assert b'"code":"upstream_disconnected"' in body
    assert exchange.outcome.end == "upstream_died"


async def test_a_stream_that_cannot_go_on_ends_with_an_error_event() -> None:
    """Its continuation has no leg."""
    a, b = FakeEngine("a", breaks_off), FakeEngine("b", goes_on)
    async with gateway(a, b) as proxy:
        body, exchange = await ask(proxy, Following(None))
    assert not b.calls
    assert b"The engine failed in the middle of this response" in body
    assert exchange.outcome.end == "upstream_died"


async def test_the_engines_own_error_is_passed_on_if_none_goes_on() -> None:
    """As without a continuation."""
    a, b = FakeEngine("a", reports_error), FakeEngine("b", goes_on)
    async with gateway(a, b) as proxy:
        body, exchange = await ask(proxy, Following(None))
    assert body == b'data: {"n":1}\n\ndata: {"n":2}\n\n' + ERROR
    assert exchange.outcome.end == "engine_error"


async def test_no_leg_is_sent_beyond_the_retry_budget() -> None:
    """An outage is not multiplied."""
    a, b = FakeEngine("a", breaks_off), FakeEngine("b", goes_on)
    following = Following(LEG)
    async with gateway(a, b, retry={"budget": 0.0, "min_per_second": 0}) as proxy:
        body, _ = await ask(proxy, following)
    assert not b.calls
    assert following.refusals == ["budget"]
    assert b"The engine failed in the middle of this response" in body


async def test_no_third_engine_is_asked_where_two_were_lost() -> None:
    """The prompt itself may kill them."""
    a, b, c = FakeEngine("a", breaks_off), FakeEngine("b", breaks_off), FakeEngine("c", goes_on)
    following = Following(LEG)
    async with gateway(a, b, c, retry={"attempts": 5, "min_per_second": 10}) as proxy:
        body, exchange = await ask(proxy, following)
    assert (following.endpoints, following.refusals) == (["a", "b"], ["engines_lost"])
    assert not c.calls
    assert b"The engine failed in the middle of this response" in body
    assert exchange.outcome.end == "upstream_died"


async def test_a_leg_that_fails_before_its_first_byte_is_tried_elsewhere() -> None:
    """As every request."""

    async def refuses(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 503, b"{}")

    a, b, c = FakeEngine("a", breaks_off), FakeEngine("b", refuses), FakeEngine("c", goes_on)
    async with gateway(a, b, c, retry={"attempts": 3, "min_per_second": 10}) as proxy:
        body, exchange = await ask(proxy, Following(LEG))
    assert body.endswith(b'data: {"n":3}\n\ndata: [DONE]\n\n')
    assert exchange.outcome.endpoint == "c"
