"""A rule by which requests wait for room in the engines' memory, beside their load."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import Candidate, OverlapFacts, PickRequest
from kvproxy.cluster.routing.speeds import SpeedModel


class Stay(Protocol):
    """One placed request, as the rule counts it until its end."""

    #: The client ends its session with this request.
    last: bool
    #: The answer calls a tool, or that is not known: agents stop with one that calls none.
    calls_tool: bool

    @property
    def note(self) -> tuple[str, object] | None:
        """Return its note for the outcome of the request, by name; None: it has none."""
        ...

    def end(self, now: float, *, served: bool) -> None:
        """Note its end; `served` is false where the client left or the engine failed."""
        ...


class RoomWait(Protocol):
    """A request that waits in the router queue: for room, or for its turn alone."""

    def has_room(self, candidates: Sequence[Candidate], now: float) -> bool:
        """Return whether one of these endpoints has room for it. The first of a line keeps the room that is left."""
        ...

    def over(self, now: float) -> None:
        """Note that it waits no longer, for whatever reason."""
        ...


class Admission(Protocol):
    """Rule of one cluster. Called in the turn of the decision: no wait."""

    #: The policy's, which its router sets; None: it learns none.
    speeds: SpeedModel | None
    #: Endpoints whose room another router keeps for a session that waits there; the exchange changes it.
    kept_elsewhere: set[EndpointId]

    def restrict(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> PickRequest:
        """Return the request without the endpoints that have no room for it; if none has, it `waits_for_room`."""
        ...

    def place(self, request: PickRequest, endpoint: EndpointId, now: float) -> Stay | None:
        """Count a placed request; None: it takes no room that counts."""
        ...

    def placed_elsewhere(self, turn: Hashable, facts: OverlapFacts, endpoint: EndpointId, now: float) -> None:
        """Count a request that another router placed; `turn` names it until its end."""
        ...

    def ended_elsewhere(self, turn: Hashable, now: float, *, served: bool, calls_tool: bool) -> None:
        """Note its end, as of Stay; not `served` if it was the session's last, too. Harmless for an unknown one."""
        ...

    def wait(self, request: PickRequest, now: float) -> RoomWait:
        """Count a request that begins to wait in the router queue: for room if it `waits_for_room`."""
        ...

    def retry_after_s(self, request: PickRequest, max_wait_s: float, now: float) -> float | None:
        """Return when a session that cannot begin within `max_wait_s` should come again; None: it may wait."""
        ...

    def next_change_at(self, now: float) -> float:
        """Return when room may appear although no request ends."""
        ...

    def forget(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left, or whose engine lost its memory."""
        ...
