"""Filter `kvcache`: gives the router the cached tokens of each prompt by endpoint. A thin layer: it never answers,
never raises, and waits only for a configured lookup service, within its deadline."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Collection, Mapping
from functools import partial

import msgspec
from starlette.types import ASGIApp, Scope

from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.feature import CacheFeature, find_needs, find_reports
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.overlap.reports import EngineReports
from kvproxy.cache.service import KvCache
from kvproxy.cache.settings import KvCacheSettings, has_store
from kvproxy.cache.state import CacheState
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.feature import list_policies
from kvproxy.cluster.routing.registry import policy_types
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.settings import ClusterSettings, PolicyName
from kvproxy.proxy.feature import ProxyFeature
from kvproxy.proxy.filters.chain import FilterContext, ResolvesRoutes
from kvproxy.proxy.filters.step import Step, may_read_state
from kvproxy.proxy.forward.body_guard import tenant_salt
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify

log = logging.getLogger("kvproxy.kvcache")

#: Name of the filter in a chain.
NAME = "kvcache"
#: State key by which other apps find the endpoint that holds most of the prompt.
STATE_KEY = "llm_preferred_endpoint_id"


def prefers(settings: KvCacheSettings, policy: PolicyName) -> bool:
    """Return True if the largest match is preferred to the policy's choice."""
    if settings.prefer is not None:
        return settings.prefer
    return not policy_types()[policy].uses_overlap and has_store(settings)


def needs_facts(settings: KvCacheSettings, cluster: ClusterSettings) -> bool:
    """Return whether something uses what endpoints hold: a policy (the cluster's own, one without effect, one that
    clients may ask for), a preference, a header that names it, or a feature. (Receipts do as well.)"""
    policies = list_policies(cluster)
    return (
        any(policy_types()[policy].uses_overlap for policy in policies)
        or any(prefers(settings, policy) for policy in policies)
        or bool(settings.preference_header)
        or find_needs(installed(CacheFeature), settings).facts
    )


class KvCacheFilter(Step):
    """Puts facts and preference into the exchange, and an observer that reports what became of the request. Requests to
    clusters in `idle` pass without: nothing there makes use of facts."""

    def __init__(
        self,
        app: ASGIApp,
        service: KvCache,
        *,
        routes: ResolvesRoutes,
        prefer: Mapping[str, bool],
        idle: Collection[str] = (),
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._service = service
        self._routes = routes
        self._prefer = prefer  # by cluster
        self._idle = idle
        self._header = service.settings.preference_header.lower().encode()
        #: There is an app behind to read it.
        self._announces = bool(self._header) or may_read_state(app)

    def before(self, exchange: Exchange, downstream: Downstream) -> Awaitable[None] | None:
        """Wait only for a lookup service."""
        scope = downstream.scope
        if self._header:  # removed first, so that no client can set it
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] != self._header]
        request = exchange.inference
        if request is None or exchange.body is None:
            return None
        try:
            target = self._routes.resolve(scope["path"], request.model)
            if target is None or target.cluster.name in self._idle:
                return None
            if "facts_began" in exchange.hooks:
                notify(RequestObserver.facts_began, exchange)
            if exchange.isolated:
                salt = tenant_salt(exchange.tenant, request.cache_salt)
                request = msgspec.structs.replace(request, cache_salt=salt)
            facts = self._service.gather(
                request, exchange.body, cluster=target.cluster, model=target.upstream_model, tenant=exchange.tenant
            )
            if facts.wants_lookup:
                return self._look_up(facts, exchange, scope)
            self._hand_over(facts, exchange, scope)
        except Exception:
            log.exception("[kvcache] no facts for this request")
        if "facts_known" in exchange.hooks:
            notify(RequestObserver.facts_known, exchange)
        return None

    async def _look_up(self, facts: RequestFacts, exchange: Exchange, scope: Scope) -> None:
        try:
            await self._service.look_up(facts)
            self._hand_over(facts, exchange, scope)
        except Exception:
            log.exception("[kvcache] no facts for this request")
        notify(RequestObserver.facts_known, exchange)

    def _hand_over(self, facts: RequestFacts, exchange: Exchange, scope: Scope) -> None:
        if self._announces:
            announce(scope, facts.preferred, header=self._header)
        use_facts(self._service, facts, exchange, prefers=self._prefer[facts.cluster.name])


def use_facts(service: KvCache, facts: RequestFacts, exchange: Exchange, *, prefers: bool) -> None:
    """Place the request by these facts, refresh them after a wait, and learn from its end."""
    exchange.facts = facts.overlaps
    if prefers:
        exchange.preferred = facts.preferred
    learning = KvCacheLearning(service, facts, prefers)
    exchange.facts_source = learning.refresh
    exchange.on_prompt_at = learning.move_prompt
    for make in service.observers.watches:
        if (observer := make(facts)) is not None:
            exchange.attach(observer)
    exchange.observers += (learning,)
    exchange.hooks |= KvCacheLearning.hooks


