"""An engine, or one data-parallel rank of it, with all that is known about it: how busy, how well, its series."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.resilience.breaker import BreakerState
from kvproxy.base.types import Clock
from kvproxy.cluster.endpoint_metrics import EndpointMetrics
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.metrics import EndpointStateMetrics
from kvproxy.cluster.routing.engine_samples import EndedWork
from kvproxy.cluster.routing.load import EndpointLoad, own_pending_tokens
from kvproxy.cluster.settings import ClusterSettings, EndpointRole, EndpointSettings


class EndpointObserver:
    """Observes one endpoint as long as it is there."""

    __slots__ = ()

    def configure(self, config: EndpointSettings, settings: ClusterSettings) -> None:
        """Apply the configuration."""

    def process_replaced(self) -> None:
        """Forget findings: the engine is another process, maybe with other flags."""

    def bind_gauges(self) -> None:
        """Bind its gauges by `endpoint.metrics`. Called again after each change of the settings."""

    def describe(self, now: float) -> Mapping[str, object]:
        """Return keys that it adds to the endpoint's status."""
        return {}


class Condition(StrEnum):
    """Condition of an endpoint: whether it may be picked, and the first reason why not; shown in status."""

    UP = "up"
    DRAINING = "draining"
    NOT_READY = "not_ready"  # reported by its source
    ASLEEP = "asleep"  # reported by its engine
    UNHEALTHY = "unhealthy"  # by failed probes
    EJECTED = "ejected"  # by failed requests
    BREAKER_OPEN = "breaker_open"
    SATURATED = "saturated"


#: In the rotation.
TAKING = frozenset({Condition.UP, Condition.SATURATED})
#: Out of the rotation by its own fault. An endpoint that an operator drains is not.
DOWN = frozenset({Condition.UNHEALTHY, Condition.EJECTED, Condition.BREAKER_OPEN})


