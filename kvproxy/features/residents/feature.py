"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.features.residents.settings import SessionsPlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from msgspec import Struct

    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock
    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ListClusters, ObservedCluster
    from kvproxy.cluster.routing.admission import Admission
    from kvproxy.operate.admin.operated import AdminTarget
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import Deployment
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.feature import Capability, StatusPart
    from kvproxy.operate.merge import Rule
    from kvproxy.operate.receipts.receipt import Receipt


class Sessions(Feature):
    """Admits sessions instead of requests where the engines' memory is too small for all of them."""

    name = "residents"
    metric_group = "SessionMetrics"
    settings = {ClusterSettings: (SessionsPlace,)}
    panel = "residents"

    def list_notes(self) -> Mapping[str, type[Struct]]:
        """Return the turn of its session, and how long it waited for room."""
        from kvproxy.features.residents.note import NOTE, SessionTurn

        return {NOTE: SessionTurn}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield the turn, its wait for room, and whether its context is kept."""
        from kvproxy.features.residents.note import NOTE, SessionTurn
        from kvproxy.operate.receipts.explain import format_seconds
        from kvproxy.operate.receipts.receipt import note_of

        if (turn := note_of(receipt, NOTE, SessionTurn)) is not None:
            waited = f" after waiting {format_seconds(turn.room_wait_s)} for room in memory" if turn.room_wait_s else ""
            kept = "kept there for the next one" if turn.resident else "not kept, since it had no room"
            yield f"turn {turn.turn} of its session{waited}; its context is {kept}"

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
        from kvproxy.features.residents.capability import describe_capability

        return (describe_capability(config, None if operated is None else operated.clusters.values()),)

    def list_cluster_checks(self, deployment: Deployment, cluster: str) -> Sequence[Check]:
        """Return whether the engines show their memory."""
        from kvproxy.features.residents.capability import admits_sessions
        from kvproxy.features.residents.memory_check import SessionMemoryCheck

        return (
            (SessionMemoryCheck(deployment, cluster),) if admits_sessions(deployment.config.clusters[cluster]) else ()
        )

    def advise(self, receipts: Sequence[Receipt], memory_tokens: Sequence[int]) -> Iterator[str]:
        """Yield how far the contexts of sessions exceeded the memory, when, and what that takes."""
        from kvproxy.features.residents.advice import advise_memory

        return advise_memory(receipts, memory_tokens)


FEATURE = Sessions()
