"""What an operator should know of how clusters decide: speeds that are not learned, priorities that are not heeded,
data-parallel ranks that requests cannot ask for, adapters that no engine has any more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvproxy.admin.operated import ConfigFinding
from kvproxy.admin.trouble import NAMED, list_names
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.engine_priority import PriorityState
from kvproxy.config.cluster_schema import EnginePriorityMode

#: So many placements without one sample are no accident.
NOTABLE_REQUESTS = 500
_FIX = (
    "stream answers, or let the kvcache filter read the engines' own counters: engine_metrics_interval above 0, "
    "SGLang with --enable-metrics and without other clients"
)
_UNHEEDED = {
    PriorityState.IGNORES: "the order in which engines admit shows nothing of it",
    PriorityState.REFUSED: "engines refuse the field, so they are not sent it",
}
_START_WITH = "start vLLM with --scheduling-policy priority (SGLang: --enable-priority-scheduling), or set it to auto"


def find_unlearned(clusters: Mapping[str, Cluster]) -> Iterable[ConfigFinding]:
    """A finding for every cluster that decides by speeds and has seen none for long."""
    for name, cluster in clusters.items():
        speeds = cluster.speeds
        if speeds is None or speeds.requests_without_sample < NOTABLE_REQUESTS:
            continue
        believed = (
            "speeds are the defaults, alike for all" if speeds.learning else "what was learned of slow ones fades"
        )
        what = f"no sample of the engines' speeds in {speeds.requests_without_sample:,} requests: {believed}"
        yield ConfigFinding("warning", f"clusters.{name}", what, _FIX)


def find_unheeded_priority(clusters: Mapping[str, Cluster]) -> Iterable[ConfigFinding]:
    """A finding for every cluster with engines that are told a priority by `on` and do not go by it."""
    for name, cluster in clusters.items():
        told = [one for one in cluster.endpoints if one.priority.mode is EnginePriorityMode.ON]
        for state, what in _UNHEEDED.items():
            if unheeding := [one for one in told if one.priority.state is state]:
                text = f"engine_priority is on, and {what} ({list_names(unheeding)})"
                yield ConfigFinding("warning", f"clusters.{name}", text, _START_WITH)


def find_unsteered_ranks(clusters: Mapping[str, Cluster]) -> Iterable[ConfigFinding]:
    """A finding for every engine with ranks that it refused, or that only its metrics show."""
    for name, cluster in clusters.items():
        for engine in cluster.engines:
            ranks, where = engine.ranks, f"{name}/{engine.id}"
            if ranks.refused:
                what = f"the engine refused the data-parallel rank {_listed(ranks.refused)}, which gets no requests"
                yield ConfigFinding("warning", where, what, f"set data_parallel.ranks to {_listed(ranks.candidates)}")
            elif ranks.unknown and ranks.named is not None:
                what = (
                    f"it has the data-parallel ranks {_listed(ranks.shown)}, and nothing says that requests may ask "
                    "for one: a prefix is computed once a rank"
                )
                fix = f"set data_parallel.ranks to {_listed(ranks.shown)}, or start it with --kv-events-config"
                yield ConfigFinding("warning", where, what, fix)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"


def find_lost_adapters(clusters: Mapping[str, Cluster]) -> Iterable[ConfigFinding]:
    """A finding for every cluster with adapters that its engines listed once, and none of them does now."""
    for name, cluster in clusters.items():
        if lost := sorted(cluster.adapters.lost):
            more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
            what = f"no engine serves the adapter {', '.join(lost[:NAMED])}{more} any more: its requests fail"
            fix = "load it again (vLLM: POST /v1/load_lora_adapter, or --lora-modules), or tell its clients"
            yield ConfigFinding("warning", f"clusters.{name}", what, fix)
