"""Whether there is a waiting room in front of a cluster, through all the settings that the cluster may get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvproxy.cluster.pick import Pick
from kvproxy.cluster.router_queue import RouterQueue
from kvproxy.config.cluster_schema import RouterQueueSettings
from kvproxy.metrics.catalog import Metrics
from kvproxy.routing.forecast import Forecaster
from kvproxy.routing.policy import Candidate, PickRequest, Policy
from kvproxy.types import Clock


class Reception:
    """Opens the room, changes it while requests wait in it, and closes it; `candidates`, `pick` as in RouterQueue."""

    def __init__(
        self,
        cluster: str,
        *,
        candidates: Callable[[str, float], Sequence[Candidate]],
        pick: Callable[[PickRequest, float], Pick | None],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._candidates = candidates
        self._pick = pick
        self._metrics = metrics
        self._clock = clock

    def arrange(self, room: RouterQueue | None, settings: RouterQueueSettings, policy: Policy) -> RouterQueue | None:
        """The room from now on, None where nobody is to wait. `room` is the one before: it goes on with whoever waits,
        or places everybody at once."""
        if not (settings.enabled and isinstance(policy, Forecaster)):
            if room is not None:
                room.close()
            return None
        if room is not None:
            room.reconfigure(settings, policy)
            return room
        return RouterQueue(
            settings,
            policy,
            cluster=self._cluster,
            candidates=self._candidates,
            pick=self._pick,
            metrics=self._metrics,
            clock=self._clock,
        )
