"""Engines that get a priority and ignore it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.settings import EnginePriorityMode
from kvproxy.features.priority.engine_priority import PriorityState, priority_of
from kvproxy.operate.admin.findings import Rank, Trouble, list_names

_UNHEEDED = {
    PriorityState.IGNORES: "the order in which engines admit does not show it",
    PriorityState.REFUSED: "engines refuse the field, so it is not sent",
}
_START_WITH = "start vLLM with --scheduling-policy priority (SGLang: --enable-priority-scheduling), or set it to auto"


def find_unheeded(clusters: Mapping[str, Cluster]) -> Iterator[Trouble]:
    """Yield a trouble for every cluster whose engines get a priority by `on` and ignore it."""
    for name, cluster in clusters.items():
        vain = [(one, state) for one in cluster.endpoints if (state := _state_in_vain(one)) is not None]
        for state, what in _UNHEEDED.items():
            if unheeding := [one for one, why in vain if why is state]:
                where = f"clusters.{name}"
                text = f"engine_priority is on, and {what} ({list_names(unheeding)})"
                yield Trouble(("priority", where), Rank.REST, "warning", where, text, _START_WITH)


def _state_in_vain(endpoint: Endpoint) -> PriorityState | None:
    """Return why the number has no effect; None where it has one, or none is sent."""
    told = priority_of(endpoint)
    wanted = told is not None and told.mode is EnginePriorityMode.ON and told.state in _UNHEEDED
    return told.state if told is not None and wanted else None
