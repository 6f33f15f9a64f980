"""State of one cluster that survives reloads: pairs, and its connector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvproxy.base.background_task import TaskSet
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.endpoint import Endpoint, EndpointObserver
from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ListClusters, ObservedCluster
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.features.disaggregation.connectors import CONNECTORS
from kvproxy.features.disaggregation.connectors.base import KvConnector
from kvproxy.features.disaggregation.metrics import DisaggregationMetrics
from kvproxy.features.disaggregation.pairs import Pairs
from kvproxy.features.disaggregation.settings import Connector, DisaggregationPlace, DisaggregationSettings


class Disaggregated(ClusterObserver):
    """One cluster, whose settings may change at any reload."""

    def __init__(self, cluster: ObservedCluster, tools: ClusterTools) -> None:
        self.cluster = cluster
        self.tools = tools
        self.pairs = Pairs()
        self.metrics = tools.metrics.group(DisaggregationMetrics)
        #: Owner of prefill legs that go on beside the decoder's; None: the proxy is not entered yet.
        self.tasks: TaskSet | None = None
        self._made_by: tuple[Connector, int] | None = None
        self._connector: KvConnector | None = None

    @property
    def settings(self) -> DisaggregationSettings:
        return part_of(self.cluster.settings, DisaggregationPlace).disaggregation

    @property
    def connector(self) -> KvConnector | None:
        """None while it is off."""
        settings = self.settings
        made_by = (settings.connector, settings.bootstrap_port)
        if made_by != self._made_by:
            self._made_by = made_by
            make = CONNECTORS.get(settings.connector)
            self._connector = None if make is None else make(settings.bootstrap_port, self.tools.rng)
            self.pairs.keep_only(())
        return self._connector

    def observe_endpoint(self, endpoint: Endpoint, config: EndpointSettings) -> EndpointObserver:
        """Forget what was found of an engine when it is another process."""
        return _EngineWatch(self, endpoint)

    def forget(self, endpoint: Endpoint) -> None:
        """Forget what was found of an engine."""
        self.pairs.forget(endpoint)
        if self._connector is not None:
            self._connector.forget(endpoint)


class _EngineWatch(EndpointObserver):
    """Of one endpoint."""

    __slots__ = ("_cluster", "_endpoint")

    def __init__(self, cluster: Disaggregated, endpoint: Endpoint) -> None:
        self._cluster = cluster
        self._endpoint = endpoint

    def process_replaced(self) -> None:
        self._cluster.forget(self._endpoint)


def find_all(clusters: Iterable[ObservedCluster]) -> Iterator[Disaggregated]:
    """Yield the state of each cluster."""
    for cluster in clusters:
        yield from (one for one in cluster.observers if isinstance(one, Disaggregated))


def show_pairs(metrics: Metrics, clusters: ListClusters) -> None:
    """Bind the gauge of pairs."""

    def count() -> Iterator[tuple[tuple[str, str], float]]:
        for one in find_all(clusters()):
            for state, number in one.pairs.count_states().items():
                yield (one.cluster.name, state.value), number

    metrics.group(DisaggregationMetrics).pairs.set_source(count)
