"""The engines' own APIs (tokenize, metrics, event sources), one client an engine, and their data-parallel ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Self

from kvproxy.base.errors import ClientError, NotSupported
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.base.upstream.transport import HttpClients
from kvproxy.cache.clients.engine_metrics import EngineKind, EngineMetrics
from kvproxy.cache.clients.event_sources import stated_sources
from kvproxy.cache.clients.vllm import FindChatForm, VllmClient
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.settings import EventSources

log = logging.getLogger("kvproxy.kvcache")


class Engines:
    """Clients by engine, made on first use. `tokenizer_url` is an engine that tokenizes for all of them.

    A context manager: leaving it closes the clients, not the pool they ride on.
    """

    def __init__(
        self, pool: UpstreamPool, *, timeout_s: float, tokenizer_url: str = "", find_form: FindChatForm | None = None
    ) -> None:
        self.http = HttpClients(pool)
        self._timeout_s = timeout_s
        self._clients: dict[Engine, VllmClient] = {}
        self._unable: set[Engine] = set()  # answered that they cannot tokenize
        self._find_form = find_form
        self._tokenizer = self._make_client(None, tokenizer_url) if tokenizer_url else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def client(self, engine: Engine) -> VllmClient:
        """Return the engine's API, with its own credential and no other."""
        client = self._clients.get(engine)
        if client is None:
            origin = engine.origin
            key = engine.authorization
            authorization = key.decode("latin-1") if key else None
            client = self._clients[engine] = self._make_client(origin, str(origin), authorization)
        return client

    def _make_client(self, origin: Origin | None, url: str, authorization: str | None = None) -> VllmClient:
        http = self.http.client() if origin is None else self.http.client(origin)
        return VllmClient(http, url, authorization, timeout_s=self._timeout_s, find_form=self._find_form)

    def find_tokenizer(self, endpoints: Sequence[Endpoint]) -> tuple[VllmClient, Endpoint | None] | None:
        """Return the engine that tokenizes for these: the configured one, else the least busy of those that may be able
        to."""
        if self._tokenizer is not None:
            return self._tokenizer, None
        able = [
            endpoint for endpoint in endpoints if endpoint.engine not in self._unable and endpoint.health.is_healthy
        ]
        if not able:
            return None
        endpoint = min(able, key=lambda one: one.load.in_flight)
        return self.client(endpoint.engine), endpoint

    def cannot_tokenize(self, endpoint: Endpoint) -> None:
        """Note that the engine has no `/tokenize`, so that it is not tried again."""
        self._unable.add(endpoint.engine)

    def keep_only(self, engines: Iterable[Engine]) -> None:
        """Forget the clients of all others."""
        kept = set(engines)
        self._unable &= kept
        self._clients = {engine: client for engine, client in self._clients.items() if engine in kept}


class RankFinder:
    """Finder of the ranks of engines whose metrics show several: their KV event sources are queried (SGLang: how many
    it was started with); `stated` replaces the answer of engines without it. Once for each set of ranks in the
    metrics."""

    def __init__(self, engines: Engines, *, stated: EventSources) -> None:
        self._engines = engines
        self._stated = stated

    async def follow_ranks(self, cluster: Cluster, engine: Engine, metrics: EngineMetrics) -> None:
        """Report the engine's ranks as known now to the cluster."""
        shown = metrics.ranks.keys()
        ranks = engine.ranks
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
                "[kvcache] %s/%s has the data-parallel ranks %s by its metrics, but requests cannot name them: it "
                "balances by itself, and a prefix is computed once per rank (set `data_parallel`)",
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
            own = next((endpoint.kv_event_sources for endpoint in cluster.members.of_engine(engine)), self._stated)
            sources = stated_sources(own if own.endpoint else self._stated, host=engine.origin.host)
        return [source.dp_rank for source in sources]
