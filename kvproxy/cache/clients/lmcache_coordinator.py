"""The coordinator of LMCache's multi-process mode, over HTTP. `model` is always vLLM's `--model`, not a served name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from kvproxy.base.errors import NotSupported, Refused, UnknownInstance
from kvproxy.cache.clients.api import ServiceClient
from kvproxy.cache.clients.lmcache_coordinator_wire import (
    CacheChange,
    CacheScope,
    DirectoryLookup,
    DirectoryStats,
    FleetUsage,
    Instance,
    Prefetch,
    PrefetchStatus,
    WireDirectory,
    WireInstances,
    directory_lookup,
)
from kvproxy.cache.clients.tokens import TokenIds, body_with_tokens

T = TypeVar("T")

Tier = Literal["l1", "l2", "all"]

#: Directory answers repeat each known chunk's token ids; objects and lists in them: three and two for each chunk and
#: rank, and one more for each further placement.
_MAX_DIRECTORY_BYTES = 8 << 20
_MAX_DIRECTORY_VALUES = 65_536
#: Longer answers are read beside the event loop.
_LONG_BYTES = 1 << 16
_MAX_LISTING_BYTES = 1 << 20


class LMCacheCoordinatorClient(ServiceClient):
    """One coordinator. Every method raises ClientError and nothing else; nothing is retried here."""

    service = "lmcache coordinator"

    async def directory_lookup(
        self, scope: CacheScope, tokens: TokenIds, *, timeout_s: float | None = None
    ) -> DirectoryLookup:
        """Every holder of every whole chunk; `tokens` is the whole prompt from its start (at most a million)."""
        path = "/directory/lookup"
        try:
            raw = await self._api.call(
                "POST",
                path,
                timeout_s=timeout_s or self._lookup_timeout_s,
                body=_body(scope, tokens, {}),
                max_bytes=_MAX_DIRECTORY_BYTES,
            )
        except Refused as error:
            raise _classified(error) from error

        def read() -> DirectoryLookup:
            answer = self._api.decode(raw, WireDirectory, path, max_values=_MAX_DIRECTORY_VALUES)
            return directory_lookup(answer, prompt_tokens=len(tokens))

        return read() if len(raw) <= _LONG_BYTES else await asyncio.to_thread(read)

    async def list_instances(self) -> tuple[Instance, ...]:
        """Return registered MP servers."""
        return tuple((await self._get("/instances", WireInstances)).instances)

    async def fetch_usage(self) -> FleetUsage:
        """Memory of the whole fleet."""
        return await self._get("/instances/usage", FleetUsage)

    async def pin(self, scope: CacheScope, tokens: TokenIds) -> CacheChange:
        """Protects the prompt's L2 keys from eviction, fleet-wide and counted, until unpinned."""
        return await self._change("POST", "/cache/pins", _body(scope, tokens, {}))

    async def unpin(self, scope: CacheScope, tokens: TokenIds) -> CacheChange:
        """Take one `pin` back."""
        return await self._change("DELETE", "/cache/pins", _body(scope, tokens, {}))

    async def delete(
        self, instance_id: str, scope: CacheScope, tokens: TokenIds, *, tier: Tier = "l1", force: bool = False
    ) -> CacheChange:
        """Drop the prompt's keys at one instance.

        Tier `all` against a server without L2 answers 502 although its L1 keys are gone.
        """
        others = {"instance_id": instance_id, "tier": tier, "force": force}
        return await self._change("POST", "/cache/delete", _body(scope, tokens, others))

    async def prefetch(self, instance_id: str, scope: CacheScope, tokens: TokenIds) -> Prefetch:
        """Start loading the prompt's chunks from L2 into one instance's memory."""
        body = _body(scope, tokens, {"instance_id": instance_id})
        try:
            return await self._api.post("/cache/prefetches", body, Prefetch, timeout_s=self._action_timeout_s)
        except Refused as error:
            raise _classified(error) from error

    async def prefetch_status(self, instance_id: str, request_id: str) -> PrefetchStatus:
        """Return the progress of a prefetch; UnknownInstance if instance or job are not (or no longer) known."""
        return await self._get(f"/cache/prefetches/{_segment(instance_id)}/{_segment(request_id)}", PrefetchStatus)

    async def fetch_stats(self) -> DirectoryStats:
        """Size of the directory."""
        return await self._get("/directory/stats", DirectoryStats)

    async def _change(self, method: str, path: str, body: bytes) -> CacheChange:
        try:
            raw = await self._api.call(method, path, timeout_s=self._action_timeout_s, body=body)
        except Refused as error:
            raise _classified(error) from error
        return self._api.decode(raw, CacheChange, path)

    async def _get(self, path: str, answer: type[T]) -> T:
        try:
            return await self._api.get(path, answer, timeout_s=self._lookup_timeout_s, max_bytes=_MAX_LISTING_BYTES)
        except Refused as error:
            raise _classified(error) from error


def _body(scope: CacheScope, tokens: TokenIds, others: Mapping[str, Any]) -> bytes:
    named = {"model_name": scope.model, "world_size": scope.world_size, "cache_salt": scope.cache_salt}
    return body_with_tokens("token_ids", tokens, {**named, **others})


def _segment(name: str) -> str:
    """Return a path segment; ids may hold slashes."""
    return quote(name, safe="")


def _classified(error: Refused) -> Refused:
    """Return the error for a 404 about a requested object; a missing route is NotSupported already."""
    if error.status == 404 and not isinstance(error, NotSupported):
        return UnknownInstance(str(error), status=404)
    return error
