"""When an engine lost what it held in its cache, and how that was noticed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock, EndpointId

#: So long afterwards a loss is what requests that find nothing have to do with.
RECENT_S = 60.0


class LossReason(StrEnum):
    """How a loss was noticed; a metric label."""

    RESTARTED = "restarted"  # another process answers, or its counters began again
    CLEARED = "cleared"  # its KV events say so: `/reset_prefix_cache`, `/flush_cache`, an update of its weights
    FORGOT = "forgot"  # it reused nothing of what it was sent just now
    ASLEEP = "asleep"  # it sleeps, which gives its KV memory up


@dataclass(frozen=True, slots=True)
class Loss:
    """The latest one of an endpoint."""

    reason: LossReason
    age_s: float


class CacheLosses:
    """Bounded by the endpoints there are: `keep` forgets the others, and their series."""

    def __init__(self, metrics: Metrics, *, clock: Clock) -> None:
        self._counter = metrics.endpoint.cache_losses
        self._clock = clock
        self._latest: dict[tuple[str, EndpointId], tuple[LossReason, float]] = {}

    def note(self, cluster: str, endpoint: EndpointId, reason: LossReason) -> None:
        """The endpoint lost all that it held."""
        if (cluster, endpoint) not in self._latest:
            for each in LossReason:
                self._counter.labels(cluster, endpoint, each.value)
        self._counter.labels(cluster, endpoint, reason.value).inc()
        self._latest[cluster, endpoint] = (reason, self._clock())

    def latest(self, cluster: str, endpoint: EndpointId) -> Loss | None:
        """The endpoint's last one; None: it lost nothing while it was known."""
        found = self._latest.get((cluster, endpoint))
        return None if found is None else Loss(found[0], self._clock() - found[1])

    def recent(self, cluster: str, endpoint: EndpointId | None) -> str:
        """The reason of a loss a short while ago; "" where there was none."""
        loss = None if endpoint is None else self.latest(cluster, endpoint)
        return loss.reason.value if loss is not None and loss.age_s <= RECENT_S else ""

    def keep(self, present: Collection[tuple[str, EndpointId]]) -> None:
        """Forget all endpoints but these."""
        for cluster, endpoint in self._latest.keys() - set(present):
            del self._latest[cluster, endpoint]
            for reason in LossReason:
                self._counter.remove(cluster, endpoint, reason.value)
