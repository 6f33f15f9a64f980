"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Model
from kvproxy.cluster.settings import RouteSettings
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ObservedCluster
    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import ClusterFacts
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.feature import Capability
    from kvproxy.operate.merge import Rule
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.operate.runtime.operated import AdminTarget
    from kvproxy.proxy.filters.chain import FilterType


class Grade(StrEnum):
    """How a stream whose engine failed may go on."""

    OFF = "off"
    EXACT = "exact"  # by the token ids of prompt and answer
    TEXT = "text"  # by these where they are known, else by the answer's text


class ResumePlace(Model):
    """Keys that each route gets."""

    resume: Grade = Grade.OFF
    """Streams whose engine fails go on with another one: `exact` only by token ids, which vLLM reports; `text` also by
    the text so far, for models that `kvproxy doctor` finds fit for it; `off` ends them with an error event."""
    resume_best_effort: bool = False
    """Resume requests with penalties, a seed, or stop strings while sampling too, and by text those with a limit whose
    tokens cannot be counted: the rest may differ from that of an undisturbed run, or exceed the limit."""


NOTE = "resume"


class ResumedLeg(msgspec.Struct, frozen=True, omit_defaults=True):
    """One break: where the stream broke, and how it went on."""

    broke_at: str  # endpoint
    error: str  # reason of the failure
    tokens: int  # of the answer that had come
    grade: str = ""  # exact, text, restart; "": it did not go on
    refusal: str = ""  # why not
    gap_s: float | None = None  # without a token; None: no further token came


class ResumeNote(msgspec.Struct, frozen=True):
    """All breaks of one stream, in order."""

    legs: tuple[ResumedLeg, ...]


class Resume(Feature):
    """Streams whose engine fails go on with another one."""

    name = "resume"
    metric_group = "ResumeMetrics"
    settings = {RouteSettings: (ResumePlace,)}

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

    def list_guards(self, config: Config) -> Sequence[tuple[str, FilterType]]:
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

    def list_cluster_checks(self, cluster: ClusterFacts) -> Sequence[Check]:
        """Return the check of the model's template, where text is continued."""
        from kvproxy.features.resume.check import check_continuation

        routes = cluster.deployment.config.routes
        texts = {route.cluster for route in routes if part_of(route, ResumePlace).resume is Grade.TEXT}
        return (check_continuation(cluster),) if cluster.name in texts else ()

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return one row."""
        from kvproxy.operate.feature import OFF, ON, Capability

        grades = _list_grades(config)
        if not grades:
            gain = "`resume: exact` on a route has streams go on when their engine fails"
            return (Capability("resumed streams", OFF, "no route asks for it", gain),)
        return (Capability("resumed streams", ON, f"routes with `resume`: {', '.join(grades)}"),)


def _list_grades(config: Config) -> list[str]:
    """Return the grades that routes ask for."""
    grades = {part_of(route, ResumePlace).resume for route in config.routes}
    return sorted(grade.value for grade in grades if grade is not Grade.OFF)


def describe_leg(leg: ResumedLeg) -> str:
    """Return a line about it."""
    if leg.error == "moved":
        return _describe_move(leg)
    broke = f"the stream broke at {leg.broke_at} ({leg.error}) after {leg.tokens} tokens"
    if leg.refusal:
        return f"{broke} and could not go on: {leg.refusal}"
    if leg.gap_s is None:
        return f"{broke}; the rest was requested ({leg.grade}), and nothing more came"
    return f"{broke} and went on elsewhere after {leg.gap_s:.3g} s ({leg.grade})"


def _describe_move(leg: ResumedLeg) -> str:
    moved = f"the stream was moved off {leg.broke_at} after {leg.tokens} tokens ({leg.grade})"
    return f"{moved}; nothing more came" if leg.gap_s is None else f"{moved} and went on after {leg.gap_s:.3g} s"


FEATURE = Resume()
