"""Breaks of one stream: its note for the outcome of the request, and the metrics."""

from __future__ import annotations

import msgspec

from kvproxy.features.resume.metrics import ResumeMetrics
from kvproxy.features.resume.note import NOTE, ResumedLeg, ResumeNote
from kvproxy.features.resume.running import Moved
from kvproxy.proxy.request.exchange import Outcome


class Breaks:
    """In order."""

    def __init__(self, outcome: Outcome, metrics: ResumeMetrics) -> None:
        self.legs: list[ResumedLeg] = []
        self._outcome = outcome
        self._metrics = metrics

    def count(self, *, moved: bool) -> int:
        """Return how many were moves off drained endpoints, or were not."""
        return sum((leg.error == Moved.reason) is moved for leg in self.legs)

    def add(self, leg: ResumedLeg) -> None:
        """Note a break, and how the rest is requested."""
        self.legs.append(leg)
        self._publish()

    def add_refused(self, leg: ResumedLeg, reason: str) -> None:
        """Note a break behind which nothing is requested."""
        self.add(msgspec.structs.replace(leg, refusal=reason))
        self._metrics.refused.labels(self._outcome.cluster, reason).inc()

    def refuse(self, reason: str) -> None:
        """Note that the rest behind the latest break is not requested after all."""
        self._replace_last(grade="", refusal=reason)
        self._metrics.refused.labels(self._outcome.cluster, reason).inc()

    def count_move(self) -> None:
        """Count a move whose rest is requested."""
        self._metrics.moved.labels(self._outcome.cluster).inc()

    def note_gap(self, gap_s: float) -> None:
        """Note the time from the latest break to the first new token."""
        self._replace_last(gap_s=round(gap_s, 6))
        cluster = self._outcome.cluster
        self._metrics.gap.labels(cluster).observe(gap_s)
        if self.legs[-1].error != Moved.reason:
            self._metrics.resumed.labels(cluster, self.legs[-1].grade).inc()

    def _replace_last(self, **changes: object) -> None:
        self.legs[-1] = msgspec.structs.replace(self.legs[-1], **changes)
        self._publish()

    def _publish(self) -> None:
        self._outcome.notes[NOTE] = ResumeNote(tuple(self.legs))
