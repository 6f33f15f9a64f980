"""A cluster: its endpoints, and the pick of one with its reservation in a single step."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Self

import msgspec

from kvproxy.base.background_task import TaskSet
from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, utc_seconds
from kvproxy.cluster.adapters import Adapters, KnownAdapters
from kvproxy.cluster.discovery import Poller, sources_of, steps_towards
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.feature import ClusterFeature, ClusterObserver, ClusterTools, RequestAddition
from kvproxy.cluster.membership import STATIC, Membership
from kvproxy.cluster.operator import Operator
from kvproxy.cluster.pick import Pick, expected_first_token_at, reserve
from kvproxy.cluster.policies import PolicySet
from kvproxy.cluster.prober import Probe, Prober
from kvproxy.cluster.router_queue import RouterQueue
from kvproxy.cluster.routing import selector
from kvproxy.cluster.routing.admission import Admission
from kvproxy.cluster.routing.load import count_live_blocks
from kvproxy.cluster.routing.policy import PickRequest, Policy
from kvproxy.cluster.routing.selector import PANIC, Decision
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.screening import KnownRanks, Refusal, Screening, refusal_of, skip_reason
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings
from kvproxy.cluster.sources.entries import Refuse, Source
from kvproxy.cluster.verdicts import Verdicts

log = logging.getLogger(__name__)


class Cluster:
    """Endpoints that serve the same models. Entered, it probes them and follows discovery; picking needs neither.

    `reconfigure` takes over other settings, `apply` other static endpoints. Load, health and breaker of an endpoint
    survive as long as its id and address stay; one that is gone finishes what it has, and then its metric series go
    too. `now` is always the present time of `clock`.
    """

    #: Members, draining ones included, in the order of the configuration.
    endpoints: Sequence[Endpoint] = ()
    #: Their engines: one each, or one for all of its data-parallel ranks.
    engines: Sequence[Engine] = ()
    #: Kinds and versions of its engines, as they were asked last.
    software: frozenset[str | None] = frozenset()
    #: A number that its engines get with requests, in place of a client's own; None: none.
    addition: RequestAddition | None = None
    #: Rule by which requests wait for room in the engines' memory; None: none waits for that.
    admission: Admission | None = None
    #: Queue of requests; None: none waits.
    queue: RouterQueue | None = None
    _applying: asyncio.Task[None] | None = None
    _shown = False

    def __init__(
        self,
        name: str,
        settings: ClusterSettings,
        *,
        metrics: Metrics,
        clock: Clock,
        rng: random.Random,
        probe: Probe | None = None,
        policy: Policy | None = None,
        sources: Sequence[Source] | None = None,
        wall_clock: Clock = utc_seconds,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        refuse: Refuse = lambda _: "",
    ) -> None:
        self.name = name
        self.settings = settings
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self.screening = Screening()
        self.members = Membership(_Making(self))
        self.operator = Operator(self.members)
        #: The member of an id.
        self.find_endpoint = self.members.find_endpoint
        self._why_skipped = partial(skip_reason, self.find_endpoint)
        #: Verdicts on its engines from attempts and probes.
        self.verdicts = Verdicts(
            name,
            settings.health,
            members=self.members,
            screening=self.screening,
            clock=clock,
            on_return=self.forget_process,
        )
        #: Adapters of its engines.
        self.adapters = KnownAdapters(name, on_change=self._follow)
        #: Data-parallel ranks of its engines.
        self.ranks = KnownRanks(name, self.members)
        self._tasks = TaskSet()
        self._prober = Prober(
            name,
            settings.health,
            probe=probe,
            tasks=self._tasks,
            on_result=self.verdicts.record_probe,
            rng=rng,
            sleep=sleep,
        )
        self._find_sources = partial(sources_of, clock=clock, rng=rng, sleep=sleep)
        found = self._find_sources(settings.discovery) if sources is None else sources
        self.poller = Poller(
            name, found, members=self.members, tasks=self._tasks, metrics=metrics, sleep=sleep, refuse=refuse
        )
        self._hiding: set[Endpoint] = set()  # with requests in flight whose first token cannot be seen
        self.policies = PolicySet(name, settings, metrics=metrics, rng=rng, policy=policy)
        self.observers = _observe(self, ClusterTools(metrics, clock, wall_clock, rng))
        self._on_placed = [one.placed for one in self.observers if type(one).placed is not ClusterObserver.placed]
        self._arrange_queue()
        self.apply_endpoints(settings.endpoints)

    def __repr__(self) -> str:
        return f"<Cluster {self.name} {len(self.endpoints)} endpoints, {self.settings.policy.value}>"

    async def __aenter__(self) -> Self:
        await self.poller.ask_all()
        await self._tasks.__aenter__()
        self.poller.start(at_once=False)
        self._prober.probe_engines(self.engines)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.poller.stop()
        self._prober.probe_engines(())
        await self._tasks.__aexit__()

    @property
    def speeds(self) -> SpeedModel | None:
        """Speed estimates of the engines, if a policy learns them."""
        return self.policies.speeds

    def reconfigure(self, settings: ClusterSettings, *, probe: Probe | None) -> None:
        """Apply new settings. Endpoints that stay keep their load, health and breaker, policies what they learned, and
        requests that wait their turn. ValueError as in `apply_endpoints`; the endpoints are then unchanged."""
        # Kept over a reload rather than rebuilt, since requests of every generation hold picks on it.
        before = self.settings
        self.settings = settings
        self.verdicts.settings = settings.health
        self.policies = PolicySet(self.name, settings, metrics=self._metrics, rng=self._rng, earlier=self.policies)
        for endpoint in self.members.all_endpoints():
            count_live_blocks(endpoint.load, self.policies.counts_live_blocks)
            if endpoint.load.on_sample is not None:
                endpoint.load.on_sample = partial(self.policies.observe_sample, endpoint.id)
        if settings.health != before.health:
            self._prober.reconfigure(settings.health, probe)
            if not settings.health.active:
                for engine in self.engines:
                    engine.health.forget_probes()
        if settings.discovery != before.discovery:
            self.poller.replace_sources(self._find_sources(settings.discovery))
            self.members.keep_sources([source.name for source in self.poller.sources])
        self.apply_endpoints(settings.endpoints)
        self._arrange_queue()

    def bind_gauges(self) -> None:
        """Bind the gauges to this cluster. Not before it serves: a configuration that names it may still be refused."""
        self._shown = True
        for endpoint in self.members.all_endpoints():
            endpoint.bind_gauges(self._metrics)
        if self.queue is not None:
            self.queue.bind_gauges()

    def close(self) -> None:
        """Refuse the requests that wait and remove the endpoints with their metric series."""
        self.poller.replace_sources(())
        self.members.keep_sources(())
        self.apply_endpoints((), in_steps=False)
        for endpoint in self.endpoints:  # those an operator added
            self.operator.remove_endpoint(endpoint.id)
        if self.queue is not None:
            self.queue.close()
        self.queue = None

    def apply_endpoints(self, endpoints: Sequence[EndpointSettings], *, in_steps: bool = True) -> None:
        """Set the static endpoints. Where very many come, change or leave, most do so in later turns of the event loop.
        ValueError for an invalid URL; nothing changed then."""
        if self._applying is not None:
            self._applying.cancel()
        in_steps = in_steps and self._tasks.running
        steps = steps_towards(endpoints, self.members.named_by(STATIC) or ()) if in_steps else iter([endpoints])
        self.members.apply_source(STATIC, next(steps))
        if in_steps:
            self._applying = self._tasks.start(self.poller.update_in_steps(STATIC, steps), name="endpoints")

    def decide(self, request: PickRequest, now: float) -> Decision[Endpoint] | Refusal:
        """Where the request would go; changes nothing. A preferred endpoint is taken if it may serve; otherwise the
        policy chooses."""
        pool = self.screening.find_pool(request.model, now)
        policies = self.policies
        if request.model in self.adapters.names:
            engines = {endpoint.id: endpoint.engine.adapters for endpoint in pool.usable}
            request = msgspec.structs.replace(request, adapter_s=self.adapters.price_endpoints(request.model, engines))
        if self.admission is not None:
            request = self.admission.restrict(request, pool.usable, now)
        asked = policies.find_policy(request.policy) if request.policy else policies.own
        decision = selector.decide(
            request,
            pool.usable,
            asked.policy,
            now,
            name=asked.name,
            panic=pool.panic,
            speeds=policies.speeds,
            why_skipped=self._why_skipped,
        )
        return refusal_of(request, self.endpoints, now) if decision is None else decision

    def reserve(self, decision: Decision[Endpoint], now: float) -> Pick:
        """Make the decision true, in the turn of the loop it was made in: nothing may come between a choice and its
        load."""
        if self._hiding:
            _advance(self._hiding, self.policies.deciding_speeds, now)
        endpoint = decision.endpoint
        permit = endpoint.breaker.admit() if decision.reason != PANIC or endpoint.breaker.admits else None
        self.policies.placed(decision, now)
        placement = None
        if decision.request.adapter_s is not None:
            expected_at = expected_first_token_at(decision, self.speeds, now)
            placement = self.adapters.place_request(endpoint.engine.adapters, decision.request.model, expected_at)
        speeds = self.policies.speeds
        reservation = reserve(endpoint, decision.request, speeds, now)
        if speeds is not None:
            for on_placed in self._on_placed:
                on_placed(reservation, speeds, now)
        if reservation.hidden:
            self._hiding.add(endpoint)
        if endpoint.load.in_flight == endpoint.max_in_flight:
            self.screening.invalidate(endpoint)
        admission = self.admission
        stay = None if admission is None else admission.place(decision.request, endpoint.id, now)
        return Pick(decision, endpoint, reservation, permit, self, placement, stay)

    def forget_process(self, engine: Engine) -> None:
        """Reset the verdicts on an engine's priority and ranks after it restarted."""
        for endpoint in self.members.of_engine(engine):
            for observer in endpoint.observers:
                observer.process_replaced()
            if self.admission is not None:
                self.admission.forget(endpoint.id)
        self.ranks.forget_refusals(engine)
        engine.adapters.forget_loaded()

    def on_release(self, endpoint: Endpoint, now: float) -> None:
        """React to an attempt's released load; called by its pick."""
        if endpoint.load.in_flight + 1 == endpoint.max_in_flight:
            self.screening.invalidate(endpoint)
        if endpoint.removed:
            self.members.departures.on_release(endpoint)
        if self.queue is not None:
            self.queue.on_load_decrease()

    def _follow(self) -> None:
        self.endpoints = self.members.present
        self.engines = self.members.engines
        self.screening.screen_endpoints(self.endpoints)
        if self.screening.lists_adapters or self.adapters.names:
            self.adapters.keep_engines(engine.adapters for engine in self.engines)
        self.addition = next((found for one in self.observers if (found := one.addition) is not None), None)
        self._prober.probe_engines(self.engines)
        self.verdicts.give_back_all()
        if self.queue is not None:
            self.queue.on_endpoints_change()

    def _arrange_queue(self) -> None:
        """Create, keep or close the queue as configured; a closed one places its requests at once."""
        settings = self.settings.queue
        speeds = self.policies.own.policy.speeds
        awaits = settings.enabled is True and bool(self.settings.discovery.named)
        if not self.settings.queues or speeds is None:
            if self.queue is not None:
                self.queue.close()
            self.queue = None
        elif self.queue is not None:
            self.queue.reconfigure(settings, speeds, awaits=awaits)
        else:
            self.queue = RouterQueue(
                settings,
                speeds,
                cluster=self.name,
                candidates=self.screening.candidates,
                awaits=awaits,
                metrics=self._metrics,
                clock=self._clock,
            )
            if self._shown:
                self.queue.bind_gauges()
        self.admission = None
        if self.queue is not None:
            self.admission = next((found for one in self.observers if (found := one.admission) is not None), None)
            self.queue.admission = self.admission
            if self.admission is not None:
                self.admission.speeds = speeds


