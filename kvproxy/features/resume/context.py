"""How many tokens a prompt and its answer may have together, by engine and model, as `/v1/models` lists it."""

from __future__ import annotations

import asyncio

import msgspec

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.errors import UpstreamError
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool
from kvproxy.cluster.endpoint import Endpoint

_PATH = b"/v1/models"
_TIMEOUTS = Timeouts(connect_s=1.0, first_byte_s=5.0, idle_s=5.0)
_MAX_LIST_BYTES = 256 * 1024
_MAX_ENGINES = 4096


class _Row(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _List(msgspec.Struct):
    data: list[_Row] = []


class ContextLengths:
    """Entered, it asks an engine at the first stream without a limit of its own."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._known: BoundedMapping[str, int | None] = BoundedMapping(_MAX_ENGINES)
        self._asking: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ContextLengths:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def find(self, endpoint: Endpoint) -> int | None:
        """Return the length of the endpoint's models; None while it is unknown."""
        key = str(endpoint.engine.id)
        if key not in self._known:
            self._known[key] = None
            task = asyncio.get_running_loop().create_task(self._ask(key, endpoint), name="ask for context length")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        return self._known.get(key)

    async def _ask(self, key: str, endpoint: Endpoint) -> None:
        own = endpoint.authorization
        headers = [(b"authorization", own)] if own is not None else []
        body = b""
        try:
            response = await self._pool.request(endpoint.origin, b"GET", _PATH, headers, None, timeouts=_TIMEOUTS)
            try:
                while len(body) <= _MAX_LIST_BYTES and (chunk := await response.next_chunk()):
                    body += chunk
            finally:
                response.abort()
            rows = msgspec.json.decode(body, type=_List).data
        except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError):
            self._known.pop(key, None)
            return
        lengths = [row.max_model_len for row in rows if row.max_model_len]
        self._known[key] = min(lengths, default=None)
