"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.features.disaggregation.note import NOTE, Legs, explain
from kvproxy.features.disaggregation.settings import Connector, DisaggregationPlace
from kvproxy.operate.feature import OFF, ON, Capability, Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock
    from kvproxy.cluster.cluster import Cluster
    from kvproxy.cluster.endpoint import Endpoint
    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ListClusters, ObservedCluster
    from kvproxy.cluster.routing.selector import Decision
    from kvproxy.operate.admin.findings import Trouble
    from kvproxy.operate.companion import Companion, Siblings
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import Deployment
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.operate.runtime.operated import AdminTarget
    from kvproxy.proxy.forward.engine_request import SplitsRequests


class Disaggregation(Feature):
    """Has prompts computed at one endpoint and answered at another, where that is cheaper."""

    name = "disaggregation"
    metric_group = "DisaggregationMetrics"

    def observe_cluster(self, cluster: ObservedCluster, tools: ClusterTools) -> ClusterObserver:
        """Return the pairs of a cluster, which the settings may use from any reload on."""
        from kvproxy.features.disaggregation.watch import Disaggregated

        return Disaggregated(cluster, tools)

    def show_clusters(self, metrics: Metrics, clusters: ListClusters, *, clock: Clock) -> None:
        """Bind the gauge of pairs."""
        from kvproxy.features.disaggregation.watch import show_pairs

        show_pairs(metrics, clusters)

    def split_requests(self, cluster: Cluster, settings: ClusterSettings) -> SplitsRequests | None:
        """None while it is off."""
        if part_of(settings, DisaggregationPlace).disaggregation.connector is Connector.OFF:
            return None
        from kvproxy.features.disaggregation.splitting import Splitter
        from kvproxy.features.disaggregation.watch import find_all

        return next((Splitter(cluster, state) for state in find_all([cluster])), None)

    def accompany(self, proxy: AdminTarget, config: Config, *, siblings: Siblings | None) -> Companion:
        """Return the sender of canaries."""
        from kvproxy.features.disaggregation.companion import CanaryService

        return CanaryService(clock=proxy.clock)

    def list_notes(self) -> Mapping[str, type[msgspec.Struct]]:
        """Return the legs of a request."""
        return {NOTE: Legs}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield where the prompt was computed, and why there."""
        from kvproxy.operate.receipts.receipt import note_of

        if (legs := note_of(receipt, NOTE, Legs)) is not None:
            yield explain(legs)

    def describe_pick(self, decision: Decision[Endpoint], cluster: Cluster) -> Mapping[str, object]:
        """Return the endpoint that prefills, where one does."""
        from kvproxy.features.disaggregation.splitting import describe_prefill

        prefill = describe_prefill(decision, cluster)
        return {} if prefill is None else {"prefill": prefill}

    def find_troubles(self, operated: AdminTarget) -> Iterable[Trouble]:
        """Return the pairs that are out."""
        from kvproxy.features.disaggregation.findings import find_pairs_out

        return find_pairs_out(operated.clusters)

    def list_checks(self, deployment: Deployment, *, trial: bool) -> Iterator[Check]:
        """Yield the canary on each pair, or a look for the connector."""
        from kvproxy.features.disaggregation.check import check_connector, check_pairs

        for cluster in deployment.clusters:
            settings = part_of(cluster.settings, DisaggregationPlace).disaggregation
            yield (check_connector if settings.connector is Connector.OFF else check_pairs)(cluster)

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return one row."""
        used = {
            part_of(one, DisaggregationPlace).disaggregation.connector.value for one in config.clusters.values()
        } - {Connector.OFF.value}
        if not used:
            return (Capability("prefill apart from decode", OFF, "`disaggregation.connector: off`, the default"),)
        return (Capability("prefill apart from decode", ON, f"`disaggregation.connector: {'/'.join(sorted(used))}`"),)


FEATURE = Disaggregation()
