"""A second policy that decides on live traffic without effect, and how its decisions differ from those that count."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import Policy
from kvproxy.cluster.routing.selector import Decision
from kvproxy.features.shadow.metrics import ShadowMetrics

log = logging.getLogger(__name__)

#: Decisions a second it takes part in; beyond them it would cost more than a few percent of a processor.
MAX_DECISIONS_PER_S = 1000
#: Errors in a row after which it is left alone.
MAX_ERRORS = 20


class Shadow:
    """Sees the same requests, facts and loads, and learns from the same samples in a state of its own.

    Nothing it does reaches a request: its errors are counted, and too many in a row end it until the next start.
    """

    def __init__(self, policy: Policy, *, name: str, cluster: str, metrics: Metrics) -> None:
        self.policy = policy
        self.name = name
        self._cluster = cluster
        self._metrics = metrics.group(ShadowMetrics)
        self._errors_in_a_row = 0
        self._window_at = 0.0
        self._in_window = 0

    @property
    def given_up(self) -> bool:
        """True if it failed too often."""
        return self._errors_in_a_row >= MAX_ERRORS

    def decide(self, live: Decision[Endpoint], now: float) -> None:
        """Decide where the shadow would send the request, before the live decision takes effect."""
        if self.given_up:
            return
        if not self._has_time(now):
            self._count("skipped")
            return
        if self._safely("decide", partial(self._compare, live, now)):
            self._errors_in_a_row = 0

    def learn(self, teach: Callable[[Policy], None]) -> None:
        """Have the policy learn what `teach` passes on to it."""
        if not self.given_up:
            self._safely("learn", partial(teach, self.policy))

    def _compare(self, live: Decision[Endpoint], now: float) -> None:
        request = live.request
        candidates = live.candidates
        choice = self.policy.choose(request, candidates, now)
        if not 0 <= choice.index < len(candidates):
            raise IndexError(f"{self.name} chose candidate {choice.index} of {len(candidates)}")
        self.policy.placed(request, candidates, choice.index, now, choice=choice)  # to the shadow's knowledge
        if choice.index == live.index:
            self._count("same")
            return
        self._count("different")
        if choice.costs:
            self._observe_difference("shadow", choice.costs[live.index] - choice.costs[choice.index])
        if live.costs:
            self._observe_difference("live", live.costs[choice.index] - live.costs[live.index])

    def _count(self, result: str) -> None:
        self._metrics.shadow_decisions.labels(self._cluster, self.name, result).inc()

    def _observe_difference(self, by: str, cost: float) -> None:
        self._metrics.shadow_cost_difference.labels(self._cluster, self.name, by).observe(cost)

    def _has_time(self, now: float) -> bool:
        if now - self._window_at >= 1.0:
            self._window_at = now
            self._in_window = 0
        self._in_window += 1
        return self._in_window <= MAX_DECISIONS_PER_S

    def _safely(self, what: str, call: Callable[[], None]) -> bool:
        """Run a call and return True if it succeeded."""
        try:
            call()
        except Exception as error:
            self._count("error")
            self._errors_in_a_row += 1
            if self._errors_in_a_row == 1:
                log.error("shadow policy %s of %s cannot %s", self.name, self._cluster, what, exc_info=error)
            elif self.given_up:
                log.error("shadow policy %s of %s is off: it fails every time", self.name, self._cluster)
            return False
        return True
