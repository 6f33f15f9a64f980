"""The LMCache controller (0.3.0 to 0.5.x) and stand-ins for it, over HTTP, in every shape that they answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import httpx
import msgspec

from kvproxy.base.errors import InstanceBusy, NotSupported, Refused, TooManyWaiting, UnknownInstance
from kvproxy.cache.clients.api import Api
from kvproxy.cache.clients.tokens import body_with_tokens
from kvproxy.cache.store import ActionKind, Holder, Prefix, TierMemory
from kvproxy.features.lmcache.provider import CONTROLLER, Effect
from kvproxy.features.lmcache.settings import StrategySettings

#: The only chunk size the controller can look up; a shorter prompt never matches.
CHUNK_TOKENS = 256
#: Host memory, as the controller calls it.
MEMORY = "LocalCPUBackend"
#: Instances named for one prompt; more than any fleet has.
MAX_HOLDERS = 1024
_MAX_LOOKUP_BYTES = 1 << 18

_PATHS = {
    ActionKind.PIN: "/pin",
    ActionKind.COMPRESS: "/compress",
    ActionKind.DECOMPRESS: "/decompress",
    ActionKind.EVICT: "/evict",
    ActionKind.CLEAR: "/clear",
    ActionKind.TRANSFER: "/move",
}

_Tokens = Annotated[int, msgspec.Meta(ge=0)]


class _NumberedPlace(msgspec.Struct):
    location: str = msgspec.field(name="0")
    tokens: _Tokens = msgspec.field(name="1")


class WireLookup(msgspec.Struct):
    """`layout_info` values: `[location, tokens]`, or a stand-in's `{"0": location, "1": tokens}`."""

    layout_info: Annotated[dict[str, tuple[str, _Tokens] | _NumberedPlace], msgspec.Meta(max_length=MAX_HOLDERS)]

    def read_holders(self) -> list[Holder]:
        """Holders in the controller's order (that of the chunks, not of the match length). A chunk's first holder alone
        is named, and each holder's last chunk: only a sole holder surely has a prefix, because the search ends at the
        first chunk without a holder."""
        sole = len(self.layout_info) == 1
        return [
            Holder(instance, place[1] if isinstance(place, tuple) else place.tokens, sole)
            for instance, place in self.layout_info.items()
        ]


class _Action(msgspec.Struct):
    """Success is `num_tokens > 0`, not the status: a wrong location answers 200 with 0. Before 0.3.5 there was
    `success`, or nothing of either."""

    num_tokens: _Tokens | None = None
    success: bool | None = None

    @property
    def effect(self) -> Effect:
        """Tokens; of an older controller 1 or 0."""
        number = self.num_tokens
        return Effect(int(self.success) if number is None and self.success is not None else number)


class _Instance(msgspec.Struct):
    instance_id: str


class _KeyStats(msgspec.Struct):
    """The index in numbers. Empty for long while engines work: hash, heartbeat or chunk size mismatch."""

    total_key_count: int
    instances: tuple[_Instance, ...] = ()


