"""Value of the LMCache service's answers about a prompt."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Mapping, Sequence

from kvproxy.base.errors import BreakerOpen, ClientError
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, Tier, count_lower
from kvproxy.cache.breakers import OperationBreakers
from kvproxy.cache.overlap.denied import DeniedPlacements, trusted_tokens
from kvproxy.cache.overlap.merge import HolderOverlap
from kvproxy.cache.store import EVERY_INSTANCE, Holder, Prefix
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import Overlap
from kvproxy.features.lmcache.metrics import LMCacheMetrics
from kvproxy.features.lmcache.provider import Provider

log = logging.getLogger("kvproxy.kvcache")

OPERATION = "lookup"
_WARNED = 256


class LookupClient:
    """One breaker, no retries: a lookup is worth something now or not at all."""

    def __init__(self, *, breakers: OperationBreakers, metrics: Metrics, clock: Clock) -> None:
        self.provider: Provider | None = None
        self.hits = 0  # answers that named a holder, since the start
        self._breakers = breakers
        self._clock = clock
        self._seconds = metrics.group(LMCacheMetrics).lookup_seconds
        self._unknown = metrics.group(LMCacheMetrics).unknown_instances
        self._warned: set[str] = set()

    @property
    def possible(self) -> bool:
        """True if there is a service and its breaker lets calls through."""
        return self.provider is not None and self._breakers.admits(OPERATION)

    async def find_holders(self, prefix: Prefix) -> Sequence[Holder]:
        """Holders by the service's own word; raises ClientError or BreakerOpen."""
        provider = self.provider
        if provider is None:
            raise BreakerOpen("no lookup service")
        started = self._clock()
        try:
            holders = await self._breakers.call(OPERATION, lambda: provider.lookup(prefix))
        except ClientError as error:
            log.debug("[kvcache] lookup: %s", error)
            raise
        self._seconds.observe(self._clock() - started)
        self.hits += any(holder.tokens > 0 for holder in holders)
        return holders

    def count_overlaps(
        self,
        holders: Sequence[Holder],
        *,
        endpoints: Sequence[Endpoint],
        known: Collection[str],
        local: Mapping[EndpointId, Overlap],
        hashes: array[int],
        denied: DeniedPlacements,
    ) -> list[HolderOverlap]:
        """Return what the holders are worth for these endpoints, by instance id; what is in a shared store, for all
        that read it.

        A number that may not be a contiguous prefix is capped by what was routed there, where anything was, and by
        what the engine had when it was last found wrong. Holders that serve another model are passed over; `known` are
        the instance ids of all endpoints, and an instance that is not among them is logged once.
        """
        assert self.provider is not None
        by_instance: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            by_instance.setdefault(endpoint.instance_id, []).append(endpoint)
        found = []
        denials = denied.find_denials(hashes) if denied else ()
        for holder in holders:
            if holder.instance_id == EVERY_INSTANCE:
                mounting = [endpoint for endpoint in endpoints if endpoint.reads_shared_kv]
            else:
                mounting = by_instance.get(holder.instance_id, [])
            if not mounting and holder.instance_id:
                self._note_unknown(holder.instance_id, known)
            if holder.tokens <= 0:
                continue
            for endpoint in mounting:
                tokens = holder.tokens
                lower = holder.lower
                if not holder.contiguous:
                    routed = local.get(endpoint.id)
                    if routed is not None and routed.tokens:
                        tokens = min(tokens, routed.tokens)
                    else:
                        tokens = denied.cap_hint(endpoint.id, hashes, tokens)
                if lower and not endpoint.reads_shared_kv:
                    lower = tuple([each for each in lower if each[0] is not Tier.SHARED])
                    tokens = count_lower(lower)
                if denials and lower:
                    tokens = min(tokens, trusted_tokens(endpoint.id, lower, denials))
                found.append(HolderOverlap(endpoint.id, tokens, holder.contiguous, self.provider.source, lower))
        return found

    def _note_unknown(self, instance_id: str, known: Collection[str]) -> None:
        if instance_id in known:
            return
        self._unknown.inc()
        if instance_id not in self._warned and len(self._warned) < _WARNED:
            self._warned.add(instance_id)
            log.warning(
                "[kvcache] LMCache names the instance %r, which no endpoint has as its instance_id; known: %s",
                instance_id,
                ", ".join(sorted(known)) or "none",
            )
