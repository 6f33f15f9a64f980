"""Touching: an engine is asked for a prompt again before it would evict it, where nothing else keeps it there and that
costs less than it is expected to save."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from kvproxy.base.errors import ClientError
from kvproxy.base.log_lines import log_fields
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.actions.job_queue import Job, JobQueue
from kvproxy.cache.actions.signals import Signals
from kvproxy.cache.clients.tokens import body_with_tokens
from kvproxy.cache.clients.vllm import Prefill, VllmClient
from kvproxy.cache.engines import Engines
from kvproxy.cache.metrics import HoldingMetrics
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.routing.work import prefill_s
from kvproxy.features.leases.conversations import LEAST_CHANCE
from kvproxy.features.leases.gaps import Gaps
from kvproxy.features.leases.leases import Lease
from kvproxy.features.leases.metrics import LeaseMetrics

audit = logging.getLogger("kvproxy.audit")

#: What engines are given to compute is averaged over so long; at first over the time since it began, but for
#: bursts.
_HALF_LIFE_S = 60.0
_LEAST_SEEN_S = 30.0
#: A prompt is touched once a cache took this share of its capacity in new tokens since the prompt's last use: with all
#: of it the prompt would be gone, whether that takes seconds or hours.
TOUCHED_AT = 0.5
#: From this share on it goes before requests that wait for their prefill; with all of it there is nothing left to keep.
URGENT_AT = 0.8
GONE_AT = 1.0
#: A touch that found its prompt gone: prompts stay for fewer new tokens than was thought; one that found it, for more.
_SHORTER = 0.5
_LONGER = 1.1
#: What an engine computes of a prompt that it holds: the end of its last block.
LAST_TOKENS = 32
#: Longer prompts would hold the event loop while they are written as JSON.
MAX_TOKENS = 200_000
#: Of pauses of which nothing is known yet.
_ASSUMED_CHANCE = 0.5

Place = tuple[str, EndpointId]


class Insertions:
    """How many new tokens each endpoint's cache took, and so how long one that is not used stays in it."""

    def __init__(self) -> None:
        self._sums: dict[Place, tuple[float, float]] = {}  # tokens, decayed, and when
        self._since: dict[Place, float] = {}
        self._totals: dict[Place, int] = {}
        self._factors: dict[Place, float] = {}

    def note(self, place: Place, tokens: int, now: float) -> None:
        """An endpoint computed so many."""
        self._sums[place] = (self._sum(place, now) + tokens, now)
        self._since.setdefault(place, now)
        self._totals[place] = self.total(place) + tokens

    def total(self, place: Place) -> int:
        """All that it took so far."""
        return self._totals.get(place, 0)

    def share(self, place: Place, *, filled: int, capacity_tokens: int) -> float:
        """New tokens since it had taken `filled`, as a share of those after which what was used then is evicted."""
        return (self.total(place) - filled) / (self._factors.get(place, 1.0) * capacity_tokens)

    def judge(self, place: Place, *, found: bool) -> None:
        """A prompt that should still have been there was, or was not."""
        factor = self._factors.get(place, 1.0)
        self._factors[place] = min(1.0, factor * _LONGER) if found else factor * _SHORTER

    def stays_s(self, place: Place, capacity_tokens: int, now: float) -> float:
        """Seconds after its last use."""
        seen_s = max(_LEAST_SEEN_S, now - self._since.get(place, now))  # else a beginning would count as a pause
        seen = 1.0 - 0.5 ** (seen_s / _HALF_LIFE_S)
        per_s = self._sum(place, now) * math.log(2) / _HALF_LIFE_S / seen
        return math.inf if per_s <= 0 else self._factors.get(place, 1.0) * capacity_tokens / per_s

    def keep_only(self, present: set[Place]) -> None:
        """Forget all other endpoints."""
        self._sums = {place: one for place, one in self._sums.items() if place in present}
        self._since = {place: one for place, one in self._since.items() if place in present}
        self._totals = {place: one for place, one in self._totals.items() if place in present}
        self._factors = {place: one for place, one in self._factors.items() if place in present}

    def _sum(self, place: Place, now: float) -> float:
        tokens, at = self._sums.get(place, (0.0, now))
        return tokens * math.exp(-(now - at) * math.log(2) / _HALF_LIFE_S)


def chance_of_return(lease: Lease, gaps: Gaps, now: float) -> float:
    """That the conversation goes on before the lease ends, now that it has not yet."""
    pauses = gaps.find(lease.of.kind)
    if pauses is None:
        return _ASSUMED_CHANCE
    over = pauses.share_over(now - lease.of.ended_at)
    return (pauses.share_over(lease.until - lease.of.ended_at) - over) / max(1.0 - over, 1e-9)


def is_worth(chance: float, saved_s: float, cost_s: float, *, stays_s: float, left_s: float) -> bool:
    """Whether a return saves more than all touches until the end cost, where a prompt stays for so long after each."""
    touches = math.ceil(left_s / max(TOUCHED_AT * stays_s, 1.0))
    return chance >= LEAST_CHANCE and chance * saved_s > touches * cost_s


def record_action(action: str, lease: Lease, result: str, *, amount: int, took_s: float, **more: str) -> None:
    """One line of the audit log: hashes and counts, never prompts."""
    fields = {
        "action": action,
        "instance": lease.instance,
        "prefix": lease.prefix.name,
        "tokens": lease.tokens,
        "reason": f"lease {lease.why}",
        "result": result,
        "amount": amount,
        **more,
        "took_ms": round(took_s * 1000, 1),
    }
    log_fields(audit, "cache", fields)


