"""Overlap of each endpoint with a prompt, from all sources: own indexes, KV events, token memory, lookups."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, InferenceRequest, RequestKind
from kvproxy.cache.breakers import OperationBreakers
from kvproxy.cache.engines import Engines
from kvproxy.cache.media.cut import cut_prompt
from kvproxy.cache.media.mixed import MixedPrompt
from kvproxy.cache.media.urls import UrlSignatures
from kvproxy.cache.metrics import KvCacheMetrics
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.overlap.gauges import TierCounts, show_indexes
from kvproxy.cache.overlap.last_served import NO_BLOCKS, NO_NAMES, Served
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.overlap.merge import in_steps
from kvproxy.cache.overlap.reported_facts import recall_reported
from kvproxy.cache.overlap.reports import EngineReports
from kvproxy.cache.overlap.tokens import TokenSource
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cache.state import CacheState
from kvproxy.cache.store import KvStore
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routing.policy import PRECISE, SESSION, Overlap, OverlapFacts


class OverlapSources:
    """An async context manager around the tasks of its sources."""

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        state: CacheState,
        clusters: Mapping[str, Cluster],
        engines: Engines,
        breakers: OperationBreakers,
        reports: EngineReports,
        looks_up: bool,
        keyed: bool,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._looks_up = looks_up
        self._clusters = clusters
        self._clock = clock
        self._bytes_per_token = state.bytes_per_token
        self._counted = state.counted
        self._media_counts = state.media_counts
        self.reports = reports
        self.indexes: Mapping[str, LocalIndexes] = {
            name: self._make_indexes(cluster, state, keyed=keyed) for name, cluster in clusters.items()
        }
        memory = state.token_memory(settings.token_cache, clock)
        self.tokens = TokenSource(
            settings,
            memory=memory,
            learn_count=state.learn_count,
            engines=engines,
            breakers=breakers,
            metrics=metrics,
            clock=clock,
        )
        self.store = KvStore()  # until a feature sets its own
        self.tier_counts = TierCounts(self.indexes, clusters, clock=clock)
        # Read once: settings are slow to read.
        self._min_tokens = settings.min_matched_tokens
        self._facts_seconds = metrics.group(KvCacheMetrics).facts_seconds.labels()
        self._running = AsyncExitStack()
        self._entered = False

    def _make_indexes(self, cluster: Cluster, state: CacheState, *, keyed: bool) -> LocalIndexes:
        indexes = LocalIndexes(
            state.index(cluster.name, endpoints=len(cluster.endpoints)),
            self.reports.followed.get(cluster.name),
            lookups=self._looks_up,
            keyed=keyed,
            clock=self._clock,
        )
        indexes.sessions.signatures = UrlSignatures(self._settings.url_signatures)
        indexes.store_readers = partial(_store_readers, cluster)
        indexes.followed.reported.on_counted = state.media_counts.note_medium
        return indexes

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as starting:
            starting.push_async_callback(self.tokens.close)
            await starting.enter_async_context(self.store)
            self._running = starting.pop_all()
        self._entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered = False
        await self._running.aclose()

    def gather(
        self, request: InferenceRequest, body: bytes, *, cluster: Cluster, model: str = "", tenant: str = ""
    ) -> RequestFacts:
        """Return the facts of our own sources, at once. `model` is the engines' name for it, where that differs."""
        began = self._clock()
        indexes = self.indexes[cluster.name]
        model = model or request.model or self._settings.default_model
        if model in cluster.adapters.names:
            indexes.loras[model] = None  # before any event speaks of it
        names = NO_NAMES
        if request.session_key is not None or request.kind is RequestKind.RESPONSES:
            names = indexes.prompts.name_request(request, model, tenant)
        if request.continues is None:
            hashes, keys, prompt_bytes, text, media = indexes.prompts.hash_prompt(request, model)
        else:  # its text is the rest of a prompt that begins as the history does
            history = indexes.last_served.find_history(names, began)
            prompt, media = cut_prompt(request.prompt, indexes.sessions.signatures)
            hashes = NO_BLOCKS
            keys = ()
            prompt_bytes = prompt.size_bytes
            text = None
            if history is not None:
                hashes = history.root
        text_bytes = prompt_bytes - sum([medium.size for medium in media]) if media else prompt_bytes
        facts = RequestFacts(
            cluster,
            indexes,
            request,
            body,
            model,
            indexes.approximate.locate(hashes),
            keys,
            prompt_bytes,
            text_bytes,
            began,
            self._min_tokens,
            text,
            names,
            media,
        )
        if self._looks_up or indexes.followed.any:
            self.tokens.recall_tokens(facts)
            if media:
                recall_reported(facts)
        self._assess(facts)
        if self._entered and request.continues is None and self._looks_up:
            facts.wants_lookup = self.store.is_wanted(facts)
        self._facts_seconds.observe(self._clock() - began)
        return facts

    async def look_up(self, facts: RequestFacts) -> None:
        """Ask the store within what is left of the routing deadline, and complete the facts."""
        facts.wants_lookup = False
        facts.lookup_overlaps = await self.store.look_up(facts)
        if facts.lookup_overlaps or facts.tokens_exact:
            self._assess(facts)

    def refresh(self, facts: RequestFacts) -> None:
        """Refresh the facts of a request that waited from our own sources; a lookup's answer stays."""
        if not facts.tokens_exact and (self._looks_up or facts.indexes.followed.any):
            self.tokens.recall_tokens(facts)
        if facts.media:
            recall_reported(facts)
        self._assess(facts)

    def placed(self, facts: RequestFacts, endpoint: EndpointId) -> None:
        """Record the request's endpoint; an earlier attempt's entry is taken back."""
        earlier = facts.entry
        if earlier is not None:
            facts.indexes.settle_entry(earlier, prefilled=False)
        facts.entry = facts.indexes.route(endpoint, facts.cursor, facts.overlaps)

    def move_prompt(self, facts: RequestFacts, endpoint: EndpointId, *, kept: bool) -> None:
        """Record that this endpoint computes the prompt of the request, or has pulled it; the one recorded before has
        `kept` it, or never computed it."""
        if facts.entry is not None:
            facts.entry = facts.indexes.move_entry(facts.entry, endpoint, kept=kept)

    def instance_ids(self) -> frozenset[str]:
        """Ids of all endpoints at the store."""
        return frozenset(one.instance_id for cluster in self._clusters.values() for one in cluster.endpoints)

    def trust(self, cluster: str, endpoint: EndpointId) -> dict[str, float]:
        """By source: the share of an unbacked claim about the endpoint that is trusted; only what was ever tried."""
        indexes = self.indexes[cluster]
        sources = {PRECISE: indexes.trust}
        if self.store.source is not None:
            sources[self.store.source] = indexes.lookup_trust
        return {source: one.trusted_share(endpoint) for source, one in sources.items() if endpoint in one}

    def _assess(self, facts: RequestFacts) -> None:
        """Facts from everything known by now."""
        tokens = facts.tokens
        if tokens:
            bytes_per_token = max(facts.tokens_bytes, 1) / len(tokens)
            rest = 0 if facts.tokens_exact else facts.text_bytes - facts.tokens_bytes
            prompt_tokens = len(tokens) + int(rest / bytes_per_token)
        else:
            counted = self._counted.find_ratio(facts.keys) if facts.keys else None
            bytes_per_token = counted or self._bytes_per_token.look_up(facts.model)
            prompt_tokens = int(facts.text_bytes / bytes_per_token)
        if facts.media:
            counts = [self._media_counts.look_up(facts.model, medium) for medium in facts.media]
            facts.mixed = MixedPrompt(facts.media, counts, bytes_per_token=bytes_per_token)
            prompt_tokens += facts.mixed.media_tokens
        if facts.reported is not None and facts.reported.whole:
            prompt_tokens = facts.reported.prompt_tokens
        indexes = facts.indexes
        cursor = facts.cursor
        history = None
        if facts.request.continues is not None:
            history = indexes.last_served.find_history(facts.names, self._clock())
            prompt_tokens += 0 if history is None else history.tokens
        found = indexes.find_overlaps(
            cursor,
            bytes_per_token=bytes_per_token,
            tokens=tokens,
            hashed=facts.hashed_tokens,
            model=facts.model,
            cache_salt=facts.request.cache_salt,
            looked_up=facts.lookup_overlaps,
            prompt_tokens=prompt_tokens,
            mixed=facts.mixed,
            reported=facts.reported,
        )
        if history is not None:
            _add_history(found, history, indexes.steps.known.get(history.endpoint), prompt_tokens)
        block_tokens = TEXT_BLOCK_BYTES / bytes_per_token
        hot_tokens = int(indexes.approximate.heat.hot_blocks(cursor) * block_tokens)  # of a cursor renewed just now
        names = facts.names
        session = 0 if facts.request.session_of_user else names.session
        facts.overlaps = OverlapFacts(
            prompt_tokens, found, hot_tokens, cursor.hashes, block_tokens, session=session, parent=names.parent
        )

    def bind_gauges(self, metrics: Metrics) -> None:
        self.tokens.bind_gauges(metrics)
        show_indexes(self.indexes, self._clusters, self.trust, metrics)
        self.tier_counts.bind_gauges(metrics)


def _store_readers(cluster: Cluster) -> list[EndpointId]:
    return [endpoint.id for endpoint in cluster.endpoints if endpoint.reads_shared_kv]


def _add_history(found: dict[EndpointId, Overlap], history: Served, step: int | None, prompt_tokens: int) -> None:
    """Add the beginning of a prompt that continues from there: only its engine has it whole. Templates decide the
    answer's form in the next prompt, so that only the prompt before counts."""
    known = found.get(history.endpoint)
    tokens = history.prompt_tokens if known is None else max(known.tokens, history.prompt_tokens)
    held = Overlap(tokens, (), SESSION)
    found[history.endpoint] = held if step is None else in_steps(held, step, prompt_tokens)
