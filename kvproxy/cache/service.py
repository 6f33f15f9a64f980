"""The long-lived cache service: facts about each prompt before its pick, learning and actions after its end."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, InferenceRequest, utc_seconds
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.actions.after_response import AfterResponse
from kvproxy.cache.breakers import OperationBreakers
from kvproxy.cache.engines import Engines
from kvproxy.cache.feature import CacheFeature, CacheNeeds, CacheObservers, CacheParts, find_chat_form, find_needs
from kvproxy.cache.feedback.predictions import PredictionFeedback
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.cache.metrics import IndexMetrics, KvCacheMetrics
from kvproxy.cache.metrics_scraper import MetricsScraper
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.overlap.reported_facts import note_reported
from kvproxy.cache.overlap.reports import EngineReports
from kvproxy.cache.overlap.sources import OverlapSources
from kvproxy.cache.settings import MAX_CONNECTIONS, KvCacheSettings, has_store
from kvproxy.cache.state import CacheState
from kvproxy.cluster.cluster import Cluster

log = logging.getLogger("kvproxy.kvcache")


class KvCache:
    """Three parts over one state: `overlap` (what each endpoint holds), `feedback` (how true it was) and `actions`
    (what is done about it), with observers of features. Enter it before the first request; its tasks end with it.

    For each request: `gather` at once, `look_up` if the facts want it, `placed` for each attempt, `finished` exactly
    once. None of them raises for a request's sake, and none fails one. A `state` that an earlier service uses, which
    may still run, goes on where that one is; without one it begins empty. `reports` of engines are followed by their
    owner. Making it has no effect on anything else: `show` binds the gauges, once it is this service that counts.
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
        state: CacheState | None = None,
        reports: EngineReports | None = None,
        features: Sequence[CacheFeature] | None = None,
    ) -> None:
        rng = random.Random() if rng is None else rng
        self.settings = settings
        self.clusters = clusters
        self._metrics = metrics
        features = installed(CacheFeature) if features is None else features
        needs = find_needs(features, settings)
        #: Whether finished requests cause actions besides learning, KV events apart.
        self._acts = needs.uses or has_store(settings)
        self.state = CacheState.empty(metrics=metrics, clock=clock) if state is None else state
        self.pool = UpstreamPool(max_connections=MAX_CONNECTIONS, clock=clock)
        self.engines = self._make_engines(features)
        self.breakers = OperationBreakers(settings.circuit_breaker, clock=clock, metrics=metrics)
        self.overlap = self._make_overlap(needs, EngineReports({}) if reports is None else reports, clock)
        #: Calls of every request, without a wrapper.
        self.gather = self.overlap.gather
        self.look_up = self.overlap.look_up
        self.placed = self.overlap.placed
        self.move_prompt = self.overlap.move_prompt
        self.feedback = PredictionFeedback(state=self.state, clock=clock, rng=rng)
        self.scraper = self._make_scraper(clock)
        hotness = self.state.hotness(settings)
        tokens = self.overlap.tokens
        self.actions = AfterResponse(hotness, tokens, counts_uses=needs.uses, metrics=metrics, clock=clock)
        parts = CacheParts(
            settings=settings,
            clusters=clusters,
            state=self.state,
            overlap=self.overlap,
            actions=self.actions,
            engines=self.engines,
            breakers=self.breakers,
            signals=self.scraper.signals,
            metrics=metrics,
            clock=clock,
            wall_clock=wall_clock,
            rng=rng,
        )
        self.observers = CacheObservers(features, parts)
        self.actions.on_tokens = self.observers.on_tokens
        self._running = AsyncExitStack()

    def _make_engines(self, features: Sequence[CacheFeature]) -> Engines:
        settings = self.settings
        find_form = partial(find_chat_form, features)
        timeout_s = settings.request_timeout
        return Engines(self.pool, timeout_s=timeout_s, tokenizer_url=settings.vllm_endpoint, find_form=find_form)

    def _make_overlap(self, needs: CacheNeeds, reports: EngineReports, clock: Clock) -> OverlapSources:
        return OverlapSources(
            self.settings,
            state=self.state,
            clusters=self.clusters,
            engines=self.engines,
            breakers=self.breakers,
            reports=reports,
            looks_up=has_store(self.settings),
            keyed=needs.uses,
            metrics=self._metrics,
            clock=clock,
        )

    def _make_scraper(self, clock: Clock) -> MetricsScraper:
        return MetricsScraper(
            self.settings,
            clusters=self.clusters,
            state=self.state,
            indexes=self.overlap.indexes,
            engines=self.engines,
            read_store=lambda: self.overlap.store.read_memory(),
            on_round=self._tick,
            clock=clock,
        )

    async def __aenter__(self) -> Self:
        self.state.keep_only(self.clusters)
        for name, indexes in self.overlap.indexes.items():
            indexes.followed.on_cleared = partial(self._cleared, name)
        async with AsyncExitStack() as starting:
            for lifetime in self.observers.lifetimes:
                await starting.enter_async_context(lifetime)
            self.state.fresh = False
            for part in (self.pool, self.engines, self.overlap, self.actions, self.scraper):
                await starting.enter_async_context(part)
            self._running = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.observers.close()
        await self._running.aclose()

    def bind_gauges(self) -> None:
        """Bind the gauges to this service, in place of an earlier one."""
        self.overlap.bind_gauges(self._metrics)
        self.feedback.bind_gauges(self._metrics)
        self.scraper.bind_gauges(self._metrics)
        self.actions.jobs.bind_gauges(self._metrics)
        hotness = self.actions.hotness
        self._metrics.group(IndexMetrics).index_bytes.labels("prefixes").set_function(lambda: hotness.held_bytes)
        self.observers.bind_gauges(self._metrics)

    def refresh(self, facts: RequestFacts) -> None:
        """Refresh the facts of a request that was not placed yet from our own sources; a lookup's answer stays."""
        self.overlap.refresh(facts)

    async def facts_for(
        self, request: InferenceRequest, body: bytes, *, cluster: Cluster, model: str = "", tenant: str = ""
    ) -> RequestFacts:
        """`gather`, and `look_up` where that is worth it."""
        facts = self.gather(request, body, cluster=cluster, model=model, tenant=tenant)
        if facts.wants_lookup:
            await self.look_up(facts)
        return facts

    def finished(self, facts: RequestFacts, result: Result) -> None:
        """End a request: queue the actions that follow; never waits."""
        if facts.media and result.prefilled:
            note_reported(facts, result)
        self.feedback.finished(facts, result)
        if facts.request.session_ends:
            self._end_session(facts)
        elif result.prefilled and (
            self._acts
            or facts.indexes.followed.any
            or (result.prompt_tokens is None and self.feedback.uncounted.choose(facts))
        ):
            self._act_on(facts, result)

    def _act_on(self, facts: RequestFacts, result: Result) -> None:
        """Do what is to be done about a prompt that an engine has computed."""
        self.overlap.tokens.note_count(facts, result.prompt_tokens)
        endpoint = None if result.endpoint is None else facts.cluster.find_endpoint(result.endpoint)
        on_prefilled = facts.indexes.followed.on_prefilled
        if on_prefilled is not None and endpoint is not None and result.prompt_tokens is not None:
            cached = result.cached_tokens
            known = facts.overlaps.matched_tokens(endpoint.id) if cached is None else cached
            step = facts.indexes.steps.known.get(endpoint.id, 1)
            on_prefilled(endpoint, (result.prompt_tokens - known) // step * step)
        self.actions.note_served(facts, endpoint)

    def _end_session(self, facts: RequestFacts) -> None:
        """Drop the data kept for the session alone: it will not be requested again."""
        last = facts.indexes.last_served.end_session(facts.names.session)
        self._metrics.group(KvCacheMetrics).sessions_ended.labels("unknown" if last is None else "known").inc()
        if last is not None:
            self.actions.hotness.end_session(facts.names.session, last.keys)
            for key in last.keys[-1:]:
                self.overlap.tokens.memory.release(key)

    def _cleared(self, cluster: str, endpoint: EndpointId) -> None:
        """Handle an engine's report that it dropped its cache."""
        log.info("[kvcache] %s/%s dropped its cache: its index is cleared", cluster, endpoint)
        self.overlap.indexes[cluster].reset_endpoint(endpoint)
        self.state.losses.note_loss(cluster, endpoint, LossReason.CLEARED)

    async def _tick(self) -> None:
        """Between requests, after each round of the scraper."""
        present = {(name, one.id) for name, cluster in self.clusters.items() for one in cluster.endpoints}
        self.feedback.keep_only(present)
        for tick in self.observers.ticks:
            tick()
        await self.overlap.tier_counts.refresh()
