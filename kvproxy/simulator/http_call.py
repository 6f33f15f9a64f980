"""One HTTP exchange of a simulated server: reading, answering, streaming, noticing that the client left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = {"content-type": "application/json"}
EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8"}


class ClientGone(Exception):
    """The client closed the connection before it had sent its whole request."""


def encode_json(body: Any) -> bytes:
    """Compact JSON as FastAPI writes it."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


class HttpCall:
    """Wraps one ASGI HTTP scope. Header names are lower case; the body is read once, by `read`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.reply_headers: dict[str, str] = {}
        self._receive = receive
        self._send = send

    async def read(self) -> bytes:
        """The whole request body."""
        chunks = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(chunks)

    async def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """A complete answer."""
        await self.start(status, {**(headers or {}), "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body})

    async def reply_json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """A complete JSON answer."""
        await self.reply(status, encode_json(body), {**JSON, **(headers or {})})

    async def start(self, status: int, headers: dict[str, str]) -> None:
        """Sends the response head; `write` and `finish` follow."""
        fields = {**headers, **self.reply_headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        """One chunk of a streamed body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """The proper end of a streamed body. Returning without it makes the server break the connection."""
        await self._send({"type": "http.response.body", "body": b""})

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work` until it ends (True) or the client leaves, which cancels it (False). Call after `read`."""
        task = asyncio.create_task(work, name=f"simulated {self.path}")
        watcher = asyncio.create_task(self._disconnected(), name=f"disconnect {self.path}")
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done = task.done()
            task.cancel()
            watcher.cancel()
            await asyncio.wait({task, watcher})
        if done:
            task.result()
        return done

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
