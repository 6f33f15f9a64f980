"""The long-lived kvcache service: facts about each prompt before its pick, learning and upkeep after its end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

from kvproxy.balancing.policy import OverlapFacts
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.kvcache.actions import Actions
from kvproxy.kvcache.background import Background, Job
from kvproxy.kvcache.connect import Connection
from kvproxy.kvcache.engines import Engines
from kvproxy.kvcache.event_streams import EventStreams
from kvproxy.kvcache.facts import Claim, merged, preferred
from kvproxy.kvcache.gathered import Gathered, Result
from kvproxy.kvcache.guard import Guard
from kvproxy.kvcache.hotness import KnownPrefix
from kvproxy.kvcache.learning import Learning
from kvproxy.kvcache.local import LocalSources
from kvproxy.kvcache.lookup import Lookups
from kvproxy.kvcache.ratio import BytesPerToken
from kvproxy.kvcache.remote import Remote
from kvproxy.kvcache.signals import Signals, sample_host
from kvproxy.kvcache.tokens import TokenSource
from kvproxy.kvcache.upkeep import Upkeep
from kvproxy.kvcache.watch import Watch
from kvproxy.metrics.catalog import Metrics
from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.types import Clock, EndpointId, InferenceRequest
from kvproxy.upstream.pool import UpstreamPool


class KvCache:
    """Enter it before the first request; its tasks end with it.

    A request is `gather`ed without waiting, may wait for `look_up`, is told of as `picked` (each attempt anew), and is
    `finished` exactly once. Nothing here raises for a request's sake, and nothing here fails one.
    """

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        clusters: Mapping[str, Cluster],
        metrics: Metrics,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.local = {name: LocalSources(endpoints=len(cluster.endpoints)) for name, cluster in clusters.items()}
        self._clusters = clusters
        self._clock = clock
        self._rng = random.Random() if rng is None else rng
        self._pool = UpstreamPool(max_connections=settings.max_connections, clock=clock)
        self._engines = Engines(self._pool, timeout_s=settings.request_timeout, tokenizer_url=settings.vllm_endpoint)
        self._guard = Guard(settings.circuit_breaker, clock=clock, metrics=metrics)
        self.ratios = BytesPerToken()
        self.lookups = Lookups(guard=self._guard, metrics=metrics, clock=clock)
        self.tokens = TokenSource(settings, engines=self._engines, guard=self._guard, metrics=metrics, clock=clock)
        self._uses_tokens = bool(settings.lmcache_endpoint) or settings.kv_events
        self._remote = Remote(
            settings,
            tokens=self.tokens,
            lookups=self.lookups,
            known_instances=self.instance_ids,
            metrics=metrics,
            clock=clock,
        )
        self.background = Background(settings.background, metrics=metrics)
        self.signals = Signals(settings.cache_strategy, clock=clock, max_age_s=3 * settings.engine_metrics_interval + 5)
        actions = Actions(
            settings,
            background=self.background,
            lookups=self.lookups,
            guard=self._guard,
            metrics=metrics,
            clock=clock,
            rng=self._rng,
        )
        self.upkeep = Upkeep(
            settings,
            actions=actions,
            signals=self.signals,
            lookups=self.lookups,
            endpoints=self._endpoints,
            clock=clock,
        )
        self._watch = Watch(
            settings.engine_metrics_interval,
            clusters=clusters,
            local=self.local,
            engines=self._engines,
            signals=self.signals,
            lookups=self.lookups,
            ratios=self.ratios,
            sample_host=sample_host,
            on_round=self.upkeep.tick,
        )
        self._streams: EventStreams | None = None
        if settings.kv_events:
            self._streams = EventStreams(
                clusters=clusters, local=self.local, engines=self._engines, metrics=metrics, clock=clock
            )
        self._learning = Learning(ratios=self.ratios, lookups=self.lookups, metrics=metrics)
        self._running = AsyncExitStack()
        self._entered = False
        self._show(metrics)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as starting:
            await starting.enter_async_context(self._pool)
            await starting.enter_async_context(self._engines)
            starting.push_async_callback(self.tokens.close)
            starting.push_async_callback(self._remote.close)
            if self.settings.lmcache_endpoint:
                self._connect(starting)
            await starting.enter_async_context(self.background)
            await starting.enter_async_context(self._watch)
            if self._streams is not None:
                await starting.enter_async_context(self._streams)
            self._running = starting.pop_all()
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._entered = False
        await self._running.aclose()

    def instance_ids(self) -> frozenset[str]:
        """LMCache instance ids of every endpoint there is."""
        return frozenset(endpoint.instance_id for endpoint in self._endpoints())

    def _endpoints(self) -> Iterable[Endpoint]:
        return (endpoint for cluster in self._clusters.values() for endpoint in cluster.endpoints)

    def gather(self, request: InferenceRequest, body: bytes, *, cluster: Cluster, model: str = "") -> Gathered:
        """What our own sources know, at once. `model` is what the engines call it, where that differs."""
        local = self.local[cluster.name]
        model = model or request.model or self.settings.default_model
        prompt = request.prompt
        gathered = Gathered(
            cluster=cluster,
            local=local,
            request=request,
            body=body,
            model=model,
            hashes=local.hashes(request, model),
            prompt_bytes=len(prompt.shape) + sum(map(len, prompt.parts)),
            started_at=self._clock(),
        )
        if self._uses_tokens:
            self.tokens.recall(gathered)
        self._assess(gathered)
        local.hot.touch(gathered.hashes)
        gathered.wants_lookup = self._entered and self._remote.wanted(gathered)
        return gathered

    async def look_up(self, gathered: Gathered) -> None:
        """Ask the lookup service within what is left of the routing deadline, and complete the facts."""
        gathered.wants_lookup = False
        claims = self.upkeep.usable(gathered, await self._remote.ask(gathered))
        if claims or gathered.tokens_exact:
            self._assess(gathered, claims)

    async def facts_for(self, request: InferenceRequest, body: bytes, *, cluster: Cluster, model: str = "") -> Gathered:
        """`gather`, and `look_up` where that is worth it."""
        gathered = self.gather(request, body, cluster=cluster, model=model)
        if gathered.wants_lookup:
            await self.look_up(gathered)
        return gathered

    def picked(self, gathered: Gathered, endpoint: EndpointId) -> None:
        """The request goes there now; an earlier attempt's promise is taken back."""
        earlier = gathered.claim
        if earlier is not None:
            gathered.local.settle(earlier, prefilled=False)
        gathered.claim = gathered.local.route(endpoint, gathered.hashes)

    def finished(self, gathered: Gathered, result: Result) -> None:
        """The request is over. Queues what is to be done about it; never waits."""
        self._learning.finished(gathered, result)
        if not (result.prefilled and self._uses_tokens):
            return
        endpoint = None if result.endpoint is None else gathered.cluster.endpoint(result.endpoint)
        if self._streams is not None and endpoint is not None and result.prompt_tokens is not None:
            self._streams.note_traffic(endpoint, result.prompt_tokens - (result.cached_tokens or 0))
        self._follow_up(gathered, endpoint)

    def _follow_up(self, gathered: Gathered, endpoint: Endpoint | None) -> None:
        """The strategies' turn, with the prompt's tokens; where these are not known yet they are asked for, which also
        lets the next turn of this chat know its beginning."""
        used = self.upkeep.use(gathered, endpoint) if endpoint is not None and self.upkeep.enabled else []
        if gathered.tokens is not None and gathered.tokens_exact:
            if endpoint is not None and used:
                self.upkeep.consider(used, gathered.tokens, endpoint)
        elif self.tokens.may_ask(gathered):
            key = ("tokenize", gathered.model, gathered.hashes[-1] if gathered.hashes else 0, gathered.prompt_bytes)
            self.background.submit(Job(key, lambda: self._tokenize(gathered, used, endpoint)))

    async def _tokenize(self, gathered: Gathered, used: Sequence[KnownPrefix], endpoint: Endpoint | None) -> bool:
        task = self.tokens.ask(gathered)
        tokens = None if task is None else await asyncio.shield(task)
        if tokens is not None and endpoint is not None and used:
            self.upkeep.consider(used, tokens, endpoint)
        return tokens is not None

    def _connect(self, starting: AsyncExitStack) -> None:
        connection = Connection(
            self.settings, self._engines.http(), lookups=self.lookups, known_instances=self.instance_ids
        )
        task = asyncio.create_task(connection.run(), name="kvcache connect")

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        starting.push_async_callback(stop)

    def _assess(self, gathered: Gathered, claims: Iterable[Claim] = ()) -> None:
        """Facts and preference from everything known by now."""
        tokens = gathered.tokens
        if tokens is not None and gathered.tokens_exact and tokens:
            prompt_tokens = len(tokens)
            bytes_per_token = max(gathered.prompt_bytes, 1) / prompt_tokens
        else:
            bytes_per_token = self.ratios.of(gathered.model)
            prompt_tokens = max(int(gathered.prompt_bytes / bytes_per_token), len(tokens or ()))
        local = gathered.local
        known = local.overlaps(
            gathered.hashes,
            bytes_per_token=bytes_per_token,
            tokens=tokens,
            cache_salt=gathered.request.cache_salt,
        )
        found = merged(known, claims, prompt_tokens=prompt_tokens)
        hot = local.hot.hot_prefix_blocks(gathered.hashes)
        hot_tokens = int(hot * TEXT_BLOCK_BYTES / bytes_per_token)
        gathered.facts = OverlapFacts(prompt_tokens, found, hot_tokens)
        if found:
            order = [endpoint.id for endpoint in gathered.endpoints]
            gathered.preferred = preferred(gathered.facts, order, min_tokens=self.settings.min_matched_tokens)

    def _precise_blocks(self) -> int:
        rows = [(self.local[name].precise, cluster.endpoints) for name, cluster in self._clusters.items()]
        return sum(precise.rows(endpoint.id) for precise, endpoints in rows for endpoint in endpoints)

    def _show(self, metrics: Metrics) -> None:
        """Sizes are read when somebody asks for them."""
        sources, memory = self.local.values(), self.tokens.memory
        blocks = metrics.kv_index_blocks
        blocks.labels("approximate").set_function(lambda: sum(s.approximate.entries for s in sources))
        blocks.labels("precise").set_function(self._precise_blocks)
        blocks.labels("hot").set_function(lambda: sum(s.hot.blocks for s in sources))
        metrics.kv_token_memory_bytes.set_function(lambda: memory.held_bytes)
        for result in ("exact", "prefix", "missed"):
            metrics.kv_recalls.labels(result).set_function(partial(getattr, memory.stats, result))
