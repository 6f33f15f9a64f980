"""Finds out which data-parallel ranks an engine has behind its address."""

from __future__ import annotations

import logging
from collections.abc import Collection

from kvproxy.clients.engine_metrics import EngineKind, EngineMetrics
from kvproxy.clients.kv_events.source import stated_sources
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.engine import Engine
from kvproxy.config.cluster_schema import EventSources
from kvproxy.errors import ClientError, NotSupported
from kvproxy.kvcache.engines import Engines

log = logging.getLogger("kvproxy.kvcache")


class RankFinder:
    """An engine whose metrics show several ranks is asked where each publishes its KV events (SGLang: how many it was
    started with); `stated` says it for engines that cannot. Asked once for each set of ranks that metrics show."""

    def __init__(self, engines: Engines, *, stated: EventSources) -> None:
        self._engines = engines
        self._stated = stated

    async def follow(self, cluster: Cluster, engine: Engine, metrics: EngineMetrics) -> None:
        """Tell the cluster what is known of the engine's ranks now."""
        shown, ranks = metrics.ranks.keys(), engine.ranks
        named: Collection[int] | None = ranks.named if shown == set(ranks.shown) else None
        unknown = ranks.asks and len(shown) > 1 and named is None
        if unknown:
            try:
                named = await self._named(cluster, engine, metrics.kind)
            except ClientError as error:
                log.debug("[kvcache] data-parallel ranks of %s: %s", engine.id, error)
        cluster.ranks.observe_ranks(engine, shown, named, in_body=metrics.kind is EngineKind.SGLANG)
        if unknown and ranks.unknown and named is not None:
            log.warning(
                "[kvcache] %s/%s has the data-parallel ranks %s by its metrics, and nothing else says that requests "
                "may ask for them: it balances by itself, and a prefix is computed once a rank (set `data_parallel`)",
                cluster.name,
                engine.id,
                ", ".join(map(str, ranks.shown)),
            )

    async def _named(self, cluster: Cluster, engine: Engine, kind: EngineKind) -> Collection[int]:
        client = self._engines.client(engine)
        if kind is EngineKind.SGLANG:
            return range((await client.sglang_info()).dp_size)
        try:
            sources = await client.kv_event_sources()
        except NotSupported:
            own = next((endpoint.kv_event_sources for endpoint in cluster.of_engine(engine)), self._stated)
            sources = stated_sources(own if own.endpoint else self._stated, host=engine.origin.host)
        return [source.dp_rank for source in sources]
