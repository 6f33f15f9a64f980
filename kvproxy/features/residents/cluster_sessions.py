"""The rule of admission in a running cluster, and what is shown of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ListClusters, ObservedCluster
from kvproxy.features.residents.admission import SessionAdmission
from kvproxy.features.residents.metrics import SessionMetrics
from kvproxy.features.residents.settings import SessionsPlace
from kvproxy.operate.commands.status import plain
from kvproxy.operate.feature import StatusPart
from kvproxy.operate.merge import at_most, each, fields, joined, largest, total

#: Of the sessions that wait, those that have waited longest.
WAITS_SHOWN = 10
#: Labels and value of a gauge.
Sample = tuple[tuple[str, ...], float]


class ClusterSessions(ClusterObserver):
    """Observer of one cluster; what it learned of sessions outlives reloads."""

    def __init__(self, cluster: ObservedCluster, tools: ClusterTools) -> None:
        self._cluster = cluster
        self._clock = tools.clock
        gave_way = tools.metrics.group(SessionMetrics).gave_way
        # the label appears with its first count: a cluster whose configuration is refused leaves no metric
        self.rule = SessionAdmission(on_give_way=lambda: gave_way.labels(cluster.name).inc())

    @property
    def admission(self) -> SessionAdmission | None:
        """As of ClusterObserver."""
        return self.rule if part_of(self._cluster.settings, SessionsPlace).admit_sessions else None

    @property
    def cluster_name(self) -> str:
        """Name of its cluster."""
        return self._cluster.name

    def describe(self) -> dict[str, object]:
        """Return what runs and waits, for people."""
        now = self._clock()
        self.rule.expire(now)
        habits = self.rule.habits
        limits = self.list_limits()
        return {
            "known": len(self.rule.known),
            "residents": sum(len(one.sessions) for one in self.rule.sets.values()),
            "waiting": len(self.rule.line.waits),
            "waits": [one.describe(now) for one in islice(self.rule.line.waits, WAITS_SHOWN)],
            "expected_wait_s": round(self.rule.line.expected_wait_s(now), 1),
            "gave_way": self.rule.given_way,
            "idle_limit_s": round(habits.idle_limit_s, 1),
            "growth_tokens": round(habits.growth_tokens),
            "memory_known": any(memory_of(one) for one in self._cluster.endpoints),
            "endpoints": {
                one.id: {**self._describe_residents(one), "limit_tokens": limits[one.id]}
                for one in self._cluster.endpoints
                if one.id in limits
            },
        }

    def _describe_residents(self, endpoint: Endpoint) -> dict[str, object]:
        residents = self.rule.sets[endpoint.id]
        tokens = round(residents.tokens(self.rule.habits.growth_tokens))
        memory = memory_of(endpoint) or None
        return {"residents": len(residents.sessions), "context_tokens": tokens, "memory_tokens": memory}

    def list_limits(self) -> Mapping[EndpointId, int | None]:
        """Return the tokens up to which sessions are admitted to each endpoint that has or had residents; None: there
        is no limit."""
        shown = (one for one in self._cluster.endpoints if one.id in self.rule.sets)
        limits = {one.id: self.rule.find_limits(memory_of(one))[0] for one in shown}
        return {name: None if limit == math.inf else round(limit) for name, limit in limits.items()}


#: How the answers of several workers, which share their sessions but not those that wait, become one.
MERGED = each(
    fields(
        {
            "waiting": total,
            **dict.fromkeys(("known", "residents", "gave_way", "expected_wait_s"), largest),
            **dict.fromkeys(("idle_limit_s", "growth_tokens", "memory_known"), largest),
            "endpoints": each(each(largest)),
            "waits": at_most(joined, WAITS_SHOWN),
        }
    )
)


def memory_of(endpoint: Endpoint) -> int:
    """Return the tokens of an endpoint's KV memory; 0: it does not report them."""
    engine = endpoint.load.engine
    return 0 if engine is None else engine.capacity_tokens or 0


def find_sessions(clusters: Iterable[ObservedCluster]) -> Iterator[ClusterSessions]:
    """Yield the observers of the clusters in which sessions are admitted."""
    for cluster in clusters:
        for one in cluster.observers:
            if isinstance(one, ClusterSessions) and one.admission is not None:
                yield one


def show_sessions(metrics: Metrics, clusters: ListClusters, *, clock: Clock) -> None:
    """Bind the gauges of all clusters."""

    def by_endpoint(value: Callable[[SessionAdmission, Any], float]) -> Iterator[Sample]:
        for one in find_sessions(clusters()):
            one.rule.expire(clock())
            for endpoint, residents in one.rule.sets.items():
                yield (one.cluster_name, endpoint), value(one.rule, residents)

    def limits() -> Iterator[Sample]:
        for one in find_sessions(clusters()):
            for endpoint, limit in one.list_limits().items():
                if limit is not None:
                    yield (one.cluster_name, endpoint), float(limit)

    def entries() -> Iterator[Sample]:
        for one in find_sessions(clusters()):
            yield (one.cluster_name, "known"), float(len(one.rule.known))
            yield (one.cluster_name, "waiting"), float(len(one.rule.line.waits))

    def expected_waits() -> Iterator[Sample]:
        for one in find_sessions(clusters()):
            yield (one.cluster_name,), one.rule.line.expected_wait_s(clock())

    group = metrics.group(SessionMetrics)
    group.residents.set_source(lambda: by_endpoint(lambda _, residents: float(len(residents.sessions))))
    group.context_tokens.set_source(
        lambda: by_endpoint(lambda rule, residents: float(residents.tokens(rule.habits.growth_tokens)))
    )
    group.limit_tokens.set_source(limits)
    group.entries.set_source(entries)
    group.expected_wait.set_source(expected_waits)


def show_status(live: Mapping[str, Any]) -> StatusPart:
    """Return a line for each cluster in which sessions wait."""
    lines = []
    for cluster, one in (live.get("sessions") or {}).items():
        if one["waiting"]:
            longest_s = max(wait["waited_s"] for wait in one["waits"])
            waiting = f"{one['waiting']}, for up to {longest_s:.0f} s ({one['residents']} hold it)"
            new = f"a new one would wait {one['expected_wait_s']:.0f} s"
            lines.append(plain(f"{cluster}: sessions waiting for KV memory: {waiting}; {new}"))
    return StatusPart(blocks=(lines,) if lines else ())
