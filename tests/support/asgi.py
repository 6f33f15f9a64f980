"""Calling an ASGI app by hand: what was sent, without a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.proxy.request.exchange import SCOPE_KEY, Exchange

Pairs = Iterable[tuple[bytes, bytes]]


def http_scope(path: str = "/v1/models", *, method: str = "GET", headers: Pairs = (), **more: Any) -> dict[str, Any]:
    """Return the scope of one request, as a server makes it."""
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": list(headers),
        "client": ("192.0.2.7", 40000),
        "scheme": "http",
        **more,
    }


@dataclass
class Reply:
    """Everything an app sent for one request."""

    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0 when nothing was sent."""
        return self.messages[0]["status"] if self.messages else 0

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages[1:])

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


@dataclass
class Inner:
    """An app at the end of a chain: answers 200 with `chunks`, and remembers what reached it."""

    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    chunks: tuple[bytes, ...] = (b"ok",)
    reads: bool = True
    scopes: list[Scope] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["type"] != "http":
            return
        body, more = b"", self.reads
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def exchange(self) -> Exchange:
        """The exchange of the last request."""
        exchange = self.scopes[-1][SCOPE_KEY]
        assert isinstance(exchange, Exchange)
        return exchange


async def call(app: ASGIApp, scope: Scope, *messages: Message, body: bytes = b"") -> Reply:
    """Return the app's reply to a request whose body is `body`, or to exactly `messages` and then a disconnect."""
    waiting = list(messages) or [{"type": "http.request", "body": body, "more_body": False}]
    reply = Reply()

    async def receive() -> Message:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        reply.messages.append(message)

    await app(scope, receive, send)
    return reply
