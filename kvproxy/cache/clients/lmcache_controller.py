"""The LMCache controller (0.3.0 to 0.5.x) and stand-ins for it, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

from kvproxy.base.errors import NotSupported, Refused, TooManyWaiting
from kvproxy.cache.clients.api import ServiceClient
from kvproxy.cache.clients.lmcache_controller_wire import (
    ActionResult,
    Holder,
    KeyStats,
    WireAction,
    WireLookup,
    classify_refusal,
)
from kvproxy.cache.clients.tokens import TokenIds, body_with_tokens

T = TypeVar("T")

#: The only chunk size the controller can look up; a shorter prompt never matches.
CHUNK_TOKENS = 256
_MAX_LOOKUP_BYTES = 1 << 18


class LMCacheControllerClient(ServiceClient):
    """One controller. Every method raises ClientError and nothing else; nothing is retried here.

    Calls that reach a worker go one at a time per instance (the controller breaks parallel ones) and wait their turn
    in a bounded line; a dead worker makes the controller hang for ever, so `action_timeout_s` bounds each once sent.
    """

    service = "lmcache controller"

    #: Whether the controller has `/evict` (no real one does): None until tried, False for good after a 404.
    evicts: bool | None = None

    @cached_property
    def _serial(self) -> KeyedLock:
        """One call at a time to each instance."""
        return KeyedLock()

    async def lookup(self, tokens: TokenIds, *, timeout_s: float | None = None) -> tuple[Holder, ...]:
        """Return the instances that hold chunks of this prompt; () if none does, or the prompt is shorter
        than a chunk."""
        body = body_with_tokens("tokens", tokens, {})
        timeout_s = timeout_s or self._lookup_timeout_s
        answer = await self._api.post("/lookup", body, WireLookup, timeout_s=timeout_s, max_bytes=_MAX_LOOKUP_BYTES)
        return answer.read_holders()

    async def pin(self, instance_id: str, tokens: TokenIds, *, location: str) -> ActionResult:
        """Protects the prompt's chunks from eviction until the engine's pin timeout (300 s); there is no unpin."""
        return await self._token_action("/pin", instance_id, tokens, _at(location))

    async def compress(
        self, instance_id: str, tokens: TokenIds, *, location: str, method: str = "cachegen"
    ) -> ActionResult:
        """Compress the prompt's chunks in place. Real engines support `cachegen` only; others have no effect."""
        return await self._token_action("/compress", instance_id, tokens, {"method": method, **_at(location)})

    async def decompress(
        self, instance_id: str, tokens: TokenIds, *, location: str, method: str = "cachegen"
    ) -> ActionResult:
        """Undoes `compress`."""
        return await self._token_action("/decompress", instance_id, tokens, {"method": method, **_at(location)})

    async def evict(self, instance_id: str, tokens: TokenIds) -> ActionResult:
        """Drop the prompt's chunks, where the controller has such a call; NotSupported, without a call, once known."""
        if self.evicts is False:
            raise NotSupported("lmcache controller /evict: not offered", status=404)
        try:
            result = await self._token_action("/evict", instance_id, tokens, {})
        except NotSupported as error:
            self.evicts = False if error.status == 404 else self.evicts
            raise
        self.evicts = True
        return result

    async def clear(self, instance_id: str, *, location: str) -> ActionResult:
        """Drop everything unpinned in one location of the instance, whatever the prompt."""
        body = {"instance_id": instance_id, **_at(location)}
        return (await self._worker_call("/clear", (instance_id,), body, WireAction)).read_result()

    async def move(
        self, source: tuple[str, str], target: tuple[str, str], tokens: TokenIds, *, copy: bool = True
    ) -> ActionResult:
        """Copy (or moves) the prompt's chunks between (instance, location) pairs; needs P2P on both engines."""
        # `copy` is the name of should_copy before 0.3.11; all versions ignore unknown fields.
        others = {"old_position": source, "new_position": target, "should_copy": copy, "copy": copy}
        body = body_with_tokens("tokens", tokens, others)
        return (await self._worker_call("/move", (source[0], target[0]), body, WireAction)).read_result()

    async def key_stats(self) -> KeyStats:
        """Size of the index, live; also the controller's readiness probe (it has no GET /health)."""
        return await self._api.get("/controller/key-stats", KeyStats, timeout_s=self._lookup_timeout_s)

    async def _token_action(
        self, path: str, instance_id: str, tokens: TokenIds, others: Mapping[str, Any]
    ) -> ActionResult:
        body = body_with_tokens("tokens", tokens, {"instance_id": instance_id, **others})
        return (await self._worker_call(path, (instance_id,), body, WireAction)).read_result()

    async def _worker_call(self, path: str, instances: tuple[str, ...], body: Any, answer: type[T]) -> T:
        async with self._serial.hold_keys(*instances):
            try:
                return await self._api.post(path, body, answer, timeout_s=self._action_timeout_s)
            except Refused as error:
                raise classify_refusal(error, detail=str(error)) from error


def _at(location: str) -> dict[str, Any]:
    """`location`, and the list that versions before 0.3.5 read instead."""
    return {"location": location, "locations": [location]}


class KeyedLock:
    """A fair lock per key. At most `max_waiting` callers wait for one key; further ones are refused at once.

    A key costs memory only while it is held or awaited. How long one call may hold it is the call's own timeout.
    """

    def __init__(self, *, max_waiting: int = 16) -> None:
        self.max_waiting = max_waiting
        self._lines: dict[str, _Line] = {}

    @contextlib.asynccontextmanager
    async def hold_keys(self, *keys: str) -> AsyncIterator[None]:
        """Hold every key (in one global order, so that two callers cannot wait for each other).

        Raises TooManyWaiting when the line for one of them is full.
        """
        async with contextlib.AsyncExitStack() as stack:
            for key in sorted(set(keys)):
                await stack.enter_async_context(self._hold_one(key))
            yield

    @contextlib.asynccontextmanager
    async def _hold_one(self, key: str) -> AsyncIterator[None]:
        line = self._lines.setdefault(key, _Line())
        if line.callers > self.max_waiting:
            raise TooManyWaiting(f"{self.max_waiting} calls wait for {key} already")
        line.callers += 1
        try:
            async with line.lock:
                yield
        finally:
            line.callers -= 1
            if line.callers == 0:
                del self._lines[key]


class _Line:
    """The lock of one key and how many callers hold or await it."""

    __slots__ = ("callers", "lock")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.callers = 0
