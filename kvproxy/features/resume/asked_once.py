"""Facts that engines are asked for once, in the background, at the first stream that may need them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Generic, Self, TypeVar

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.errors import UpstreamDisconnected
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool
from kvproxy.cluster.endpoint import Endpoint

_MAX_ANSWER_BYTES = 256 * 1024
_MAX_FACTS = 4096
#: Nothing waits for an answer, and a busy engine is late.
_TIMEOUTS = Timeouts(connect_s=1.0, first_byte_s=60.0, idle_s=60.0)
#: Until an engine that gave no answer is asked again.
_AGAIN_S = 60.0

V = TypeVar("V")


class AskedOnce(Generic[V]):
    """One kind of fact, by key. Left, it asks no more."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._known: BoundedMapping[str, V | None] = BoundedMapping(_MAX_FACTS)
        self._asking: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def look_up(self, key: str, asked: Coroutine[None, None, V | None]) -> V | None:
        """Return the fact; None while it is unknown. `asked` finds it, if it was not asked for."""
        if key in self._known:
            asked.close()
        else:
            self._known[key] = None
            task = asyncio.get_running_loop().create_task(self._keep(key, asked), name="ask about resuming")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        return self._known.get(key)

    async def _keep(self, key: str, asked: Coroutine[None, None, V | None]) -> None:
        found = self._known[key] = await asked
        if found is None:
            asyncio.get_running_loop().call_later(_AGAIN_S, self._known.pop, key, None)

    async def fetch(self, endpoint: Endpoint, method: bytes, path: bytes, body: bytes) -> bytes:
        """Return the body of an engine's good answer. Raises UpstreamError."""
        headers = [(b"content-type", b"application/json")]
        if endpoint.authorization is not None:
            headers.append((b"authorization", endpoint.authorization))
        answer = b""
        response = await self._pool.request(endpoint.origin, method, path, headers, body or None, timeouts=_TIMEOUTS)
        try:
            while len(answer) <= _MAX_ANSWER_BYTES and (piece := await response.next_chunk()):
                answer += piece
        finally:
            response.abort()
        if response.status != 200:
            raise UpstreamDisconnected(f"the engine answers {response.status}")
        return answer
