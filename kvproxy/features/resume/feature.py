"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvproxy.base.settings.compose import part_of
from kvproxy.features.resume.note import NOTE, ResumeNote, describe_leg
from kvproxy.features.resume.settings import Grade, ResumePlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ObservedCluster
    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import Deployment
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.feature import Capability
    from kvproxy.operate.merge import Rule
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.operate.runtime.operated import AdminTarget
    from kvproxy.proxy.filters.chain import FilterType
    from kvproxy.proxy.settings import ServingSettings


class Resume(Feature):
    """Streams whose engine fails go on with another one."""

    name = "resume"
    metric_group = "ResumeMetrics"

    def observe_cluster(self, cluster: ObservedCluster, tools: ClusterTools) -> ClusterObserver:
        """Return the places where endpoints find their streams."""
        from kvproxy.features.resume.running import RunningObserver

        return RunningObserver()

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return the path that moves streams."""
        from kvproxy.features.resume.admin import MoveRoutes

        return MoveRoutes(operated, audit).list_routes()

    def merge_rules(self) -> Mapping[str, Mapping[str, Rule]]:
        """Streams of several workers that moved, or stay, are added."""
        from kvproxy.operate.merge import each, total

        return {"/endpoints/*/move": {"moved": total, "staying": each(total)}}

    def list_guards(self, config: ServingSettings) -> Sequence[tuple[str, FilterType]]:
        """Return the filter, if a route wants it."""
        from kvproxy.features.resume.filter import FILTER

        return (("resume", FILTER),) if _list_grades(config) else ()

    def list_notes(self) -> Mapping[str, type[msgspec.Struct]]:
        """Return the breaks of a stream, and how it went on."""
        return {NOTE: ResumeNote}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield a line for each break."""
        from kvproxy.operate.receipts.receipt import note_of

        if (note := note_of(receipt, NOTE, ResumeNote)) is not None:
            yield from map(describe_leg, note.legs)

    def list_checks(self, deployment: Deployment, *, trial: bool) -> Sequence[Check]:
        """Return the check of the model's template, where text is continued."""
        from kvproxy.features.resume.check import check_continuation

        routes = deployment.config.routes
        texts = {route.cluster for route in routes if part_of(route, ResumePlace).resume is Grade.TEXT}
        return [check_continuation(cluster) for cluster in deployment.clusters if cluster.name in texts]

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return one row."""
        from kvproxy.operate.feature import OFF, ON, Capability

        grades = _list_grades(config)
        if not grades:
            gain = "`resume: exact` on a route has streams go on when their engine fails"
            return (Capability("resumed streams", OFF, "no route asks for it", gain),)
        return (Capability("resumed streams", ON, f"routes with `resume`: {', '.join(grades)}"),)


def _list_grades(config: ServingSettings) -> list[str]:
    """Return the grades that routes ask for."""
    grades = {part_of(route, ResumePlace).resume for route in config.routes}
    return sorted(grade.value for grade in grades if grade is not Grade.OFF)


FEATURE = Resume()
