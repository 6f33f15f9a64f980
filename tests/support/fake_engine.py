"""An engine that does what a test says, on a real socket, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

#: The proxy asks for these of its own accord.
_UNKNOWN = frozenset({"/metrics", "/version", "/kv_event_sources", "/server_info", "/get_server_info"})

Behaviour = Callable[["FakeEngine", "Call", Send], Awaitable[None]]


@dataclass
class Call:
    """One request as it arrived."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self, name: str) -> str | None:
        """Return the last value of a header."""
        return next((v.decode() for k, v in reversed(self.headers) if k == name.encode()), None)


async def answer_ok(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer with short JSON that names the engine."""
    usage = b'{"prompt_tokens":10,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}'
    await reply(send, 200, b'{"served_by":"%s","usage":%s}' % (engine.name.encode(), usage))


async def reply(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    """Send a whole answer."""
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def start_stream(send: Send) -> None:
    """Send the head of an event stream."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def event(send: Send, data: bytes) -> None:
    """One SSE event."""
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


class FakeEngine:
    """ASGI app. `behave` decides every answer and `calls` holds what came, the proxy's own questions aside.

    `listings` holds the questions for its models, which the proxy asks of its own accord too.
    """

    def __init__(self, name: str, behave: Behaviour = answer_ok, *, version: str = "") -> None:
        self.name = name
        self.behave = behave
        self.calls: list[Call] = []
        self.listings: list[Call] = []
        self.healthy = True
        self.version = version  # "": it does not report it
        self.versions_told = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            await reply(send, 200 if self.healthy else 503, b"")
            return
        if scope["path"] == "/version" and self.version:
            self.versions_told += 1
            await reply(send, 200, b'{"version":"%s"}' % self.version.encode())
            return
        if scope["path"] in _UNKNOWN:
            await reply(send, 404, b'{"detail":"Not Found"}')
            return
        call = Call(scope["method"], scope["path"], scope["query_string"], list(scope["headers"]))
        (self.listings if (call.method, call.path) == ("GET", "/v1/models") else self.calls).append(call)
        while True:
            message = await receive()
            call.body += message.get("body", b"")
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                break
        watcher = asyncio.create_task(self._watch(call, receive), name="fake engine watcher")
        try:
            await self.behave(self, call, send)
        finally:
            watcher.cancel()

    @staticmethod
    async def _watch(call: Call, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        call.gone.set()
