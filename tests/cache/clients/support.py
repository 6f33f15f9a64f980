"""Captured answers, and an httpx client that gives them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

FIXTURES = Path(__file__).parents[2] / "fixtures"

Handler = Callable[[httpx.Request], httpx.Response]


def captures(name: str) -> list[dict[str, Any]]:
    """Exchanges with a real vLLM under this name."""
    lines = (FIXTURES / "vllm_http/api.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["name"] == name]


def captured(name: str, *, status: int | None = None) -> httpx.Response:
    """Return the captured answer of that name (and status)."""
    entry = next(entry for entry in captures(name) if status in (None, entry["status"]))
    return httpx.Response(entry["status"], headers=entry["headers"], text=entry["body"])


class Upstream:
    """Answers every request from `handler`, and remembers them."""

    def __init__(self, handler: Handler | httpx.Response) -> None:
        self.requests: list[httpx.Request] = []
        self._handler = handler
        self.http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    @property
    def body(self) -> Any:
        """The last request's JSON."""
        return json.loads(self.requests[-1].content)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self._handler if isinstance(self._handler, httpx.Response) else self._handler(request)


class Endless(httpx.AsyncByteStream):
    """A body that never ends; counts what was taken of it."""

    def __init__(self, chunk: bytes = b"x" * 65536) -> None:
        self.chunk = chunk
        self.taken_bytes = 0
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.taken_bytes += len(self.chunk)
            yield self.chunk

    async def aclose(self) -> None:
        self.closed = True