class LMCacheController:
    """The controller: a hint at holders, pins that lapse by themselves after the engine's pin timeout (300 s), no
    eviction of a single prefix. Every method raises ClientError and nothing else; nothing is retried here.

    Calls that reach a worker go one at a time per instance (the controller breaks parallel ones) and wait their turn
    in a bounded line; a dead worker makes the controller hang for ever, so `timeout_s` bounds each once sent. `places`
    are the locations of actions.
    """

    source = CONTROLLER
    copies = True

    def __init__(
        self,
        http: httpx.AsyncClient,
        base_url: str,
        *,
        places: StrategySettings = StrategySettings(),
        timeout_s: float = 2.0,
    ) -> None:
        self._api = Api(http, base_url, service="lmcache controller")
        self._places = places
        self._timeout_s = timeout_s
        self._serial = KeyedLock()
        #: Whether the controller has `/evict` (no real one does): None until tried, False for good after a 404.
        self.evicts: bool | None = None

    @property
    def supports(self) -> frozenset[ActionKind]:
        """Eviction counts as supported until the controller reports that it has no such call."""
        return frozenset(_PATHS) - ({ActionKind.EVICT} if self.evicts is False else set())

    async def lookup(self, prefix: Prefix) -> list[Holder]:
        """Return the instances that hold chunks of this prompt; none if it is shorter than a chunk."""
        body = body_with_tokens("tokens", prefix.tokens, {})
        answer = await self._api.post(
            "/lookup", body, WireLookup, timeout_s=self._timeout_s, max_bytes=_MAX_LOOKUP_BYTES
        )
        return answer.read_holders()

    async def act(self, kind: ActionKind, instance_id: str, prefix: Prefix, *, source: str = "") -> Effect:
        """Pin, compress in place, undo that, or drop the prompt's chunks; `CLEAR`: drop all that is not pinned; copy
        the chunks from the memory of `source`, which needs P2P on both engines."""
        if kind not in self.supports:
            raise NotSupported(f"lmcache controller: {kind} is not offered", status=404)
        if kind is ActionKind.TRANSFER and not source:
            raise NotSupported("lmcache controller: a transfer needs the instance that it comes from", status=404)
        fields = self._fields_of(kind, instance_id, source)
        body = fields if kind is ActionKind.CLEAR else body_with_tokens("tokens", prefix.tokens, fields)
        async with self._serial.hold_keys(instance_id, source or instance_id):
            try:
                answer = await self._api.post(_PATHS[kind], body, _Action, timeout_s=self._timeout_s)
            except Refused as error:
                if kind is ActionKind.EVICT and isinstance(error, NotSupported) and error.status == 404:
                    self.evicts = False
                raise _classified(error) from error
        if kind is ActionKind.EVICT:
            self.evicts = True
        return answer.effect

    def _fields_of(self, kind: ActionKind, instance_id: str, source: str) -> dict[str, Any]:
        """Fields of every version at once, which ignore unknown ones: `locations` was read before 0.3.5, `copy` before
        0.3.11. Real engines compress by `cachegen` alone."""
        places = self._places
        match kind:
            case ActionKind.TRANSFER:
                moved = {"old_position": (source, MEMORY), "new_position": (instance_id, MEMORY)}
                return {**moved, "should_copy": True, "copy": True}
            case ActionKind.PIN:
                location = places.pin_location
            case ActionKind.COMPRESS | ActionKind.DECOMPRESS:
                location = places.compress_location
            case ActionKind.CLEAR:
                location = places.evict_location
            case _:
                return {"instance_id": instance_id}
        method = {} if kind in (ActionKind.PIN, ActionKind.CLEAR) else {"method": "cachegen"}
        return {"instance_id": instance_id, **method, "location": location, "locations": [location]}

    async def instances(self) -> frozenset[str]:
        """Ids of the registered instances, live; also the readiness probe (the controller has no GET /health)."""
        return frozenset(row.instance_id for row in (await self._key_stats()).instances)

    async def indexed_chunks(self) -> int:
        return (await self._key_stats()).total_key_count

    async def memory(self) -> Sequence[TierMemory]:
        return ()

    async def _key_stats(self) -> _KeyStats:
        return await self._api.get("/controller/key-stats", _KeyStats, timeout_s=self._timeout_s)


def _classified(error: Refused) -> Refused:
    """Return the controller's 500 as what it means: its texts are the only sign."""
    detail = str(error)
    if error.status < 500:
        return error
    if "current state" in detail:
        return InstanceBusy(detail, status=error.status)
    if "not supported" in detail or "P2P is not enabled" in detail:
        return NotSupported(detail, status=error.status)
    if "same across all workers" in detail:
        return UnknownInstance(detail, status=error.status)
    return error


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
