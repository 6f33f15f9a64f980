"""Choice of prefixes to warm and their endpoints: hot ones with known tokens, after a loss, at a new endpoint, and
where fewer endpoints hold one than its traffic is worth."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvproxy.base.errors import ClientError
from kvproxy.base.log_lines import log_fields
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.actions.hotness import KnownPrefix, common_tokens
from kvproxy.cache.actions.job_queue import Job
from kvproxy.cache.clients.vllm import Prefill
from kvproxy.cache.engines import Engines
from kvproxy.cache.feature import CacheObserver, CacheParts
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.cache.metrics import HoldingMetrics
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.features.warming.metrics import WarmingMetrics
from kvproxy.features.warming.settings import WarmingPlace

#: Tokens sent at once of a prefix with known tokens: the longest wait of a request that comes meanwhile.
PIECE_TOKENS = 2048
#: One send; a long prompt on a slow engine.
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Warmed:
    """Result of warming: `done`, `no_effect`, `unverified` (the engine does not report reuse), `busy`, `dry_run`, or
    the reason of a failed call. Tokens are the engine's count of the last prompt, and of it those that a second send
    found."""

    result: str
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Warmer:
    """Sends to one endpoint at a time what its caller chose, within idle capacity."""

    def __init__(self, settings: KvCacheSettings, *, engines: Engines, metrics: Metrics, clock: Clock) -> None:
        self._dry_run = settings.cache_strategy.dry_run
        self._max_requests = part_of(settings, WarmingPlace).warming.max_requests
        self._clock = clock
        self._engines = engines
        self._tokens = metrics.group(WarmingMetrics).warmed_tokens

    async def warm_body(self, endpoint: Endpoint, path: str, body: bytes) -> Warmed:
        """Return a request that generates one token, and again to see what is reused of it."""
        return await self._warm(endpoint, path, [body])

    async def warm_prefix(self, endpoint: Endpoint, prefix: KnownPrefix) -> Warmed:
        """By its tokens, in pieces that are each sent only while the engine is idle."""
        if self._dry_run:
            return Warmed("dry_run")
        return await self._warm(endpoint, "/v1/completions", _pieces(prefix))

    async def is_idle(self, endpoint: Endpoint) -> bool:
        """By its own word, and by what this proxy has under way there. ClientError where it cannot be asked."""
        limit = self._max_requests
        if endpoint.condition(self._clock()) is not Condition.UP or endpoint.load.in_flight > limit:
            return False
        engine = await self._engines.client(endpoint.engine).fetch_metrics()
        if endpoint.load.in_flight > limit or engine.running is None:
            return False
        return engine.running + (engine.waiting or 0) <= limit

    async def _warm(self, endpoint: Endpoint, path: str, bodies: Sequence[bytes] | Iterator[bytes]) -> Warmed:
        if endpoint.rank is not None:
            return Warmed("not_supported")  # the engine itself would choose the rank
        last = Prefill(0, 0)
        body = b""
        try:
            for body in bodies:
                if not await self.is_idle(endpoint):
                    return Warmed("busy", last.prompt_tokens)
                last = await self._send(endpoint, path, body)
            again = await self._send(endpoint, path, body)
        except ClientError as error:
            return Warmed(error.reason, last.prompt_tokens)
        if again.cached_tokens is None:
            return Warmed("unverified", again.prompt_tokens)
        return Warmed("done" if again.cached_tokens else "no_effect", again.prompt_tokens, again.cached_tokens)

    async def _send(self, endpoint: Endpoint, path: str, body: bytes) -> Prefill:
        answer = await self._engines.client(endpoint.engine).prefill(path, body, timeout_s=TIMEOUT_S)
        found = answer.cached_tokens or 0
        self._tokens.labels("found").inc(found)
        self._tokens.labels("computed").inc(max(0, answer.prompt_tokens - found))
        return answer


def _pieces(prefix: KnownPrefix) -> Iterator[bytes]:
    salt = {"cache_salt": prefix.cache_salt} if prefix.cache_salt else {}
    rest = {"model": prefix.model, "max_tokens": 1, "temperature": 0, **salt}
    for end in range(PIECE_TOKENS, len(prefix.tokens) + PIECE_TOKENS, PIECE_TOKENS):
        yield msgspec.json.encode({**rest, "prompt": prefix.tokens[:end].tolist()})


audit = logging.getLogger("kvproxy.audit")

#: Longer prefixes are not warmed by themselves.
MAX_TOKENS = 32_768
#: Pause after a failed attempt at an endpoint.
RETRY_S = 15.0
#: Prefixes examined per round, the last used ones.
LOOKED_AT = 1024


class WarmingPlan(NamedTuple):
    """A prefix that an endpoint lacks."""

    endpoint: Endpoint
    prefix: KnownPrefix
    reason: str


def _begun_by(prefix: KnownPrefix, known: Iterable[KnownPrefix]) -> Iterator[KnownPrefix]:
    """Return the prefixes that it begins with, itself included."""
    return (one for one in known if one.tokens and common_tokens(one.tokens, prefix.tokens) == len(one.tokens))


class Warming(CacheObserver):
    """Warming between requests (`tick`), within a budget, one prefix at a time per endpoint."""

    def __init__(self, parts: CacheParts) -> None:
        settings = parts.settings
        self._settings = part_of(settings, WarmingPlace).warming
        self._claim_s = settings.background.job_timeout
        self._hot_uses = settings.cache_strategy.hot_content_threshold
        self._clusters = parts.clusters
        self._hotness = parts.actions.hotness
        self._losses = parts.state.losses
        self._executor = parts.actions.executor
        self._jobs = parts.actions.jobs
        self.warmer = Warmer(settings, engines=parts.engines, metrics=parts.metrics, clock=parts.clock)
        self._results = parts.metrics.group(HoldingMetrics).actions
        self._clock = parts.clock
        self._budget = float(self._settings.tokens_per_minute)
        self._refilled_at = parts.clock()
        self._known: dict[tuple[str, EndpointId], tuple[LossReason, float] | None] = {}  # the last loss of each
        self._empty: dict[str, str] = {}  # instances that lack the hot prefixes, and why
        self._tried: dict[str, float] = {}  # when an instance was tried last; but for one that was warmed or busy
        self._first = True

    def tick(self) -> None:
        """Note what was lost, and queues what is worth sending."""
        now = self._clock()
        self._refill(now)
        self._note_losses()
        for cluster in self._clusters.values():
            for planned in self.plan(cluster.endpoints, now):
                self._submit(planned)

    def plan(self, endpoints: Sequence[Endpoint], now: float) -> list[WarmingPlan]:
        """At most one prefix an endpoint, the one that saves most: first at those that lost theirs, then at the least
        busy ones."""
        hot = self.find_hot(now)
        able = [one for one in endpoints if one.condition(now) is Condition.UP and one.rank is None]
        holders = {prefix.key: prefix.instances & {one.instance_id for one in able} for _, prefix in hot}
        planned = []
        for endpoint in sorted(able, key=lambda one: (one.instance_id not in self._empty, one.load.in_flight)):
            if now - self._tried.get(endpoint.instance_id, -math.inf) < RETRY_S:
                continue
            lacks = False
            for uses, prefix in hot:
                held_by = holders[prefix.key]
                reason = self._why(endpoint, uses, prefix, held_by, len(able))
                lacks |= bool(reason)
                if reason and len(prefix.tokens) <= self._budget:
                    self._budget -= len(prefix.tokens)
                    self._tried[endpoint.instance_id] = now
                    for covered in _begun_by(prefix, (one for _, one in hot)):
                        holders[covered.key].add(endpoint.instance_id)
                    planned.append(WarmingPlan(endpoint, prefix, reason))
                    break
            if not lacks:
                self._empty.pop(endpoint.instance_id, None)  # it holds the hot prefixes again
        return planned

    def _why(self, endpoint: Endpoint, uses: int, prefix: KnownPrefix, held_by: set[str], most: int) -> str:
        """Return the reason to warm it there; "" where there is none."""
        if endpoint.instance_id in held_by or not endpoint.serves(prefix.model):
            return ""
        if reason := self._empty.get(endpoint.instance_id):
            return reason
        wanted = min(math.ceil(uses / self._settings.uses_per_replica), most)
        return f"{uses} uses, {len(held_by)} of {wanted} holders" if len(held_by) < wanted else ""

    def find_hot(self, now: float) -> list[tuple[int, KnownPrefix]]:
        """Return the prefixes that several sessions use, by their total saving in tokens."""
        counted = (
            (self._hotness.count_recent_uses(one, now), one)
            for one in self._hotness.walk_latest(LOOKED_AT)
            if one.actionable and not one.session and len(one.tokens) <= MAX_TOKENS
        )
        hot = [(uses, one) for uses, one in counted if uses >= self._hot_uses]
        return sorted(hot, key=lambda pair: -pair[0] * len(pair[1].tokens))

    def _note_losses(self) -> None:
        """Note losses since the last round: new endpoints lack everything; at the first round none counts as new."""
        seen = {}
        for name, cluster in self._clusters.items():
            for endpoint in cluster.endpoints:
                where = (name, endpoint.id)
                seen[where] = loss = self._losses.known.get(where)
                if where not in self._known and not self._first:
                    self._note_empty(endpoint, "new endpoint")
                elif loss is not None and loss != self._known.get(where):
                    self._note_empty(endpoint, loss[0].value)
        self._known = seen
        self._first = False
        present = {one.instance_id for cluster in self._clusters.values() for one in cluster.endpoints}
        self._empty = {instance: why for instance, why in self._empty.items() if instance in present}
        self._tried = {instance: at for instance, at in self._tried.items() if instance in present}

    def _note_empty(self, endpoint: Endpoint, reason: str) -> None:
        self._hotness.note_emptied(endpoint.instance_id)
        self._empty[endpoint.instance_id] = reason
        self._tried.pop(endpoint.instance_id, None)

    def _note_held(self, prefix: KnownPrefix, instance: str) -> None:
        """Note the prefix, and those that it begins with, as held."""
        for one in _begun_by(prefix, self._hotness.walk_latest(LOOKED_AT)):
            one.instances.add(instance)

    def _refill(self, now: float) -> None:
        most = float(self._settings.tokens_per_minute)
        self._budget = min(most, self._budget + most * (now - self._refilled_at) / 60.0)
        self._refilled_at = now

    def _submit(self, planned: WarmingPlan) -> None:
        instance = planned.endpoint.instance_id
        prefix = planned.prefix
        job = Job(
            ("warm", instance, prefix.key), lambda: self._run(planned), lane=instance, about=f"warm {prefix.name}"
        )
        self._jobs.submit(job)

    async def _run(self, planned: WarmingPlan) -> bool:
        prefix = planned.prefix
        instance = planned.endpoint.instance_id
        began = self._clock()
        claims = self._executor.claims
        if claims is not None and not await claims.claim(f"warm {instance} {prefix.name}", self._claim_s):
            self._results.labels("warm", "elsewhere").inc()
            return False
        warmed = await self.warmer.warm_prefix(planned.endpoint, prefix)
        good = warmed.result in ("done", "unverified", "dry_run")
        if good:
            self._note_held(prefix, instance)
        if good or warmed.result == "busy":
            self._tried.pop(instance, None)
        self._results.labels("warm", warmed.result).inc()
        fields = {
            "action": "warm",
            "instance": instance,
            "prefix": prefix.name,
            "tokens": len(prefix.tokens),
            "reason": planned.reason,
            "result": warmed.result,
            "amount": warmed.cached_tokens,
            "took_ms": round((self._clock() - began) * 1000, 1),
        }
        log_fields(audit, "cache", fields)
        return good