class Endpoint:
    """Unit of routing: an engine, or one of its data-parallel ranks, which share the engine's address, health and
    breaker and have a load of their own.

    Equal only to itself: an engine that moved to another address is another endpoint, even under the same id.
    `on_change` is called with it whenever its condition or weight may have changed for another reason than time."""

    __slots__ = (
        "_asleep",
        "_clock",
        "_draining",
        "_on_change",
        "_shown",
        "authorization",
        "breaker",
        "ended",
        "engine",
        "health",
        "id",
        "instance_id",
        "kv_event_sources",
        "labels",
        "load",
        "max_in_flight",
        "metrics",
        "models",
        "observers",
        "origin",
        "rank",
        "reads_shared_kv",
        "ready",
        "removed",
        "retry",
        "role",
        "waiting",
        "weight",
    )

    def __init__(
        self,
        config: EndpointSettings,
        settings: ClusterSettings,
        *,
        engine: Engine,
        rank: int | None,
        cluster: str,
        metrics: Metrics,
        clock: Clock,
        on_change: Callable[[Endpoint], None],
    ) -> None:
        self.id = engine.endpoint_id(rank)
        self.engine = engine
        self.rank = rank  # None: the engine as a whole
        self.origin = engine.origin
        self.health = engine.health
        self.breaker = engine.breaker
        self.load = EndpointLoad()
        self.ended = EndedWork(self.load)
        self.removed = False  # removed from the cluster, finishing its requests
        #: Attempts without a first byte, and the callback that ends each when the endpoint goes out (set by its pick).
        self.waiting: dict[object, Callable[[], None]] = {}
        self._draining = self._asleep = False
        self._on_change = on_change
        self.metrics = EndpointMetrics(metrics, cluster, self.id)
        self._clock = clock
        self._shown = False
        #: Of features.
        self.observers: tuple[EndpointObserver, ...] = ()
        self.configure(config, settings)

    def __repr__(self) -> str:
        return f"<Endpoint {self.id} {self.origin} in_flight={self.load.in_flight}>"

    def configure(self, config: EndpointSettings, settings: ClusterSettings) -> None:
        """Apply settings that may change at run time: the endpoint's own, the engine's, and those of the cluster. Its
        load is kept."""
        self.max_in_flight = settings.max_in_flight
        self.weight = config.weight
        self.ready = config.ready
        self.models = frozenset(config.models)
        self.instance_id = config.instance_id or config.id
        self.reads_shared_kv = config.shared_kv
        self.kv_event_sources = config.kv_event_sources  # for an engine that does not report them
        self.authorization = self.engine.authorization
        self.labels = dict(config.labels)
        self.retry = config.retry
        self.role = config.role
        for observer in self.observers:
            observer.configure(config, settings)
        if self._shown and not self.metrics.closed:
            for observer in self.observers:
                observer.bind_gauges()
        self._on_change(self)

    @property
    def draining(self) -> bool:
        """True if an operator wants it to finish its requests and take no new ones."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._on_change(self)

    @property
    def asleep(self) -> bool:
        """Its engine sleeps: it would not answer."""
        return self._asleep

    @asleep.setter
    def asleep(self, asleep: bool) -> None:
        if asleep is not self._asleep:
            self._asleep = asleep
            self._on_change(self)

    def receive_load(self, in_flight_before: int) -> None:
        """React to a change of the load that other proxies report here."""
        if self.max_in_flight and (in_flight_before < self.max_in_flight) is self.saturated:
            self._on_change(self)

    @property
    def saturated(self) -> bool:
        """At its bound of requests in flight."""
        return 0 < self.max_in_flight <= self.load.in_flight

    def serves(self, model: str) -> bool:
        """Return True if the endpoint takes whole requests for this model; "" is any. An adapter that engines of its
        cluster list goes to these; requests for one that none lists go to endpoints without `models`."""
        return self.role is not EndpointRole.PREFILL and _has_model(self, model)

    def prefills(self, model: str) -> bool:
        """Return True if it prefills prompts for this model whose answers other endpoints give."""
        return self.role is not EndpointRole.DECODE and _has_model(self, model)

    def condition(self, now: float) -> Condition:
        if self._draining or self.removed:
            return Condition.DRAINING
        if not self.ready:
            return Condition.NOT_READY
        if self._asleep:
            return Condition.ASLEEP
        if not self.health.is_healthy:
            return Condition.UNHEALTHY
        if self.health.ejected(now):
            return Condition.EJECTED
        if not self.breaker.admits:
            return Condition.BREAKER_OPEN
        return Condition.SATURATED if self.saturated else Condition.UP

    def status(self, now: float) -> dict[str, object]:
        """For people and the admin listener; no secrets."""
        rank = {} if self.rank is None else {"engine_id": str(self.engine.id), "data_parallel_rank": self.rank}
        return {
            "id": str(self.id),
            **rank,
            "url": str(self.origin),
            "condition": self.condition(now).value,
            "weight": self.weight,
            "models": sorted(self.models),
            "role": self.role.value,
            "adapters": self.engine.adapters.status(),
            "instance_id": self.instance_id,
            "labels": self.labels,
            "in_flight": self.load.in_flight,
            "pending_tokens": self.load.pending_tokens,
            "resident_tokens": self.load.resident_tokens,
            "failures_in_a_row": self.health.failures,
            "probes_in_doubt": self.health.failed_probes,
            "ejected_for_s": max(0.0, self.health.ejected_until - now),
            "breaker": self.breaker.state.value,
            **{key: value for observer in self.observers for key, value in observer.describe(now).items()},
        }

    def bind_gauges(self, metrics: Metrics) -> None:
        """Bind the gauges to this endpoint. Idempotent; does nothing once it is gone."""
        if self._shown or self.metrics.closed:
            return
        self._shown = True
        clock = self._clock
        load = self.load
        breaker = self.breaker
        group = metrics.group(EndpointStateMetrics)
        for gauge in (group.in_flight, group.in_flight_formerly):
            self.metrics.bind_gauge(gauge, lambda: load.own_in_flight)
        self.metrics.bind_gauge(group.pending_prompt_tokens, lambda: own_pending_tokens(load))
        self.metrics.bind_gauge(group.adapters, lambda: len(self.engine.adapters.names))
        self.metrics.bind_gauge(group.up, lambda: self.condition(clock()) in TAKING)
        name = f"{self.metrics.cluster}/{self.id}"
        is_open = metrics.group(BoundMetrics).breaker_state
        self.metrics.bind_gauge(is_open, lambda: breaker.state is not BreakerState.CLOSED, name)
        for observer in self.observers:
            observer.bind_gauges()


def _has_model(endpoint: Endpoint, model: str) -> bool:
    if not model or model in endpoint.models:
        return True
    adapters = endpoint.engine.adapters
    return model in adapters.names if model in adapters.elsewhere else not endpoint.models