async def send_prompt(client: VllmClient, prefix: KnownPrefix, *, timeout_s: float, **fields: str) -> Prefill:
    """Return a prompt whose tokens are known, to be computed or found, for one token."""
    salt = {"cache_salt": prefix.cache_salt} if prefix.cache_salt else {}
    rest = {"model": prefix.model, "max_tokens": 1, "temperature": 0, **salt, **fields}
    return await client.prefill("/v1/completions", body_with_tokens("prompt", prefix.tokens, rest), timeout_s=timeout_s)


class Toucher:
    """Its turn comes between requests, for each lease that it keeps."""

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        gaps: Gaps,
        clusters: Mapping[str, Cluster],
        jobs: JobQueue,
        engines: Engines,
        signals: Signals,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.insertions = Insertions()
        self._signals = signals
        self._settings = settings
        self._gaps = gaps
        self._clusters = clusters
        self._jobs = jobs
        self._engines = engines
        self._metrics = metrics.group(LeaseMetrics).touched_tokens
        self._actions = metrics.group(HoldingMetrics).actions
        self._clock = clock

    def capacity_of(self, endpoint: Endpoint) -> int | None:
        """Tokens of its engine's cache; None: it does not say."""
        reading = self._signals.latest_scrape(endpoint)
        return None if reading is None or reading[1].cache is None else reading[1].cache.capacity_tokens

    def why_not(self, endpoint: Endpoint, tokens: int) -> str:
        """Why a prompt of so many tokens cannot be kept there by this; "" if it can."""
        if not self._settings.leases.touch or endpoint.rank is not None or tokens > MAX_TOKENS:
            return "no_lever"  # an engine itself would choose the rank
        priced = self.capacity_of(endpoint) is not None and self.seconds(endpoint, 1, 0) is not None
        return "" if priced else "unpriced"

    def keep_only_present(self) -> None:
        """Forget endpoints that left."""
        self.insertions.keep_only({(name, one.id) for name, each in self._clusters.items() for one in each.endpoints})

    def seconds(self, endpoint: Endpoint, uncached: int, cached: int) -> float | None:
        """Of prefill there, as learned."""
        cluster = next((one for one in self._clusters.values() if endpoint in one.endpoints), None)
        speeds = None if cluster is None else cluster.speeds
        if speeds is None or speeds.learning:
            return None
        return prefill_s(uncached, cached, 0.0, speeds.seconds) * speeds.slowness(endpoint.id, self._clock())

    def consider(self, lease: Lease, now: float) -> str:
        """Ask for the prompt again if it would soon be evicted. Return why the lease is given up, "" if it is not."""
        cluster = self._clusters.get(lease.of.cluster)
        endpoint = None if cluster is None else cluster.find_endpoint(lease.of.endpoint)
        capacity = None if endpoint is None else self.capacity_of(endpoint)
        if endpoint is None or capacity is None:
            return ""
        place = (lease.of.cluster, endpoint.id)
        share = self.insertions.share(place, filled=lease.filled, capacity_tokens=capacity)
        if share >= GONE_AT:
            return "too_late"
        if share < TOUCHED_AT or endpoint.condition(now) is not Condition.UP:
            return ""
        if share < URGENT_AT and endpoint.load.pending_requests:
            return ""  # what is to be computed already goes first
        if not self._is_worth(lease, endpoint, self.insertions.stays_s(place, capacity, now), now):
            return "not_worth"
        job = Job(
            ("touch", lease.instance, lease.of.key),
            lambda: self._touch(lease, endpoint),
            lane=lease.instance,
            about=f"touch {lease.prefix.name}",
        )
        self._jobs.submit(job)
        return ""

    def _is_worth(self, lease: Lease, endpoint: Endpoint, stays_s: float, now: float) -> bool:
        saved_s = self.seconds(endpoint, lease.tokens, 0)
        cost_s = self.seconds(endpoint, LAST_TOKENS, lease.tokens)
        if saved_s is None or cost_s is None:
            return False
        chance = chance_of_return(lease, self._gaps, now)
        return is_worth(chance, saved_s, cost_s, stays_s=stays_s, left_s=lease.until - now)

    async def _touch(self, lease: Lease, endpoint: Endpoint) -> bool:
        began = self._clock()
        found = 0
        if lease.returned_at is not None or began >= lease.until:
            return False  # it ended while this waited
        if self._settings.cache_strategy.dry_run:
            result = "dry_run"
        else:
            result, found = await self._ask_again(lease, endpoint)
        lease.used_at, lease.filled = self._clock(), self.insertions.total((lease.of.cluster, endpoint.id))
        self._actions.labels("touch", result).inc()
        record_action("touch", lease, result, amount=found, took_s=lease.used_at - began)
        return result in ("done", "unverified", "dry_run")

    async def _ask_again(self, lease: Lease, endpoint: Endpoint) -> tuple[str, int]:
        """How it went, and the tokens that the engine still had."""
        timeout_s = self._settings.background.job_timeout
        try:
            answer = await send_prompt(self._engines.client(endpoint.engine), lease.prefix, timeout_s=timeout_s)
        except ClientError as error:
            return error.reason, 0
        if answer.cached_tokens is None:
            return "unverified", 0
        found = answer.cached_tokens
        place = (lease.of.cluster, endpoint.id)
        self._metrics.labels("found").inc(found)
        self._metrics.labels("computed").inc(max(0, answer.prompt_tokens - found))
        was_there = found >= lease.reusable_tokens
        self.insertions.judge(place, found=was_there)
        return "done" if was_there else "computed", found
