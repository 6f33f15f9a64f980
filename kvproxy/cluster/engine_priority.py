"""The number by which engines admit what waits in them: which requests carry one, and what each engine makes of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum

from kvproxy.config.cluster_schema import ClusterSettings, EndpointSettings, EnginePriorityMode, PriorityOrder
from kvproxy.routing.costs import own_s
from kvproxy.routing.engine_priority import EPOCH_S, LEVEL_S, engine_priority, urgency_s
from kvproxy.routing.policy import OverlapFacts
from kvproxy.routing.priority_trial import PriorityTrial, Verdict
from kvproxy.routing.speeds import SpeedModel
from kvproxy.routing.tenant_turns import TenantTurns
from kvproxy.types import Clock, EndpointId

log = logging.getLogger(__name__)

#: A request takes part in the experiment where so many wait for their first token, itself among them.
_WAITING = 4


def utc_seconds() -> float:
    """Wall-clock seconds since 1970."""
    return datetime.now(UTC).timestamp()


class PriorityState(StrEnum):
    """What is known of one engine; a metric label."""

    UNKNOWN = "unknown"  # it is sent the number, and not enough waited in it yet to see an effect
    OBEYS = "obeys"
    IGNORES = "ignores"  # it accepts the number and orders by something else
    REFUSED = "refused"  # it answered with an error that names the field


class EndpointPriority:
    """One engine: whether it is sent the number, and the experiment that tells whether it heeds it."""

    __slots__ = ("_cluster", "_refused", "_rng", "_settings", "_trial", "mode", "order")

    def __init__(self, settings: EndpointSettings, cluster: ClusterSettings, *, rng: random.Random) -> None:
        self._rng = rng
        self._cluster = cluster
        self.configure(settings)
        self.restarted()

    def configure(self, settings: EndpointSettings) -> None:
        """Take over what the configuration says of this engine; what is known of it stays."""
        self._settings = settings
        self.reconfigure(self._cluster)

    def reconfigure(self, cluster: ClusterSettings) -> None:
        """The same for what is said of all of them."""
        self._cluster = cluster
        self.mode = self._settings.engine_priority or cluster.engine_priority
        self.order = self._settings.engine_priority_order or cluster.engine_priority_order

    @property
    def off(self) -> bool:
        """Nothing is sent and nothing is looked for."""
        return self.mode is EnginePriorityMode.OFF

    @property
    def state(self) -> PriorityState:
        """As far as it is known."""
        return PriorityState.REFUSED if self._refused else PriorityState(self._trial.verdict)

    @property
    def sends(self) -> bool:
        """Whether a request that goes there now carries the number."""
        if self.off or self._refused:
            return False
        return self.mode is EnginePriorityMode.ON or self._trial.verdict is not Verdict.IGNORES

    def number(self, urgency: float, request: object, *, waiting: int) -> int:
        """As the engine takes it. `request` is what `first_token` and `ended` will be told; `waiting` requests are
        there without a first token."""
        trial = self._trial
        if waiting >= _WAITING and trial.verdict is Verdict.UNKNOWN:
            urgency = trial.place(request, urgency)
        number = engine_priority(urgency)
        return number if self.order is PriorityOrder.LOWEST_FIRST else -number

    def first_token(self, request: object, now: float) -> None:
        """A request on this engine got its first token."""
        if not self.off and self._trial.verdict is Verdict.UNKNOWN:
            self._trial.first_token(request, now)

    def ended(self, request: object) -> None:
        """A request on this engine is over."""
        self._trial.ended(request)

    def refused(self) -> None:
        """The engine takes no request with the number, and the same request without."""
        self._refused = True

    def restarted(self) -> None:
        """Another process, maybe with other flags: nothing is known of it."""
        self._refused = False
        self._trial = PriorityTrial(self._rng)

    def status(self) -> dict[str, object] | None:
        """For people; None where it is off."""
        if self.off:
            return None
        trial = self._trial
        return {
            "mode": self.mode.value,
            "order": self.order.value,
            "state": self.state.value,
            "sends": self.sends,
            "pairs": trial.pairs,
            "pairs_in_order": trial.in_order,
        }


class ClusterPriority:
    """The urgency of one cluster's requests, in seconds: own work at the learned speed, arrival, class and tenant."""

    def __init__(
        self, *, ageing: float, speeds: Callable[[], SpeedModel | None], clock: Clock, wall_clock: Clock = utc_seconds
    ) -> None:
        self.ageing = ageing
        self._speeds = speeds
        self._clock = clock
        self._wall_clock = wall_clock
        self._turns = TenantTurns()

    def urgency_s(
        self,
        facts: OverlapFacts,
        endpoint: EndpointId,
        *,
        received_at: float,
        level: int = 0,
        tenant: str = "",
        endpoints: int = 1,
    ) -> float:
        """Of a request that was received at that time of the clock and goes to `endpoint`, one of so many; the work is
        counted as granted to its tenant. `level`: of its class, larger first."""
        now, speeds = self._clock(), self._speeds()
        own, slowness = 0.0, 1.0
        if speeds is not None:
            own, slowness = own_s(facts, endpoint, speeds.seconds), speeds.slowness(endpoint, now)
        class_s = level * LEVEL_S
        if tenant:
            class_s -= self._turns.behind_s(tenant, endpoints, now)
            self._turns.grant(tenant, own, now)
        arrived = self._wall_clock() - EPOCH_S - (now - received_at)
        return urgency_s(own, arrived, slowness=slowness, ageing=self.ageing, class_s=class_s)
