"""The number by which engines admit what waits in them: which requests carry one, and what each engine makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from functools import partial

from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.endpoint import Endpoint, EndpointObserver
from kvproxy.cluster.feature import ClusterObserver, ClusterTools, NumberedRequest, ObservedCluster
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, EnginePriorityMode, PriorityOrder
from kvproxy.features.priority.metrics import EnginePriorityMetrics
from kvproxy.features.priority.urgency import UrgencyScale
from kvproxy.proxy.placement import MAX_PRIORITY

#: Of the number on the outcome of a request.
NOTE = "engine_priority"
#: Least number of waiting requests that can be ordered; after this long without, no request waits in an engine.
_WAITING = 2
_NOTHING_WAITS_S = 60.0


class PriorityState(StrEnum):
    """Findings about one engine; a metric label."""

    ACCEPTED = "accepted"  # it has not refused the number
    REFUSED = "refused"  # it answered with an error that names the field


class EndpointPriority(EndpointObserver):
    """One engine: whether it is sent the number."""

    __slots__ = (
        "_endpoint",
        "_load",
        "_metrics",
        "_refused",
        "_shown",
        "_waited_at",
        "mode",
        "off",
        "order",
    )

    def __init__(
        self,
        settings: EndpointSettings,
        cluster: ClusterSettings,
        *,
        load: EndpointLoad,
        endpoint: Endpoint | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._endpoint = endpoint  # None: nothing is counted
        self._metrics = None if metrics is None else metrics.group(EnginePriorityMetrics)
        self._shown = False
        self._load = load
        self._waited_at = -math.inf  # when its own count last had several waiting
        self.configure(settings, cluster)
        self.process_replaced()

    def configure(self, config: EndpointSettings, settings: ClusterSettings) -> None:
        """Apply the configuration; findings about the engine stay."""
        self.mode = config.engine_priority or settings.engine_priority
        self.order = config.engine_priority_order or settings.engine_priority_order
        self.off = self.mode is EnginePriorityMode.OFF

    @property
    def state(self) -> PriorityState:
        """As far as it is known."""
        return PriorityState.REFUSED if self._refused else PriorityState.ACCEPTED

    def is_in(self, state: PriorityState) -> bool:
        """Return True if the engine gets a priority and is in this state."""
        return not self.off and self.state is state

    def sends(self, now: float) -> bool:
        """Return True if a request placed there now carries the number. With `auto` not if order cannot show, because
        no request waits in the engine by its own count."""
        if self.off or self._refused:
            return False
        return self.mode is EnginePriorityMode.ON or self.waits(now)

    def waits(self, now: float) -> bool:
        """Return True if several requests waited in the engine recently, or if it does not report that."""
        engine = self._load.engine
        if engine is None or engine.waiting is None:
            return True
        if engine.waiting >= _WAITING:
            self._waited_at = engine.read_at
        return now - self._waited_at < _NOTHING_WAITS_S

    def record_refusal(self) -> None:
        """Record that the engine refuses a request with the number, but takes the same one without."""
        self._refused = True
        self.count("refused")

    def count(self, outcome: str) -> None:
        """Count a request that was sent with the number, or refused for it."""
        if self._endpoint is not None and self._metrics is not None:
            self._endpoint.metrics.count(self._metrics.engine_priority_requests, outcome)

    def bind_gauges(self) -> None:
        """Bind the gauges, if the engine gets a priority at all. Idempotent."""
        endpoint = self._endpoint
        if self.off or self._shown or endpoint is None or self._metrics is None:
            return
        self._shown = True
        gauge = self._metrics.engine_priority_state
        for state in PriorityState:
            labels = (endpoint.metrics.cluster, str(endpoint.id), state.value)
            endpoint.metrics.bind_gauge(gauge, partial(self.is_in, state), *labels)

    def process_replaced(self) -> None:
        """Another process, maybe with other flags: nothing is known of it."""
        self._refused = False

    def describe(self, now: float) -> Mapping[str, object]:
        """Return the finding about the engine, for people; None if it is off."""
        if self.off:
            return {"engine_priority": None}
        status = {
            "mode": self.mode.value,
            "order": self.order.value,
            "state": self.state.value,
            "waits": self.waits(now),
            "sends": self.sends(now),
        }
        return {"engine_priority": status}


class ClusterPriority(ClusterObserver):
    """One cluster: the numbers that its engines get."""

    member = "priority"
    note = NOTE
    #: vLLM where it is not enabled, schemas that know no such field, SGLang with `--abort-on-priority-when-disabled`.
    refusals = frozenset({400, 422, 503})

    def __init__(self, cluster: ObservedCluster, tools: ClusterTools) -> None:
        self._cluster = cluster
        self._tools = tools
        self._scale = UrgencyScale(speeds=lambda: cluster.speeds, wall_clock=tools.wall_clock)

    @property
    def addition(self) -> ClusterPriority | None:
        """Return it while any engine gets a priority."""
        told = (priority_of(endpoint) for endpoint in self._cluster.endpoints)
        return self if any(one is not None and not one.off for one in told) else None

    def observe_endpoint(self, endpoint: Endpoint, config: EndpointSettings) -> EndpointPriority:
        """Observe whether this engine takes the number."""
        return EndpointPriority(
            config,
            self._cluster.settings,
            load=endpoint.load,
            endpoint=endpoint,
            metrics=self._tools.metrics,
        )

    def choose_number(self, pick: Pick, asked: NumberedRequest) -> int | None:
        """Return the urgency as the engine takes it; None where it is sent none now."""
        told = priority_of(pick.endpoint)
        now = self._tools.clock()
        if told is None or not told.sends(now):
            return None
        level = asked.level
        if own := asked.own:
            own = own if told.order is PriorityOrder.HIGHEST_FIRST else -own
            level += max(-MAX_PRIORITY, min(MAX_PRIORITY, own))
        urgency = self._scale.urgency_s(
            asked.facts,
            pick.endpoint.id,
            received_at=asked.received_at,
            now=now,
            level=level,
            tenant=asked.tenant,
            endpoints=len(self._cluster.endpoints),
        )
        told.count("sent")
        number = self._scale.engine_priority(urgency)
        return number if told.order is PriorityOrder.LOWEST_FIRST else -number

    def is_named(self, error: bytes) -> bool:
        """Return whether an engine's error may be about the field."""
        return b"priority" in error.lower()

    def record_refusal(self, endpoint: Endpoint) -> None:
        """Send this engine no number from now on."""
        if (told := priority_of(endpoint)) is not None:
            told.record_refusal()


def priority_of(endpoint: Endpoint) -> EndpointPriority | None:
    """Return the finding about the endpoint's engine."""
    for one in endpoint.observers:
        if type(one) is EndpointPriority:
            return one
    return None
