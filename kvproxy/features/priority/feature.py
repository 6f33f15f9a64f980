"""The feature, as the core meets it. Its settings stand beside those of endpoints, which discovery makes as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ObservedCluster
    from kvproxy.operate.admin.findings import Trouble
    from kvproxy.operate.admin.operated import AdminTarget
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.feature import Capability
    from kvproxy.operate.receipts.receipt import Receipt


class PriorityFeature(Feature):
    """Has engines order what waits in them by a number in each request."""

    name = "priority"
    metric_group = "EnginePriorityMetrics"

    def list_notes(self) -> Mapping[str, type]:
        """Return the type of the note: the engine's number in milliseconds."""
        return {"engine_priority": int}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield the number, its parts, and the order of the engine."""
        from kvproxy.operate.receipts.receipt import note_of

        if (priority := note_of(receipt, "engine_priority", int)) is not None:
            order = "lowest" if priority >= 0 else "highest"
            made_of = "its prefill there, when it came, its class and its tenant's turn"
            yield f"sent with priority {priority} ({made_of}; the engine admits the {order} first)"

    def observe_cluster(self, cluster: ObservedCluster, tools: ClusterTools) -> ClusterObserver:
        """Return the priorities of the cluster's engines, which the settings may turn on at any reload."""
        from kvproxy.features.priority.engine_priority import ClusterPriority

        return ClusterPriority(cluster, tools)

    def find_troubles(self, operated: AdminTarget) -> Iterable[Trouble]:
        """Return engines that ignore the number."""
        from kvproxy.features.priority.findings import find_unheeded

        return find_unheeded(operated.clusters)

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return one row."""
        from kvproxy.features.priority.capability import describe_capability

        return (describe_capability(config, operated),)


FEATURE = PriorityFeature()
