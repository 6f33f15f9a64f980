"""State that a proxy shares with its peers: the few places where it is read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Protocol

from kvproxy.base.resilience.retry import RetryBudget
from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.hotness import Hotness
from kvproxy.cache.metrics_scraper import MetricsScraper
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.service import KvCache
from kvproxy.cache.state import CacheState
from kvproxy.cache.store import KvStore
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.prober import ProbeOutcome, TellProbe
from kvproxy.cluster.routing.admission import Admission
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import Policy
from kvproxy.cluster.routing.remote_load import ReplicaSpread
from kvproxy.cluster.routing.work import Features
from kvproxy.features.exchange.deltas import Delta, EngineRead, Probed
from kvproxy.features.exchange.wire import Origin
from kvproxy.proxy.filters.chain import ChargedLimits


class ClusterPart(Protocol):
    """One cluster."""

    @property
    def indexes(self) -> LocalIndexes | None: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def admission(self) -> Admission | None:
        """Return the rule by which requests wait for room; None: there is none."""

    def loads(self) -> Iterable[tuple[EndpointId, EndpointLoad]]:
        """Return the ledgers of the endpoints there are."""
        ...

    def load(self, endpoint: EndpointId) -> EndpointLoad | None:
        """Return the ledger of this one; None: there is no such endpoint."""
        ...

    def receive_load(self, endpoint: EndpointId, in_flight_before: int) -> None:
        """Handle a load row from another proxy."""
        ...

    def observe_sample(
        self, endpoint: EndpointId, work: Features, busy_s: float, now: float, *, scraped: bool
    ) -> None: ...

    def placed_elsewhere(
        self, endpoint: EndpointId, routed_s: float, requests: int, bound: int, now: float
    ) -> None: ...

    def drained(self) -> Mapping[EndpointId, bool]:
        """Return the drain state set by an operator, by endpoint."""
        ...

    def drain(self, endpoint: EndpointId, *, draining: bool) -> None: ...

    def watch_probes(self, tell: TellProbe) -> None:
        """Call `tell` with each probe's engine and outcome."""

    def receive_probe(self, engine: EndpointId, outcome: ProbeOutcome) -> None:
        """Another process probed it just now."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """All of it, as one configuration has it."""

    clusters: Mapping[str, ClusterPart]
    state: CacheState | None = None
    hotness: Hotness | None = None
    store: KvStore | None = None
    scraper: MetricsScraper | None = None
    limits: Mapping[str, ChargedLimits] = field(default_factory=dict)  # by filter
    budgets: Mapping[str, RetryBudget] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        clusters: Mapping[str, Cluster],
        kvcache: KvCache | None,
        *,
        limits: Mapping[str, ChargedLimits],
        budgets: Mapping[str, RetryBudget],
    ) -> SharedState:
        """Of a running proxy."""
        parts = {name: RunningCluster(cluster, kvcache) for name, cluster in clusters.items()}
        if kvcache is None:
            return cls(parts, limits=limits, budgets=budgets)
        hotness = kvcache.actions.hotness
        store = kvcache.overlap.store
        return cls(parts, kvcache.state, hotness, store, kvcache.scraper, limits, budgets)

    def keep_apart(self, own: Origin, lags_s: Mapping[Origin, float]) -> None:
        """Pass the number of deciding processes, and their delay, to the policies."""
        delay_s = fmean(lags_s.values()) if lags_s else 0.0
        others = ReplicaSpread(delay_s, 1 + len(lags_s), sum(one < own for one in lags_s)) if delay_s else None
        for part in self.clusters.values():
            part.policy.others = others

    def count_blocks(self) -> int:
        """Return the blocks in the approximate indexes."""
        parts = self.clusters.values()
        return sum(part.indexes.approximate.counts.entries for part in parts if part.indexes is not None)

    def watch_engines(self, add: Callable[[Delta], None]) -> None:
        """Add engines' readings, and outcomes of their probes."""
        if self.scraper is not None:
            self.scraper.readings.tell = lambda *read: add(EngineRead(*read))
        for name, part in self.clusters.items():
            part.watch_probes(partial(_add_probe, add, name))

    def receive_probe(self, delta: Probed, *, near: bool) -> None:
        """Use another proxy's probe of an engine, if it is on the same machine."""
        part = self.clusters.get(delta.cluster)
        if near and part is not None:
            part.receive_probe(EndpointId(delta.engine), delta.outcome)

    def hear_engine(self, delta: EngineRead) -> None:
        """Another proxy read an engine."""
        if self.scraper is not None:
            self.scraper.hear(delta.cluster, delta.engine, delta.metrics)


def _add_probe(add: Callable[[Delta], None], cluster: str, engine: EndpointId, outcome: ProbeOutcome) -> None:
    add(Probed(cluster, engine, outcome))


@dataclass(slots=True)
class RunningCluster:
    """As of ClusterPart."""

    cluster: Cluster
    kvcache: KvCache | None

    @property
    def indexes(self) -> LocalIndexes | None:
        return None if self.kvcache is None else self.kvcache.overlap.indexes.get(self.cluster.name)

    @property
    def policy(self) -> Policy:
        return self.cluster.policies.own.policy

    @property
    def admission(self) -> Admission | None:
        return self.cluster.admission

    def loads(self) -> Iterable[tuple[EndpointId, EndpointLoad]]:
        return ((endpoint.id, endpoint.load) for endpoint in self.cluster.endpoints)

    def load(self, endpoint: EndpointId) -> EndpointLoad | None:
        found = self.cluster.find_endpoint(endpoint)
        return None if found is None else found.load

    def receive_load(self, endpoint: EndpointId, in_flight_before: int) -> None:
        found = self.cluster.find_endpoint(endpoint)
        if found is not None:
            found.receive_load(in_flight_before)
            if self.cluster.queue is not None:
                self.cluster.queue.on_load_decrease()

    def observe_sample(self, endpoint: EndpointId, work: Features, busy_s: float, now: float, *, scraped: bool) -> None:
        self.cluster.policies.observe_sample(endpoint, work, busy_s, now, scraped=scraped)

    def placed_elsewhere(self, endpoint: EndpointId, routed_s: float, requests: int, bound: int, now: float) -> None:
        count = len(self.cluster.endpoints)
        self.cluster.policies.placed_elsewhere(endpoint, routed_s, requests, bound, count, now)

    def drained(self) -> Mapping[EndpointId, bool]:
        return {endpoint.id: endpoint.draining for endpoint in self.cluster.endpoints}

    def drain(self, endpoint: EndpointId, *, draining: bool) -> None:
        self.cluster.operator.drain_endpoint(endpoint, draining=draining)

    def watch_probes(self, tell: TellProbe) -> None:
        self.cluster.verdicts.send_probe = tell

    def receive_probe(self, engine: EndpointId, outcome: ProbeOutcome) -> None:
        self.cluster.verdicts.receive_probe(engine, outcome)
