"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.features.residents.note import NOTE, SessionTurn
from kvproxy.features.residents.settings import SessionsPlace
from kvproxy.operate.config.schema import find_kvcache_settings
from kvproxy.operate.feature import OFF, ON, Capability, Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock
    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ListClusters, ObservedCluster
    from kvproxy.cluster.routing.admission import Admission
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import Deployment
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.feature import StatusPart
    from kvproxy.operate.merge import Rule
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.operate.runtime.operated import AdminTarget


_NAME = "sessions admitted by memory"


class Sessions(Feature):
    """Admits sessions instead of requests where the engines' memory is too small for all of them."""

    name = "residents"
    metric_group = "SessionMetrics"
    panel = "residents"

    def list_notes(self) -> Mapping[str, type[msgspec.Struct]]:
        """Return the turn of its session, and how long it waited for room."""
        return {NOTE: SessionTurn}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield the turn, its wait for room, and whether its context is kept."""
        from kvproxy.operate.receipts.explain import format_seconds
        from kvproxy.operate.receipts.receipt import note_of

        if (turn := note_of(receipt, NOTE, SessionTurn)) is not None:
            waited = ""
            if turn.room_wait_s:
                waited = f", which waited {format_seconds(turn.room_wait_s)} until an engine had memory for its context"
            kept = "is kept for the next turn" if turn.resident else "is not kept, since no memory was free for it"
            yield f"turn {turn.turn} of its session{waited}; the context {kept}"

    def make_admission(self, settings: ClusterSettings) -> Admission | None:
        """Return the rule, which needs no more than what a router sees."""
        from kvproxy.features.residents.admission import SessionAdmission

        return SessionAdmission() if part_of(settings, SessionsPlace).admit_sessions else None

    def observe_cluster(self, cluster: ObservedCluster, tools: ClusterTools) -> ClusterObserver:
        """Return the rule of one cluster, which the settings may switch at any reload."""
        from kvproxy.features.residents.cluster_sessions import ClusterSessions

        return ClusterSessions(cluster, tools)

    def show_clusters(self, metrics: Metrics, clusters: ListClusters, *, clock: Clock) -> None:
        """Bind the gauges of all clusters."""
        from kvproxy.features.residents.cluster_sessions import show_sessions

        show_sessions(metrics, clusters, clock=clock)

    def describe_live(self, operated: AdminTarget) -> Mapping[str, object]:
        """Return residents and waits by cluster."""
        from kvproxy.features.residents.cluster_sessions import find_sessions

        found = find_sessions(operated.clusters.values())
        return {"sessions": {one.cluster_name: one.describe() for one in found}}

    def merge_rules(self) -> Mapping[str, Mapping[str, Rule]]:
        """Return what the workers have together."""
        from kvproxy.features.residents.cluster_sessions import MERGED

        return {"/live": {"sessions": MERGED}}

    def show_status(self, live: Mapping[str, Any], *, colour: bool) -> StatusPart:
        """Return a line for each cluster in which sessions wait."""
        from kvproxy.features.residents.cluster_sessions import show_status

        return show_status(live)

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return one row."""
        return (describe_capability(config, None if operated is None else operated.clusters.values()),)

    def list_checks(self, deployment: Deployment, *, trial: bool) -> Sequence[Check]:
        """Return whether the engines show their memory."""
        from kvproxy.features.residents.memory_check import check_session_memory

        return [check_session_memory(one) for one in deployment.clusters if admits_sessions(one.settings)]

    def advise(self, receipts: Sequence[Receipt], memory_tokens: Sequence[int]) -> Iterator[str]:
        """Yield how far the contexts of sessions exceeded the memory, when, and what that takes."""
        from kvproxy.features.residents.advice import advise_memory

        return advise_memory(receipts, memory_tokens)


def admits_sessions(cluster: ClusterSettings) -> bool:
    """Return whether sessions of a cluster wait for room."""
    return cluster.queues and part_of(cluster, SessionsPlace).admit_sessions


def describe_capability(config: Config, clusters: Iterable[ObservedCluster] | None) -> Capability:
    """Return whether sessions are admitted, and why that has no effect where the memory is not known."""
    queued = [one for one in config.clusters.values() if one.queues]
    if not any(map(admits_sessions, queued)):
        if not queued:
            return Capability(_NAME, OFF, "the router queue is off")
        gain = "`admit_sessions: true` keeps agents beyond the engines' memory fast"
        return Capability(_NAME, OFF, "`admit_sessions: false`", gain)
    if clusters is None:
        kvcache = find_kvcache_settings(config)
        if kvcache is None or not kvcache.engine_metrics_interval:
            return Capability(_NAME, ON, "no effect: the engines' KV memory is not read (`engine_metrics_interval`)")
        return Capability(_NAME, ON, "the default; no effect while all sessions fit")
    from kvproxy.features.residents.cluster_sessions import find_sessions  # `kvproxy check` needs no router

    shown = [one.describe() for one in find_sessions(clusters)]
    if not any(one["memory_known"] for one in shown):
        return Capability(_NAME, ON, "no effect: no engine reports its KV memory (`engine_metrics_interval`)")
    total = {key: sum(int(str(one[key])) for one in shown) for key in ("residents", "waiting")}
    return Capability(_NAME, ON, f"{total['residents']} resident now, {total['waiting']} wait for room")


FEATURE = Sessions()