class KvCacheLearning(RequestObserver, msgspec.Struct, eq=False):
    """Observer that passes a request's placement and end on to the service, and refreshes its facts after a wait.

    It gets the exchange with each call and does not hold it: a cycle would keep the body until the collector runs."""

    _service: KvCache
    _facts: RequestFacts
    _prefers: bool

    def refresh(self, exchange: Exchange) -> None:
        """Refresh the facts of a request that had to wait; an endpoint announced earlier stays."""
        try:
            self._service.refresh(self._facts)
        except Exception:
            log.exception("[kvcache] this request is placed by its facts from before the wait")
            return
        exchange.facts = self._facts.overlaps
        if self._prefers:
            exchange.preferred = self._facts.preferred

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        """Record that the endpoint will hold the prompt."""
        self._service.placed(self._facts, decision.endpoint.id)

    def move_prompt(self, endpoint: EndpointId, kept: bool) -> None:
        """Record that this endpoint will hold the prompt; the earlier one has `kept` it, or never computed it."""
        self._service.move_prompt(self._facts, endpoint, kept=kept)

    def went_to(self, endpoint: EndpointId) -> None:
        """Record the endpoint of a request that another program placed."""
        self._service.placed(self._facts, endpoint)

    def finished(self, exchange: Exchange, now: float) -> None:
        """Learn from it, and do what is to be done about it."""
        result = result_of(exchange)
        state = self._service.state
        self._service.finished(self._facts, result)
        if state.losses.known:
            exchange.outcome.cache_loss = state.losses.recent_reason(self._facts.cluster.name, result.endpoint)
        for learned in self._service.observers.learned:
            learned(self._facts, result)


def announce(scope: Scope, preferred: EndpointId | None, *, header: bytes) -> None:
    """Announce the endpoint with the largest match to the apps behind, in the state and a header (b"": none), which
    clients cannot set."""
    if header:
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != header]
    if preferred is not None:
        scope.setdefault("state", {})[STATE_KEY] = preferred
        if header:
            scope["headers"].append((header, preferred.encode()))


def result_of(exchange: Exchange) -> Result:
    """How the request went, for the service."""
    outcome = exchange.outcome
    return Result(
        endpoint=outcome.endpoint,
        prefill_endpoint=outcome.prefill_endpoint,
        prefilled=outcome.prefilled,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        media_tokens=outcome.media_tokens,
        completion_tokens=outcome.completion_tokens,
        calls_tool=outcome.calls_tool,
        response_id=outcome.response_id,
        request_id=exchange.request_id,
        tenant=exchange.tenant,
        notes=outcome.notes,
    )


def build(app: ASGIApp, settings: KvCacheSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`, and its service among the context's lifetimes; `app` itself when switched off."""
    if not settings.enabled:
        return app
    clusters: Mapping[str, Cluster] = context.services.clusters
    state = context.states.get(CacheState, NAME, lambda: CacheState.empty(metrics=context.metrics, clock=context.clock))
    served = frozenset(clusters.items())
    configured = context.config.clusters  # the clusters may still have older policies
    idle = _idle(settings, context)
    follows = find_reports(settings)
    followed = {name: one for name, one in clusters.items() if name not in idle}
    reports = None
    if follows is not None and followed:
        reports = context.states.get(  # the same while nothing in it changes, since engines would repeat all they sent
            EngineReports,
            (state, follows, frozenset(followed.items())),
            partial(follows, followed, metrics=context.metrics, clock=context.clock),
        )
        context.lifetimes.append(reports)
    service = context.states.get(
        KvCache,  # the same one while its settings do not change
        (state, settings, served),
        lambda: KvCache(
            settings,
            clusters=clusters,
            metrics=context.metrics,
            clock=context.clock,
            wall_clock=lambda: context.wall_clock().timestamp(),
            rng=context.rng,
            state=state,
            reports=reports,
        ),
    )
    context.lifetimes.append(service)
    context.kvcaches[NAME] = service
    context.on_serving.append(service.bind_gauges)
    prefer = {name: prefers(settings, one.policy) for name, one in configured.items()}
    return KvCacheFilter(
        app,
        service,
        routes=context.services.routes,
        prefer=prefer,
        idle=idle,
        metrics=context.metrics,
        clock=context.clock,
    )


def _idle(settings: KvCacheSettings, context: FilterContext) -> frozenset[str]:
    """Clusters where nothing makes use of facts."""
    wanted = any(one.wants_facts for one in context.observers) or any(
        feature.needs_facts(context.config) for feature in installed(ProxyFeature)
    )
    clusters = context.config.clusters
    return frozenset(name for name, one in clusters.items() if not (wanted or needs_facts(settings, one)))
