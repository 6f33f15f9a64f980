"""Texts for people: whether it is on, and engines that get a priority and ignore it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.settings import EnginePriorityMode
from kvproxy.features.priority.engine_priority import PriorityState, priority_of
from kvproxy.operate.admin.findings import Rank, Trouble, list_names
from kvproxy.operate.admin.operated import AdminTarget
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import OFF, ON, Capability

_GAIN = "`engine_priority: auto` has busy engines start the shortest prefill first"
_NAME = "engine priority"

_UNHEEDED = {
    PriorityState.IGNORES: "the order in which engines admit does not show it",
    PriorityState.REFUSED: "engines refuse the field, so it is not sent",
}
_START_WITH = "start vLLM with --scheduling-policy priority (SGLang: --enable-priority-scheduling), or set it to auto"


def find_unheeded(clusters: Mapping[str, Cluster]) -> Iterator[Trouble]:
    """Yield a trouble for every cluster whose engines get a priority by `on` and ignore it."""
    for name, cluster in clusters.items():
        for state, what in _UNHEEDED.items():
            if unheeding := [one for one in cluster.endpoints if _is_told_in_vain(one, state)]:
                where = f"clusters.{name}"
                text = f"engine_priority is on, and {what} ({list_names(unheeding)})"
                yield Trouble(("priority", where), Rank.REST, "warning", where, text, _START_WITH)


def _is_told_in_vain(endpoint: Endpoint, state: PriorityState) -> bool:
    told = priority_of(endpoint)
    return told is not None and told.mode is EnginePriorityMode.ON and told.state is state


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
    endpoints = [endpoint for cluster in operated.clusters.values() for endpoint in cluster.endpoints]
    now = operated.clock()
    sent = sum(told is not None and told.sends(now) for told in map(priority_of, endpoints))
    return Capability(_NAME, ON, f"{reason}, sent to {sent} of {len(endpoints)} endpoints now")
