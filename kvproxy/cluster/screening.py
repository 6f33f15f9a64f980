"""Screen the endpoints of a model, computed on changes and not for every request, and decide which data-parallel ranks
are endpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.membership import Membership
from kvproxy.cluster.ranks import RankRefusal
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.settings import HealthCheckSettings

log = logging.getLogger(__name__)

#: Never candidates while another endpoint is left, whatever its condition. If all sleep, one may have been woken since.
_UNANSWERING = frozenset({Condition.DRAINING, Condition.NOT_READY, Condition.ASLEEP})


class Refusal(StrEnum):
    """Why no endpoint may take a request; a label of the picks metric."""

    NO_ENDPOINTS = "no_endpoints"
    MODEL_NOT_SERVED = "model_not_served"
    DRAINING = "draining"
    ALL_TRIED = "all_tried"
    SATURATED = "saturated"


@dataclass(frozen=True, slots=True)
class Pool:
    """Endpoints for one model. The same tuple as long as nothing changed."""

    usable: tuple[Endpoint, ...]
    panic: bool = False  # none is healthy; these are all that serve the model and are not draining


class Screening:
    """Screening of a cluster's endpoints; the result is kept until `invalidate`, or until time alone changes it. Of
    thousands only those are looked at that changed.

    Panic: when no endpoint of a model is well, all of them are candidates again (save draining and saturated ones). If
    all of them fail, the cause is more likely the network, the probes or a bad prompt than the engines, and a full
    outage is the one answer that is surely wrong."""

    def __init__(self) -> None:
        self._endpoints: tuple[Endpoint, ...] = ()
        self._conditions: dict[Endpoint, Condition] = {}
        self._changed: set[Endpoint] = set()  # to be looked at
        self._moments: dict[Endpoint, float] = {}  # when time alone changes an endpoint, of those that it changes
        #: Models that some endpoint's configuration names; these, and the adapters that engines list.
        self.declared: frozenset[str] = frozenset()
        self.named: frozenset[str] = frozenset()
        self.lists_adapters = False  # some engine does
        self._pools: dict[str | None, Pool] = {}  # None: models that no endpoint names
        self._prefillers: dict[str | None, tuple[Endpoint, ...]] = {}
        self._stale_at = -math.inf

    def screen_endpoints(self, endpoints: Collection[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)
        known = self._conditions
        self._conditions = {one: known.get(one, Condition.NOT_READY) for one in self._endpoints}
        self.invalidate(*(self._conditions.keys() - known.keys()))
        self.declared = frozenset().union(*{endpoint.models for endpoint in self._endpoints})
        adapters = {endpoint.engine.adapters.names for endpoint in self._endpoints}
        self.lists_adapters = any(adapters)
        self.named = self.declared.union(*adapters)

    def invalidate(self, *changed: Endpoint) -> None:
        """Something about these endpoints changed."""
        self._changed.update(changed)
        self._stale_at = -math.inf

    def find_pool(self, model: str, now: float) -> Pool:
        """Return the endpoints for `model` ("": any)."""
        if now >= self._stale_at:
            self._refresh(now)
        key = model if not model or model in self.named else None
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._screen(model)
        return pool

    def find_prefillers(self, model: str, now: float) -> tuple[Endpoint, ...]:
        """Return the endpoints that may prefill for others, all of them well."""
        if now >= self._stale_at:
            self._refresh(now)
        key = model if not model or model in self.named else None
        found = self._prefillers.get(key)
        if found is None:
            able = (one for one in self._endpoints if one.prefills(model))
            found = self._prefillers[key] = tuple(one for one in able if self._conditions[one] is Condition.UP)
        return found

    def candidates(self, model: str, now: float) -> Sequence[Endpoint]:
        """Endpoints that could take a request for `model` now; where all are out, those that serve it."""
        return self.find_pool(model, now).usable

    def may_serve(self, model: str, now: float) -> bool:
        """Return True if an endpoint that is not out could take a request for `model` now."""
        pool = self.find_pool(model, now)
        return bool(pool.usable) and not pool.panic

    def _refresh(self, now: float) -> None:
        self._pools.clear()
        self._prefillers.clear()
        due = self._changed.union([endpoint for endpoint, moment in self._moments.items() if moment <= now])
        self._changed.clear()
        for endpoint in due:
            self._moments.pop(endpoint, None)
            if endpoint in self._conditions:
                self._look_at(endpoint, now)
        self._stale_at = min(self._moments.values(), default=math.inf)

    def _look_at(self, endpoint: Endpoint, now: float) -> None:
        self._conditions[endpoint] = endpoint.condition(now)
        # An expired breaker admits until its probe slots are taken, which invalidates the result.
        moments = [at for at in (endpoint.health.next_change(now), endpoint.breaker.reopens_at) if now < at < math.inf]
        if moments:
            self._moments[endpoint] = min(moments)

    def _screen(self, model: str) -> Pool:
        serving = [(endpoint, self._conditions[endpoint]) for endpoint in self._endpoints if endpoint.serves(model)]
        usable = tuple(endpoint for endpoint, condition in serving if condition is Condition.UP)
        if usable or any(condition is Condition.SATURATED for _, condition in serving):
            return Pool(usable)
        awake = [endpoint for endpoint, condition in serving if condition not in _UNANSWERING]
        rest = awake or [endpoint for endpoint, condition in serving if condition is Condition.ASLEEP]
        return Pool(tuple(endpoint for endpoint in rest if not endpoint.saturated), panic=bool(rest))


def skip_reason(find: Callable[[EndpointId], Endpoint | None], request: PickRequest, now: float) -> str:
    """Why a preferred endpoint is passed over; a label of the preferences metric."""
    assert request.preferred is not None
    endpoint = find(request.preferred)
    if endpoint is None or not endpoint.serves(request.model):
        return "unknown"
    if endpoint.id in request.excluded:
        return "excluded"
    condition = endpoint.condition(now)
    return Condition.UNHEALTHY.value if condition is Condition.EJECTED else condition.value


def refusal_of(request: PickRequest, endpoints: Sequence[Endpoint], now: float) -> Refusal:
    """Why none of `endpoints` may take a request."""
    if not endpoints:
        return Refusal.NO_ENDPOINTS
    serving = [endpoint for endpoint in endpoints if endpoint.serves(request.model)]
    if not serving:
        return Refusal.MODEL_NOT_SERVED
    rest = [endpoint for endpoint in serving if endpoint.condition(now) is not Condition.DRAINING]
    if not rest:
        return Refusal.DRAINING
    rest = [endpoint for endpoint in rest if endpoint.condition(now) is not Condition.NOT_READY]
    if not rest:
        return Refusal.NO_ENDPOINTS
    untried = [endpoint for endpoint in rest if endpoint.id not in request.excluded]
    return Refusal.SATURATED if any(endpoint.saturated for endpoint in untried) else Refusal.ALL_TRIED


def may_eject(engines: Collection[Engine], settings: HealthCheckSettings, now: float) -> bool:
    """Return True if one more engine may be ejected: within the share, and always the first."""
    ejected = sum(engine.health.ejected(now) for engine in engines)
    return ejected < max(1, math.floor(settings.max_ejected * len(engines)))


class KnownRanks:
    """Of one cluster's engines."""

    def __init__(self, cluster: str, members: Membership) -> None:
        self._cluster = cluster
        self._members = members

    def observe_ranks(
        self, engine: Engine, shown: Collection[int], named: Collection[int] | None, *, in_body: bool = False
    ) -> None:
        """Record the ranks in an engine's metrics and in its event sources (None: not queried), and whether it reads
        them in a body. Confirmed ranks become endpoints."""
        before = engine.ranks.candidates
        engine.ranks.in_body = in_body
        engine.ranks.observe_sources(shown, named)
        self._follow(engine, before)

    def resume_ranks(self, engine: Engine, found: Collection[int]) -> None:
        """Restore an engine's ranks from the saved state."""
        before = engine.ranks.candidates
        engine.ranks.resume_ranks(found)
        self._follow(engine, before)

    def record_refusal(self, endpoint: Endpoint, number: int, *, named: bool = True) -> None:
        """Record that an engine served a request only without this rank; `named`: the error named the rank as the
        reason."""
        engine = endpoint.engine
        rank = endpoint.rank
        assert rank is not None
        where = f"{self._cluster}/{engine.id}"
        before = engine.ranks.candidates
        refusal = engine.ranks.record_refusal(rank, number, named=named)
        endpoint.metrics.rank_refused(refusal.value)
        if refusal is RankRefusal.RENUMBERED:
            log.info(
                "%s counts its ranks from its own first: rank %d is requested as %d",
                where,
                rank,
                engine.ranks.number(rank),
            )
        elif refusal is RankRefusal.DROPPED:
            log.warning("%s has no data-parallel rank %d, which is no longer a candidate", where, rank)
        self._follow(engine, before)

    def forget_refusals(self, engine: Engine) -> None:
        """Forget the refusals of an engine that restarted."""
        before = engine.ranks.candidates
        engine.ranks.forget_refusals()
        self._follow(engine, before)

    def _follow(self, engine: Engine, before: Collection[int]) -> None:
        if engine.ranks.candidates != before and engine in self._members.engines:
            ranks = ", ".join(map(str, engine.ranks.candidates)) or "none"
            log.info("%s/%s: data-parallel ranks that are candidates: %s", self._cluster, engine.id, ranks)
            self._members.apply(self._members.sources, self._members.removed)
