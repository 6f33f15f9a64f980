"""What is read from the end of an answer on its way down."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from kvproxy.forward.relay import Relay
from kvproxy.request.downstream import Downstream
from kvproxy.request.exchange import Exchange
from kvproxy.upstream.response import UpstreamResponse
from tests.support.asgi import http_scope

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":500}}\n\n'
DONE = b"data: [DONE]\n\n"


class Arriving:
    """The pieces of one answer, each of which the relay takes before the next comes."""

    def __init__(self, *pieces: bytes) -> None:
        self.response = UpstreamResponse(self, asyncio.get_running_loop())
        self.response.status = 200
        self._pieces = list(pieces)

    def take(self) -> bytes:
        """The next one."""
        if self._pieces:
            return self._pieces.pop(0)
        self.response.finish(b"")
        return b""

    def cancel(self) -> None:
        """Nothing is left to come."""


async def nothing() -> Message:
    """A client that says nothing more."""
    raise AssertionError


async def ignore(message: Message) -> None:
    """A client that takes everything."""


@pytest.mark.parametrize(
    "end",
    [(USAGE + DONE,), (USAGE, DONE), (USAGE[:30], USAGE[30:], DONE), (USAGE[:50], USAGE[50:], DONE[:5], DONE[5:])],
)
async def test_usage_is_found_however_the_last_events_are_cut(end: tuple[bytes, ...]) -> None:
    """Packets end where they like, in the middle of a name too."""
    exchange = Exchange(received_at=0.0)
    first, *rest = [b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'] * 20
    headers = [(b"content-type", b"text/event-stream")]
    downstream = Downstream(exchange, http_scope(), nothing, ignore)
    relay = Relay(exchange, Arriving(*rest, *end).response, downstream=downstream, post=True)
    assert await relay.run(headers, first) is None
    assert (exchange.outcome.prompt_tokens, exchange.outcome.completion_tokens) == (1000, 500)
