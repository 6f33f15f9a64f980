"""LMCache's two services as providers: the controller, and the coordinator of multi-process mode."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from kvproxy.base.errors import BadResponse, ClientError, NotSupported, Refused
from kvproxy.base.types import LowerTokens, Tier
from kvproxy.cache.clients.lmcache_controller import LMCacheControllerClient
from kvproxy.cache.clients.lmcache_controller_wire import ActionResult
from kvproxy.cache.clients.lmcache_coordinator import LMCacheCoordinatorClient
from kvproxy.cache.clients.lmcache_coordinator_wire import CacheScope, HeldPrefix, MemoryModule, chunk_tokens_of
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.providers import EVERY_INSTANCE, ActionKind, Effect, Holder, Prefix, TierMemory
from kvproxy.cache.settings import CacheStrategySettings
from kvproxy.cluster.routing.policy import FactSource

#: Host memory, as the controller calls it.
MEMORY = "LocalCPUBackend"
#: Pauses between polls of a prefetch: the first one, doubling up to the last. 16 MiB take 30 to 70 ms.
FIRST_POLL_S = 0.02
LAST_POLL_S = 0.2


class ControllerProvider:
    """The controller: a hint at holders, pins that lapse by themselves, no eviction of a single prefix."""

    source = FactSource.LMCACHE_CONTROLLER
    copies = True

    def __init__(self, client: LMCacheControllerClient, settings: CacheStrategySettings) -> None:
        self._client = client
        self._settings = settings

    @property
    def supports(self) -> frozenset[ActionKind]:
        """Eviction counts as supported until the controller reports that it has no such call."""
        kinds = {ActionKind.PIN, ActionKind.COMPRESS, ActionKind.DECOMPRESS, ActionKind.CLEAR, ActionKind.TRANSFER}
        return frozenset(kinds if self._client.evicts is False else {*kinds, ActionKind.EVICT})

    async def lookup(self, prefix: Prefix, *, timeout_s: float) -> Sequence[Holder]:
        """Look a prefix up. A chunk's first holder alone is named, and each holder's last chunk: only a sole holder
        surely has a prefix, because the search ends at the first chunk without a holder."""
        holders = await self._client.lookup(prefix.tokens, timeout_s=timeout_s)
        return [Holder(one.instance_id, one.matched_tokens, len(holders) == 1) for one in holders]

    async def act(self, kind: ActionKind, instance_id: str, prefix: Prefix, *, source: str = "") -> Effect:
        if kind is ActionKind.TRANSFER:
            return _effect(await self._copy(source, instance_id, prefix.tokens))
        return _effect(await self._act(kind, instance_id, prefix.tokens))

    async def _copy(self, source: str, instance_id: str, tokens: TokenIds) -> ActionResult:
        if not source:
            raise NotSupported("lmcache controller: a transfer needs the instance that it comes from", status=404)
        return await self._client.move((source, MEMORY), (instance_id, MEMORY), tokens, copy=True)

    async def _act(self, kind: ActionKind, instance_id: str, tokens: TokenIds) -> ActionResult:
        client = self._client
        settings = self._settings
        match kind:
            case ActionKind.PIN:
                return await client.pin(instance_id, tokens, location=settings.pin_location)
            case ActionKind.COMPRESS:
                return await client.compress(instance_id, tokens, location=settings.compress_location)
            case ActionKind.DECOMPRESS:
                return await client.decompress(instance_id, tokens, location=settings.compress_location)
            case ActionKind.EVICT:
                return await client.evict(instance_id, tokens)
            case ActionKind.CLEAR:
                return await client.clear(instance_id, location=settings.evict_location)
            case _:
                raise NotSupported(f"lmcache controller: no {kind}", status=404)

    async def instances(self) -> frozenset[str]:
        return frozenset(row.instance_id for row in (await self._client.key_stats()).instances)

    async def indexed_chunks(self) -> int:
        return (await self._client.key_stats()).total_key_count

    async def memory(self) -> Sequence[TierMemory]:
        return ()


class CoordinatorProvider:
    """The coordinator of multi-process mode: exact holders, real pins, deletion of one prefix, memory by instance."""

    source = FactSource.LMCACHE_COORDINATOR
    supports = frozenset({ActionKind.PIN, ActionKind.UNPIN, ActionKind.EVICT, ActionKind.TRANSFER})

    def __init__(self, client: LMCacheCoordinatorClient, *, model: str = "") -> None:
        self.copies = False  # until its instances are listed, and read each other's memory
        self._client = client
        self._model = model  # the directory's name for it, where that differs from the request's

    def _scope(self, prefix: Prefix) -> CacheScope:
        return CacheScope(self._model or prefix.model, prefix.cache_salt)

    async def lookup(self, prefix: Prefix, *, timeout_s: float) -> Sequence[Holder]:
        found = await self._client.directory_lookup(self._scope(prefix), prefix.tokens, timeout_s=timeout_s)
        holders = [Holder(name, held.tokens, True, _tiers_of(held)) for name, held in found.by_instance.items()]
        if found.shared_tokens:
            shared = ((Tier.SHARED, found.shared_tokens),)
            holders.append(Holder(EVERY_INSTANCE, found.shared_tokens, True, shared))
        return holders

    async def act(self, kind: ActionKind, instance_id: str, prefix: Prefix, *, source: str = "") -> Effect:
        scope = self._scope(prefix)
        match kind:
            case ActionKind.TRANSFER:
                return await self._prefetch(instance_id, scope, prefix.tokens)
            case ActionKind.PIN:
                change = await self._client.pin(scope, prefix.tokens)
            case ActionKind.UNPIN:
                change = await self._client.unpin(scope, prefix.tokens)
            case ActionKind.EVICT:
                change = await self._client.delete(instance_id, scope, prefix.tokens)
            case _:
                raise NotSupported(f"lmcache coordinator: no {kind}", status=404)
        return Effect(change.affected)

    async def _prefetch(self, instance_id: str, scope: CacheScope, tokens: TokenIds) -> Effect:
        """Prefetch from the server's sources (a shared store, its disk, its peers) into its memory. The report of the
        end comes once, with the number of chunks found, which is 0 if no source has them."""
        job = await self._client.prefetch(instance_id, scope, tokens)
        if not job.request_id:
            return Effect(0)  # shorter than a chunk
        pause_s = FIRST_POLL_S
        while (seen := await self._client.prefetch_status(instance_id, job.request_id)).status == "pending":
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)
        chunks = (seen.found_keys or 0) // scope.world_size
        return Effect(min(max(0, chunks) * chunk_tokens_of(job.chunks, len(tokens)), len(tokens)))

    async def instances(self) -> frozenset[str]:
        listed = await self._client.list_instances()
        self.copies = any(one.p2p_advertised_url for one in listed)
        return frozenset(one.instance_id for one in listed)

    async def indexed_chunks(self) -> int:
        return (await self._client.fetch_stats()).num_keys

    async def memory(self) -> Sequence[TierMemory]:
        usage = await self._client.fetch_usage()
        with contextlib.suppress(ClientError):
            await self.instances()  # servers that came meanwhile may read each other's memory
        own = [(one.instance_id, module) for one in usage.instances for module in one.modules]
        shared = [(EVERY_INSTANCE, module) for module in usage.shared_modules]
        found: dict[tuple[str, Tier], TierMemory] = {}
        for name, module in (*own, *shared):
            tier = _tier_of(module)
            found[name, tier] = _with_module(found.get((name, tier), TierMemory(name, tier, 0, 0, None)), module)
        return tuple(found.values())


async def is_coordinator(client: LMCacheCoordinatorClient) -> bool:
    """Return True if a coordinator answers there; ClientError when nothing does."""
    try:
        await client.fetch_stats()
    except (Refused, BadResponse):
        return False
    return True


def _tier_of(module: MemoryModule) -> Tier:
    if module.shared:
        return Tier.SHARED
    return Tier.HOST if module.tier == "l1" else Tier.DISK


def _with_module(memory: TierMemory, module: MemoryModule) -> TierMemory:
    """Both together, as full as the fuller one is."""
    used_bytes = memory.used_bytes + module.used_bytes
    capacity_bytes = memory.capacity_bytes + module.capacity_bytes
    shares = [share for share in (memory.share, module.usage_ratio) if share is not None]
    return TierMemory(memory.instance_id, memory.tier, used_bytes, capacity_bytes, max(shares, default=None))


def _tiers_of(held: HeldPrefix) -> LowerTokens:
    if not held.disk_tokens and not held.shared_tokens:
        return ()
    host = held.tokens - held.disk_tokens - held.shared_tokens
    found = ((Tier.HOST, host), (Tier.DISK, held.disk_tokens), (Tier.SHARED, held.shared_tokens))
    return tuple([(tier, tokens) for tier, tokens in found if tokens])


def _effect(result: ActionResult) -> Effect:
    if result.num_tokens is not None or result.success is None:
        return Effect(result.num_tokens)
    return Effect(int(result.success))
