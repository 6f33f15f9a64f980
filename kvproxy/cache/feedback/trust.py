"""Trust in claims about an engine's cache, by the accuracy of earlier ones, and losses of a cache.

A prefix this router itself sent to an endpoint, and that its capacity should still hold, is backed. One reported only
by events or a lookup service is not: another router may have sent it there, or a removal was lost. Such a claim counts
for the share of earlier ones that proved true.

Some engines reuse more than their complete KV events announce: then those events do not describe the cache. An index
that follows such a stream finds too little of every prompt, and being complete it would overrule routed requests. It
happens where an engine names blocks in an unknown way: keys of another kind than tokens, tokens of another tokenizer,
or content that only one side counts as part of the prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cluster.metrics import EndpointStateMetrics


@dataclass(slots=True)
class _Record:
    right: float = 0.0
    claims: float = 0.0


class Trust:
    """Starts with full trust, loses it within a few wrong claims, and regains it as they age.

    Every response counts towards ageing, so that an endpoint whose claims no request follows any more is tried again.
    """

    def __init__(self, *, prior_claims: float = 2.0, decay: float = 0.998, max_endpoints: int = 4096) -> None:
        self._prior_claims = prior_claims
        self._decay = decay
        self._max_endpoints = max_endpoints
        self._records: dict[EndpointId, _Record] = {}  # a dict: each decision reads one an endpoint

    def __contains__(self, endpoint: object) -> bool:
        """Return True if an unbacked claim about the endpoint was ever tested."""
        return endpoint in self._records

    @property
    def tested(self) -> Collection[EndpointId]:
        """Endpoints about which an unbacked claim was ever tested."""
        return self._records.keys()

    def trusted_share(self, endpoint: EndpointId) -> float:
        """Of an unbacked claim that is trusted, 0 to 1."""
        record = self._records.get(endpoint)
        if record is None:
            return 1.0
        return (record.right + self._prior_claims) / (record.claims + self._prior_claims)

    def trusted_tokens(self, endpoint: EndpointId, tokens: int, backed_tokens: int) -> int:
        """Return the trusted part of a claim of `tokens`, of which `backed_tokens` (or more) are backed."""
        unbacked = tokens - backed_tokens
        if unbacked <= 0 or endpoint not in self._records:
            return tokens
        return backed_tokens + int(self.trusted_share(endpoint) * unbacked)

    def observe_claim(self, endpoint: EndpointId, tokens: int, backed_tokens: int, cached_tokens: int) -> None:
        """Learn from a response with `cached_tokens`, where the endpoint's claim had been `tokens`, `backed_tokens` of
        them backed."""
        record = self._records.get(endpoint)
        unbacked = tokens - backed_tokens
        if record is None:
            if unbacked <= 0:
                return
            record = self._make(endpoint)
        record.right *= self._decay
        record.claims *= self._decay
        if unbacked > 0:
            record.right += min(1.0, max(0.0, (cached_tokens - backed_tokens) / unbacked))
            record.claims += 1.0

    def forget_endpoint(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left."""
        self._records.pop(endpoint, None)

    def _make(self, endpoint: EndpointId) -> _Record:
        if len(self._records) >= self._max_endpoints:
            del self._records[next(iter(self._records))]
        record = self._records[endpoint] = _Record()
        return record


#: Shorter reuse is weak evidence, and some of each is a block that was stored while the request was on its way.
LEAST_TOKENS = 256
_SPARED_TOKENS = 64
_SPARED_SHARE = 0.25
#: Number of the latest answers, and of those reused further that end the trust, and that restore it.
WINDOW = 8
_RAISED_AT = 4
_ENDED_AT = 1


@dataclass(slots=True)
class MissedReuse:
    """Evidence from the latest answers of an endpoint."""

    endpoint: EndpointId
    announced_tokens: int = 0  # of the latest that was reused further
    reused_tokens: int = 0
    short: int = 0  # a bit for each of the latest answers

    @property
    def count(self) -> int:
        """Of the latest answers, those that were reused further."""
        return self.short.bit_count()


