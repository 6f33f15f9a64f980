"""The long-lived kvcache service: facts about each prompt before its pick, learning and upkeep after its end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.kvcache.actions import signals
from kvproxy.kvcache.actions.hotness import KnownPrefix
from kvproxy.kvcache.actions.job_queue import Job
from kvproxy.kvcache.actions.signals import HostUse
from kvproxy.kvcache.overlap.connect import Connection
from kvproxy.kvcache.overlap.facts import RequestFacts, Result
from kvproxy.kvcache.overlap.kv_event_streams import utc_seconds
from kvproxy.kvcache.overlap.merge import merged, preferred
from kvproxy.kvcache.parts import Parts
from kvproxy.metrics.catalog import Metrics
from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.routing.policy import OverlapFacts
from kvproxy.types import Clock, EndpointId, InferenceRequest


class KvCache:
    """Enter it before the first request; its tasks end with it.

    A request is `gather`ed without waiting, may wait for `look_up`, is told of as `picked` (each attempt anew), and is
    `finished` exactly once. Nothing here raises for a request's sake, and nothing here fails one. One that takes over
    from a `former` service, still running, shares with it what was routed where.
    """

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        clusters: Mapping[str, Cluster],
        metrics: Metrics,
        clock: Clock = time.monotonic,
        wall_clock: Clock = utc_seconds,
        rng: random.Random | None = None,
        sample_host: Callable[[], HostUse] = signals.sample_host,
        former: KvCache | None = None,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self.parts: Parts = Parts(
            settings,
            clusters=clusters,
            metrics=metrics,
            clock=clock,
            wall_clock=wall_clock,
            rng=random.Random() if rng is None else rng,
            sample_host=sample_host,
            former=None if former is None else former.parts,
        )
        self._facts_seconds = metrics.kvcache.facts_seconds.labels()
        self._uses_tokens = bool(settings.lmcache_endpoint) or settings.kv_events
        self._running = AsyncExitStack()
        self._entered = False

    async def __aenter__(self) -> Self:
        parts = self.parts
        async with AsyncExitStack() as starting:
            if parts.warm is not None:
                await starting.enter_async_context(parts.warm)
            await starting.enter_async_context(parts.pool)
            await starting.enter_async_context(parts.engines)
            starting.push_async_callback(parts.tokens.close)
            starting.push_async_callback(parts.remote.close)
            if self.settings.lmcache_endpoint:
                self._connect(starting)
            await starting.enter_async_context(parts.background)
            await starting.enter_async_context(parts.watch)
            if parts.streams is not None:
                await starting.enter_async_context(parts.streams)
            self._running = starting.pop_all()
        self._entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered = False
        await self._running.aclose()

    def gather(self, request: InferenceRequest, body: bytes, *, cluster: Cluster, model: str = "") -> RequestFacts:
        """What our own sources know, at once. `model` is what the engines call it, where that differs."""
        began = self._clock()
        local = self.parts.local[cluster.name]
        model = model or request.model or self.settings.default_model
        prompt = request.prompt
        hashes, keys = local.hashes(request, model)
        gathered = RequestFacts(
            cluster=cluster,
            local=local,
            request=request,
            body=body,
            model=model,
            cursor=local.approximate.locate(hashes),
            keys=keys,
            prompt_bytes=prompt.size_bytes,
            started_at=began,
        )
        if self._uses_tokens:
            self.parts.tokens.recall(gathered)
        gathered.hot_blocks = local.approximate.hot_blocks(gathered.cursor)
        self._assess(gathered)
        gathered.wants_lookup = self._entered and self.parts.remote.wanted(gathered)
        self._facts_seconds.observe(self._clock() - began)
        return gathered

    async def look_up(self, gathered: RequestFacts) -> None:
        """Ask the lookup service within what is left of the routing deadline, and complete the facts."""
        gathered.wants_lookup = False
        claims = self.parts.upkeep.usable(gathered, await self.parts.remote.ask(gathered))
        gathered.named = tuple(claims)
        if claims or gathered.tokens_exact:
            self._assess(gathered)

    def refresh(self, gathered: RequestFacts) -> None:
        """The facts of a request that was not placed yet, anew from our own sources; what a lookup said stands."""
        if self._uses_tokens and not gathered.tokens_exact:
            self.parts.tokens.recall(gathered)
        gathered.hot_blocks = gathered.local.approximate.hot_blocks(gathered.cursor)
        self._assess(gathered)

    async def facts_for(
        self, request: InferenceRequest, body: bytes, *, cluster: Cluster, model: str = ""
    ) -> RequestFacts:
        """`gather`, and `look_up` where that is worth it."""
        gathered = self.gather(request, body, cluster=cluster, model=model)
        if gathered.wants_lookup:
            await self.look_up(gathered)
        return gathered

    def picked(self, gathered: RequestFacts, endpoint: EndpointId) -> None:
        """The request goes there now; an earlier attempt's promise is taken back."""
        earlier = gathered.claim
        if earlier is not None:
            gathered.local.settle(earlier, prefilled=False)
        gathered.claim = gathered.local.route(endpoint, gathered.cursor)

    def finished(self, gathered: RequestFacts, result: Result) -> None:
        """The request is over. Queues what is to be done about it; never waits."""
        parts = self.parts
        parts.learning.finished(gathered, result)
        if not (result.prefilled and self._uses_tokens):
            return
        endpoint = None if result.endpoint is None else gathered.cluster.endpoint(result.endpoint)
        if parts.streams is not None and endpoint is not None and result.prompt_tokens is not None:
            parts.streams.note_traffic(endpoint, result.prompt_tokens - (result.cached_tokens or 0))
        self._follow_up(gathered, endpoint)

    def _follow_up(self, gathered: RequestFacts, endpoint: Endpoint | None) -> None:
        """The strategies' turn, with the prompt's tokens; where these are not known yet they are asked for, which also
        lets the next turn of this chat know its beginning."""
        upkeep, tokens = self.parts.upkeep, self.parts.tokens
        used = upkeep.use(gathered, endpoint) if endpoint is not None and upkeep.enabled else []
        if gathered.tokens is not None and gathered.tokens_exact:
            if endpoint is not None and used:
                upkeep.consider(used, gathered.tokens, endpoint)
        elif tokens.may_ask(gathered):
            key = ("tokenize", gathered.model, gathered.hashes[-1] if gathered.hashes else 0, gathered.prompt_bytes)
            run = partial(self._tokenize, gathered, used, endpoint)
            self.parts.background.submit(Job(key, run, about="tokenize", held_bytes=len(gathered.body)))

    async def _tokenize(self, gathered: RequestFacts, used: Sequence[KnownPrefix], endpoint: Endpoint | None) -> bool:
        task = self.parts.tokens.ask(gathered)
        tokens = None if task is None else await asyncio.shield(task)
        if tokens is not None and endpoint is not None and used:
            self.parts.upkeep.consider(used, tokens, endpoint)
        return tokens is not None

    def _connect(self, starting: AsyncExitStack) -> None:
        parts = self.parts
        connection = Connection(
            self.settings, parts.engines.http(), lookups=parts.lookups, known_instances=parts.instance_ids
        )
        task = asyncio.create_task(connection.run(), name="kvcache connect")

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        starting.push_async_callback(stop)

    def _assess(self, gathered: RequestFacts) -> None:
        """Facts and preference from everything known by now."""
        tokens, local = gathered.tokens, gathered.local
        if tokens:
            bytes_per_token = max(gathered.tokens_bytes, 1) / len(tokens)
            rest = 0 if gathered.tokens_exact else gathered.prompt_bytes - gathered.tokens_bytes
            prompt_tokens = len(tokens) + int(rest / bytes_per_token)
        else:
            bytes_per_token = self.parts.ratios.of(gathered.model)
            prompt_tokens = int(gathered.prompt_bytes / bytes_per_token)
        known = local.overlaps(
            gathered.cursor,
            bytes_per_token=bytes_per_token,
            tokens=tokens,
            hashed=gathered.hashed,
            model=gathered.model,
            cache_salt=gathered.request.cache_salt,
        )
        claims = gathered.named
        found = merged(known, claims, prompt_tokens=prompt_tokens, trust=local.lookup_trust) if claims else known
        hot_tokens = int(gathered.hot_blocks * TEXT_BLOCK_BYTES / bytes_per_token)
        gathered.facts = OverlapFacts(prompt_tokens, found, hot_tokens)
        gathered.preferred = None
        if found:
            order = [endpoint.id for endpoint in gathered.cluster.endpoints]
            least = self.settings.min_matched_tokens
            gathered.preferred = preferred(gathered.facts, order, min_tokens=least, serves=gathered.served_by)
