"""Engines that get a priority and refuse it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.settings import EnginePriorityMode
from kvproxy.features.priority.engine_priority import PriorityState, priority_of
from kvproxy.operate.admin.findings import Rank, Trouble, list_names

_START_WITH = "start vLLM with --scheduling-policy priority (SGLang: --enable-priority-scheduling), or set it to auto"


def find_refusing(clusters: Mapping[str, Cluster]) -> Iterator[Trouble]:
    """Yield a trouble for every cluster whose engines get a priority by `on` and refuse it."""
    for name, cluster in clusters.items():
        if refusing := list(filter(_refuses, cluster.endpoints)):
            where = f"clusters.{name}"
            what = f"engine_priority is on, and engines refuse the field, so it is not sent ({list_names(refusing)})"
            yield Trouble(("priority", where), Rank.REST, "warning", where, what, _START_WITH)


def _refuses(endpoint: Endpoint) -> bool:
    told = priority_of(endpoint)
    return told is not None and told.mode is EnginePriorityMode.ON and told.state is PriorityState.REFUSED