class MissedReuses:
    """Missed reuse of one cluster. `doubted` has the endpoints whose events count less than routed requests: until they
    announce enough again, the engine restarts, or the endpoint leaves."""

    def __init__(self) -> None:
        self.doubted: set[EndpointId] = set()
        self._records: dict[EndpointId, MissedReuse] = {}

    def observe_reuse(self, endpoint: EndpointId, *, announced_tokens: int, reused_tokens: int) -> None:
        """Learn from the engine's reuse of `reused_tokens` of a looked-up prompt, of which its events had announced
        `announced_tokens`."""
        if reused_tokens < LEAST_TOKENS:
            return
        is_short = announced_tokens + _SPARED_TOKENS + _SPARED_SHARE * reused_tokens < reused_tokens
        record = self._records.get(endpoint)
        if record is None:
            if not is_short:
                return  # nearly every answer of nearly every engine
            record = self._records[endpoint] = MissedReuse(endpoint)
        record.short = (record.short << 1 | is_short) & ((1 << WINDOW) - 1)
        if is_short:
            record.announced_tokens = announced_tokens
            record.reused_tokens = reused_tokens
        if record.count >= _RAISED_AT:
            self.doubted.add(endpoint)
        elif record.count <= _ENDED_AT:
            self.doubted.discard(endpoint)

    def doubted_records(self) -> Iterator[MissedReuse]:
        """Of the endpoints that are doubted."""
        return (self._records[endpoint] for endpoint in sorted(self.doubted))

    def forget_endpoint(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left or is another process now."""
        self.doubted.discard(endpoint)
        self._records.pop(endpoint, None)


#: How long after a loss it explains requests without a hit.
RECENT_S = 60.0


class LossReason(StrEnum):
    """How a loss was noticed; a metric label."""

    RESTARTED = "restarted"  # another process answers, or its counters began again
    CLEARED = "cleared"  # reported by its KV events: `/reset_prefix_cache`, `/flush_cache`, an update of its weights
    FORGOT = "forgot"  # it reused nothing of a prompt sent shortly before
    ASLEEP = "asleep"  # it sleeps, which gives its KV memory up


@dataclass(frozen=True, slots=True)
class Loss:
    """The latest one of an endpoint."""

    reason: LossReason
    age_s: float


class CacheLosses:
    """Bounded by the endpoints there are: `keep_only` forgets the others, and their series."""

    def __init__(self, metrics: Metrics, *, clock: Clock) -> None:
        self._counter = metrics.group(EndpointStateMetrics).cache_losses
        self._clock = clock
        self.known: dict[tuple[str, EndpointId], tuple[LossReason, float]] = {}  # the latest of each; mostly empty

    def note_loss(self, cluster: str, endpoint: EndpointId, reason: LossReason) -> None:
        """Note that the endpoint lost its whole cache."""
        if (cluster, endpoint) not in self.known:
            for each in LossReason:
                self._counter.labels(cluster, endpoint, each.value)
        self._counter.labels(cluster, endpoint, reason.value).inc()
        self.known[cluster, endpoint] = (reason, self._clock())

    def latest_loss(self, cluster: str, endpoint: EndpointId) -> Loss | None:
        """Return the endpoint's last one; None: it lost nothing while it was known."""
        found = self.known.get((cluster, endpoint))
        return None if found is None else Loss(found[0], self._clock() - found[1])

    def recent_reason(self, cluster: str, endpoint: EndpointId | None) -> str:
        """Return the reason of a loss a short while ago; "" where there was none."""
        loss = None if endpoint is None else self.latest_loss(cluster, endpoint)
        return loss.reason.value if loss is not None and loss.age_s <= RECENT_S else ""

    def keep_only(self, present: Collection[tuple[str, EndpointId]]) -> None:
        """Forget all endpoints but these."""
        for cluster, endpoint in self.known.keys() - set(present):
            del self.known[cluster, endpoint]
            for reason in LossReason:
                self._counter.remove(cluster, endpoint, reason.value)
