"""Tokenize and lookup under one routing deadline: what comes in time is used, what comes late still teaches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.errors import BreakerOpen, ClientError
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Tier
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.overlap.merge import HolderOverlap
from kvproxy.cache.overlap.tokens import AskedTokens, TokenSource
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES, canonical_bytes
from kvproxy.cache.store import FindHolders, Holder, Prefix
from kvproxy.features.lmcache.lookups import LookupClient
from kvproxy.features.lmcache.metrics import LMCacheMetrics
from kvproxy.features.lmcache.settings import LMCacheSettings

log = logging.getLogger("kvproxy.kvcache")

#: LookupClient under way at once, late ones included; further requests are routed without.
MAX_LOOKUPS = 512
#: Request bodies that these keep in memory, each for `request_timeout` at most; beyond it likewise.
MAX_HELD_BYTES = 128 * 1024 * 1024
#: A prompt has about a token for so many bytes.
_TOKEN_BYTES = 4
QUEUE = "kvcache_lookup"


#: Key of equal lookups: cluster, model, text and length.
_Question = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class _Answer:
    """`outcome` is a metric label."""

    outcome: str
    asked: AskedTokens | None = None
    holders: Sequence[Holder] = field(default=())


class LookupTask:
    """Owner of the lookup tasks, one for all requests with the same lookup at once.

    They go on when the deadline has passed or the client has left, each within `request_timeout`, so that neither
    counts against the service; `close` ends them."""

    def __init__(
        self,
        settings: LMCacheSettings,
        *,
        tokens: TokenSource,
        lookups: LookupClient,
        known_instances: Callable[[], Collection[str]],
        find_more: Callable[[], FindHolders | None],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._tokens = tokens
        self._lookups = lookups
        self._known_instances = known_instances
        self._find_more = find_more
        self._clock = clock
        self._outcomes = metrics.group(LMCacheMetrics).lookups
        self._tasks: dict[_Question, asyncio.Task[_Answer]] = {}
        self._held_bytes = 0

    def bind_gauges(self, metrics: Metrics) -> None:
        metrics.group(BoundMetrics).show_queue(QUEUE, lambda: len(self._tasks), limit=MAX_LOOKUPS)

    def is_wanted(self, facts: RequestFacts) -> bool:
        """Return True if a lookup is worth a wait: a service that answers, and tokens enough for a chunk, known or
        available."""
        lookups = self._lookups
        settings = self._settings
        if lookups.provider is None or not facts.request.prompt.parts:
            return False
        if not lookups.possible:
            self._outcomes.labels("breaker_open").inc()
            return False
        if self._full(len(facts.body)) and _question(facts) not in self._tasks:
            self._outcomes.labels("busy").inc()
            return False
        if facts.tokens is not None:  # if only for the prompt's beginning: an unseen prompt is at no instance
            return len(facts.tokens) >= settings.lookup_min_tokens
        return facts.prompt_bytes >= _TOKEN_BYTES * settings.lookup_min_tokens and self._tokens.may_ask(facts)

    async def ask(self, facts: RequestFacts) -> list[HolderOverlap]:
        """Return the holders that came in time. Tokens learned on the way are put into `facts`."""
        left_s = self._settings.lookup_routing_timeout - (self._clock() - facts.started_at)
        question = _question(facts)
        task = self._tasks.get(question)
        first = task is None
        if task is None:
            task = self._begin(question, facts)
        try:
            done, _ = await asyncio.wait({task}, timeout=max(0.0, left_s))
        finally:
            if first and not task.done():
                task.add_done_callback(lambda late: self._late(facts, late))
        if not done:
            self._outcomes.labels("lookup_timeout").inc()
            return []
        answer = _Answer("error") if task.cancelled() else task.result()  # cancelled: the service ends
        self._outcomes.labels(answer.outcome).inc()
        if answer.asked is not None:
            facts.tokens, facts.tokens_bytes, facts.tokens_exact = answer.asked
            facts.hashed_tokens = None
        if answer.outcome in ("hit", "miss"):
            facts.holders_found = len(answer.holders)
        return self.count_overlaps(facts, answer.holders)

    async def close(self) -> None:
        """Cancel what still runs."""
        await cancel_tasks(self._tasks.values())

    def _full(self, body_bytes: int) -> bool:
        held = self._held_bytes
        return len(self._tasks) >= MAX_LOOKUPS or (held > 0 and held + body_bytes > MAX_HELD_BYTES)

    def _begin(self, question: _Question, facts: RequestFacts) -> asyncio.Task[_Answer]:
        task = self._tasks[question] = asyncio.create_task(self._answer(facts), name="kvcache lookup")
        held = len(facts.body)
        self._held_bytes += held

        def over(_: object) -> None:
            del self._tasks[question]
            self._held_bytes -= held

        task.add_done_callback(over)
        return task

    async def _answer(self, facts: RequestFacts) -> _Answer:
        fresh = None
        known = facts.tokens
        try:
            if known is None:
                asking = self._tokens.start_tokenizing(facts)
                fresh = None if asking is None else await asyncio.shield(asking)
                known = None if fresh is None else fresh.ids
            if known is None or len(known) < self._settings.lookup_min_tokens:
                return _Answer("no_tokens", fresh)
            prefix = Prefix(known, facts.model, facts.request.cache_salt or "")
            holders = await self._lookups.find_holders(prefix)
            if (find_more := self._find_more()) is not None:
                holders = [*holders, *find_more(prefix)]
        except BreakerOpen:
            return _Answer("breaker_open", fresh)
        except ClientError:
            return _Answer("error", fresh)
        except Exception:
            log.exception("[kvcache] a lookup is broken")
            return _Answer("error", fresh)
        return _Answer("hit" if any(holder.tokens > 0 for holder in holders) else "miss", fresh, holders)

    def _late(self, facts: RequestFacts, task: asyncio.Task[_Answer]) -> None:
        """Token memory has learned already; what surely is a prefix also goes into the index, for the next request."""
        if task.cancelled():
            return
        answer = task.result()
        tokens = facts.tokens
        stands_for = facts.tokens_bytes
        if answer.asked is not None:
            tokens, stands_for, _ = answer.asked
        if not tokens:
            return
        index = facts.indexes.approximate
        for holder in self.count_overlaps(facts, answer.holders):
            if holder.contiguous and not any(tier is Tier.SHARED for tier, _ in holder.lower):
                blocks = int(min(holder.tokens, len(tokens)) * stands_for / len(tokens)) // TEXT_BLOCK_BYTES
                index.insert(holder.endpoint, index.locate(facts.hashes[:blocks]))

    def count_overlaps(self, facts: RequestFacts, holders: Sequence[Holder]) -> list[HolderOverlap]:
        """Return what the holders are worth for the endpoints of this request."""
        if not holders:
            return []
        return self._lookups.count_overlaps(
            holders,
            endpoints=facts.endpoints,
            known=self._known_instances(),
            local=facts.overlaps.by_endpoint,
            hashes=facts.hashes,
            denied=facts.indexes.denied,
        )


def _question(facts: RequestFacts) -> _Question:
    digest = facts.hashes[-1] if facts.hashes else xxh3_64_intdigest(canonical_bytes(facts.request.prompt))
    return (facts.cluster.name, facts.model, digest, facts.prompt_bytes)
