"""Who is told of a cluster's decisions as they are made, before the reservation changes the loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvproxy.cluster.endpoint import Endpoint
from kvproxy.routing.policy import PickRequest
from kvproxy.routing.speeds import SpeedModel


class Sight(msgspec.Struct, frozen=True):
    """One decision as it is made. The loads are those of `candidates`, at this moment and no longer."""

    request: PickRequest
    candidates: Sequence[Endpoint]
    chosen: Endpoint
    reason: str
    preference: str | None
    costs: Sequence[float]  # by candidate; () from policies that know none
    policy: str
    speeds: SpeedModel | None  # learned in this cluster, if something learns them


class Witness(Protocol):
    """Told of every placement of one request. Must not wait or raise."""

    def placed(self, sight: Sight, now: float) -> None: ...

    def refused(self, reason: str, now: float) -> None:
        """Nobody may take the request."""
        ...

    def failed(self, reason: str) -> None:
        """The attempt placed last failed before anything was sent to the client."""
        ...
