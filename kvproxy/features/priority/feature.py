"""The feature, as the core meets it. Its settings stand beside those of endpoints, which discovery makes as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvproxy.cluster.settings import EnginePriorityMode
from kvproxy.operate.feature import OFF, ON, Capability, Feature

if TYPE_CHECKING:
    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ObservedCluster
    from kvproxy.operate.admin.findings import Trouble
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.operate.runtime.operated import AdminTarget


_GAIN = "`engine_priority: auto` has busy engines start the shortest prefill first"
_NAME = "engine priority"


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
        """Return engines that refuse the number."""
        from kvproxy.features.priority.findings import find_refusing

        return find_refusing(operated.clusters)

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return one row."""
        return (describe_capability(config, operated),)


def describe_capability(config: Config, operated: AdminTarget | None) -> Capability:
    """Return whether any engine may get a priority, and how many get one now."""
    clusters = config.clusters.values()
    own = (one.engine_priority for cluster in clusters for one in cluster.endpoints)
    modes = {*(cluster.engine_priority for cluster in clusters), *(one for one in own if one is not None)}
    modes.discard(EnginePriorityMode.OFF)
    if not modes:
        return Capability(_NAME, OFF, "`engine_priority: off`, the default", _GAIN)
    reason = f"`engine_priority: {'/'.join(sorted(modes))}`"
    if operated is None:
        return Capability(_NAME, ON, reason)
    from kvproxy.features.priority.engine_priority import priority_of  # `kvproxy check` needs no engines

    endpoints = [endpoint for cluster in operated.clusters.values() for endpoint in cluster.endpoints]
    now = operated.clock()
    sent = sum(told is not None and told.sends(now) for told in map(priority_of, endpoints))
    return Capability(_NAME, ON, f"{reason}, sent to {sent} of {len(endpoints)} endpoints now")


FEATURE = PriorityFeature()
