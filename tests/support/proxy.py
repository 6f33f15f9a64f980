"""A whole proxy on loopback in front of given upstream URLs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec
from starlette.types import Message

from kvproxy.app import Proxy
from kvproxy.base.types import Clock
from kvproxy.operate.companion import Siblings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server


@dataclass
class RunningProxy:
    """A proxy that serves, and a client that talks to it."""

    proxy: Proxy
    url: str
    client: httpx.AsyncClient

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample's value; 0 when it was never counted."""
        return self.proxy.metrics.registry.get_sample_value(name, labels) or 0.0


#: A machine that stands still for seconds is no engine that takes no connections.
PATIENT = {"timeouts": {"connect": 60.0}}


@contextlib.asynccontextmanager
async def running_proxy(
    endpoints: Mapping[str, str] | list[dict[str, Any]],
    *,
    siblings: Siblings | None = None,
    ahead_s: float = 0.0,
    clock: Clock = time.monotonic,
    **config: Any,
) -> AsyncIterator[RunningProxy]:
    """`config` is native configuration besides the endpoints; probes are off unless it says otherwise. With `siblings`
    it is one of several workers of a machine. Its clocks are `ahead_s` ahead of `clock` and of the wall clock here."""
    raw: dict[str, Any] = {"endpoints": endpoints, "policy": "round_robin", "health": {"active": False}, **PATIENT}
    raw |= config
    drain_s = 2.0
    async with (
        Proxy(
            load_config(raw),
            siblings=siblings,
            clock=lambda: clock() + ahead_s,
            wall_clock=lambda: datetime.now(UTC) + timedelta(seconds=ahead_s),
        ) as proxy,
        Server(proxy, drain_s=drain_s) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        yield RunningProxy(proxy, server.url, client)


def chat(content: str = "hello", *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """Return a chat completion body."""
    return {"model": "m", "messages": [{"role": "user", "content": content}], "stream": stream, **fields}


async def ask_in_process(
    proxy: RunningProxy, asked: Mapping[str, Any] | None = None, *, path: str = "/v1/chat/completions"
) -> None:
    """Send a request, or a chat, without a socket, whose task can be cancelled. Its client stays for ever."""
    body = [{"type": "http.request", "body": msgspec.json.encode(asked or chat())}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    headers = [(b"host", b"x"), (b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
             "raw_path": path.encode(), "query_string": b"", "headers": headers,
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}  # fmt: skip
    await proxy.proxy(scope, receive, send)
