"""The number by which engines admit what waits in them: which requests carry one, and what each engine makes of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum

from kvproxy.base.types import Clock, EndpointId
from kvproxy.cluster.routing.costs import own_s
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.waiting_lines import EPOCH_S, LEVEL_S, TenantTurns, engine_priority, urgency_s
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, EnginePriorityMode, PriorityOrder
from kvproxy.features.priority.priority_trial import PriorityPayoff, PriorityTrial, Verdict

#: Requests without a first token from which a request takes part in the experiment, itself among them.
_PENDING = 4
#: Least number of waiting requests that can be ordered; after this long without, no request waits in an engine.
_WAITING = 2
_NOTHING_WAITS_S = 60.0
#: When an engine that ignored the number is tried again: requests may have waited in front of its scheduler.
_ASK_AGAIN_S = 1800.0


def utc_seconds() -> float:
    """Wall-clock seconds since 1970."""
    return datetime.now(UTC).timestamp()


class PriorityState(StrEnum):
    """Findings about one engine; a metric label."""

    UNKNOWN = "unknown"  # not enough waited in it yet to see an effect
    OBEYS = "obeys"
    IGNORES = "ignores"  # it accepts the number and orders by something else
    REFUSED = "refused"  # it answered with an error that names the field
    DOES_NOT_PAY = "does_not_pay"  # it obeys, and p99 was measured to pay more than the mean gains


class EndpointPriority:
    """One engine: whether it is sent the number, and the experiment that reports whether it heeds it."""

    __slots__ = ("_ignored_at", "_load", "_payoff", "_refused", "_rng", "_trial", "_waited_at", "mode", "off", "order")

    def __init__(
        self,
        settings: EndpointSettings,
        cluster: ClusterSettings,
        *,
        load: EndpointLoad,
        payoff: PriorityPayoff,
        rng: random.Random,
    ) -> None:
        self._load = load
        self._payoff = payoff  # of all engines of the cluster
        self._rng = rng
        self._waited_at = -math.inf  # when its own count last had several waiting
        self._trial = PriorityTrial(rng)
        self._ignored_at = -math.inf  # time of that verdict
        self.configure(settings, cluster)
        self.forget_verdict()

    def configure(self, settings: EndpointSettings, cluster: ClusterSettings) -> None:
        """Apply the configuration; findings about the engine stay."""
        self.mode = settings.engine_priority or cluster.engine_priority
        self.order = settings.engine_priority_order or cluster.engine_priority_order
        self.off = self.mode is EnginePriorityMode.OFF  # no number is sent and no effect looked for
        if self.off:
            self._trial.drop_pair()

    @property
    def state(self) -> PriorityState:
        """As far as it is known."""
        if self._refused:
            return PriorityState.REFUSED
        verdict = self._trial.verdict
        if verdict is Verdict.OBEYS and self.mode is EnginePriorityMode.AUTO and self._payoff.pays is False:
            return PriorityState.DOES_NOT_PAY
        return PriorityState(verdict)

    def is_in(self, state: PriorityState) -> bool:
        """Return True if the engine gets a priority and is in this state."""
        return not self.off and self.state is state

    def sends(self, now: float) -> bool:
        """Return True if a request placed there now carries the number. With `auto` not if order cannot show, because
        no request waits in the engine by its own count, nor if it has no effect or does not pay."""
        if self.off or self._refused:
            return False
        if self.mode is EnginePriorityMode.ON:
            return True
        verdict = self._trial.verdict
        if not self.waits(now):
            return False
        if verdict is Verdict.IGNORES:
            return now - self._ignored_at >= _ASK_AGAIN_S
        return verdict is Verdict.UNKNOWN or self._payoff.sends_priority(now)

    def waits(self, now: float) -> bool:
        """Return True if several requests waited in the engine recently, or if it does not report that."""
        engine = self._load.engine
        if engine is None or engine.waiting is None:
            return True
        if engine.waiting >= _WAITING:
            self._waited_at = engine.read_at
        return now - self._waited_at < _NOTHING_WAITS_S

    def number(self, urgency: float, request: object, now: float, *, hidden: bool) -> int:
        """Return the number in the engine's order. `request` identifies it in `first_token` and `ended`; the first
        token of a `hidden` one will not be seen."""
        trial = self._trial
        if trial.verdict is Verdict.IGNORES and now - self._ignored_at >= _ASK_AGAIN_S:
            trial = self._trial = PriorityTrial(self._rng)
        unsettled = not hidden and trial.verdict is Verdict.UNKNOWN
        if unsettled and self._load.pending_requests >= _PENDING and self.waits(now):
            urgency = trial.place(request, urgency, now)
        number = engine_priority(urgency)
        return number if self.order is PriorityOrder.LOWEST_FIRST else -number

    def first_token(self, request: object, placed_at: float, now: float) -> None:
        """Record the first token of a request placed on this engine at `placed_at`; not while it is off."""
        verdict = self._trial.verdict
        if verdict is Verdict.UNKNOWN:
            self._trial.first_token(request, now)
            if self._trial.verdict is Verdict.IGNORES:
                self._ignored_at = now
        elif verdict is Verdict.OBEYS and self.mode is EnginePriorityMode.AUTO and self.waits(now):
            self._payoff.observe_wait(placed_at, now - placed_at)

    def forget_request(self, request: object) -> None:
        """Forget a finished request on this engine."""
        self._trial.ended(request)

    def record_refusal(self) -> None:
        """Record that the engine refuses a request with the number, but takes the same one without."""
        self._refused = True

    def forget_verdict(self) -> None:
        """Another process, maybe with other flags: nothing is known of it."""
        self._refused = False
        self._trial = PriorityTrial(self._rng)

    def status(self, now: float) -> dict[str, object] | None:
        """For people; None where it is off."""
        if self.off:
            return None
        trial = self._trial
        return {
            "mode": self.mode.value,
            "order": self.order.value,
            "state": self.state.value,
            "waits": self.waits(now),
            "sends": self.sends(now),
            "pairs": trial.pairs,
            "pairs_in_order": trial.in_order,
            "pays": self._payoff.pays,
            "mean_ratio": self._payoff.mean_ratio,
            "p99_ratio": self._payoff.p99_ratio,
        }


class ClusterPriority:
    """The urgency of one cluster's requests, in seconds: own work at the learned speed, arrival, class and tenant."""

    def __init__(
        self, *, ageing: float, speeds: Callable[[], SpeedModel | None], clock: Clock, wall_clock: Clock = utc_seconds
    ) -> None:
        self.ageing = ageing
        self._speeds = speeds
        self.clock = clock
        self._wall_clock = wall_clock
        self._turns = TenantTurns()
        self.payoff = PriorityPayoff()

    def urgency_s(
        self,
        facts: OverlapFacts,
        endpoint: EndpointId,
        *,
        received_at: float,
        now: float,
        level: int = 0,
        tenant: str = "",
        endpoints: int = 1,
    ) -> float:
        """Of a request that was received at that time of the clock and goes to `endpoint`, one of so many; the work is
        counted as granted to its tenant. `level`: of its class, larger first."""
        speeds = self._speeds()
        own = 0.0
        slowness = 1.0
        if speeds is not None:
            own = own_s(facts, endpoint, speeds)
            slowness = speeds.slowness(endpoint, now)
        class_s = level * LEVEL_S
        if tenant:
            class_s -= self._turns.behind_s(tenant, endpoints, now)
            self._turns.grant_work(tenant, own, now)
        arrived = self._wall_clock() - EPOCH_S - (now - received_at)
        return urgency_s(own, arrived, slowness=slowness, ageing=self.ageing, class_s=class_s)