def _advance(hiding: set[Endpoint], speeds: SpeedModel | None, now: float) -> None:
    """Take hidden requests that are due as prefilled, and drop endpoints without any."""
    if speeds is not None:
        selector.advance(hiding, speeds, now)
    for endpoint in [*hiding]:
        if not endpoint.load.hidden_requests:
            hiding.discard(endpoint)


def _observe(cluster: Cluster, tools: ClusterTools) -> Sequence[ClusterObserver]:
    """Return the observers of features."""
    found = (feature.observe_cluster(cluster, tools) for feature in installed(ClusterFeature))
    return [one for one in found if one is not None]


class _Making:
    """The cluster, as its membership sees it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def settings(self) -> ClusterSettings:
        return self._cluster.settings

    def members_changed(self) -> None:
        self._cluster._follow()

    def make_engine(self, config: EndpointSettings) -> Engine:
        cluster = self._cluster
        return Engine(
            config,
            cluster.settings,
            cluster=cluster.name,
            clock=cluster._clock,
            on_breaker_change=cluster.verdicts.breaker_changed,
            adapters=Adapters(cluster.adapters.names),
        )

    def make_endpoint(self, config: EndpointSettings, engine: Engine, rank: int | None) -> Endpoint:
        cluster = self._cluster
        endpoint = Endpoint(
            config,
            cluster.settings,
            engine=engine,
            rank=rank,
            cluster=cluster.name,
            metrics=cluster._metrics,
            clock=cluster._clock,
            on_change=cluster.screening.invalidate,
        )
        observers = (one.observe_endpoint(endpoint, config) for one in cluster.observers)
        endpoint.observers = tuple(observer for observer in observers if observer is not None)
        if cluster._shown:
            endpoint.bind_gauges(cluster._metrics)
        endpoint.load.on_sample = partial(cluster.policies.observe_sample, endpoint.id)
        count_live_blocks(endpoint.load, cluster.policies.counts_live_blocks)
        return endpoint

    def endpoint_left(self, endpoint: Endpoint) -> None:
        cluster = self._cluster
        endpoint.load.on_sample = None
        cluster.policies.forget_endpoint(endpoint.id)
        if cluster.admission is not None:
            cluster.admission.forget(endpoint.id)
