"""The load ledger of one endpoint: counted by reservation, never guessed. Pure; the time is an argument.

Besides the counts it closes the samples a speed model learns from (design: every group of first tokens is one
sample "busy seconds against features", so queueing stands on both sides of the equation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: (requests, sum u, sum u*(c+u/2)) for u uncached tokens after c cached ones: what prefill time is linear in.
Features = tuple[float, float, float]

#: Receives one closed sample: the work, the busy seconds it took, and now.
OnSample = Callable[[Features, float, float], None]


@dataclass(slots=True, eq=False)
class Reservation:
    """One request's share of an endpoint's load. Settled exactly once, on every exit."""

    uncached_tokens: int
    cached_tokens: int
    started_at: float
    first_token_at: float | None = None
    released: bool = False

    @property
    def features(self) -> Features:
        """This request's prefill work."""
        u = float(self.uncached_tokens)
        return (1.0, u, u * (self.cached_tokens + u * 0.5))


class EndpointLoad:
    """What is in flight on one endpoint."""

    __slots__ = ("_pending", "in_flight", "pending_tokens", "resident_tokens")

    def __init__(self) -> None:
        self.in_flight = 0
        self.pending_tokens = 0  # uncached prompt tokens of requests without a first token
        self.resident_tokens = 0  # prompt tokens of live sequences
        self._pending: dict[Reservation, Features] = {}

    def reserve(self, uncached_tokens: int, cached_tokens: int, now: float) -> Reservation:
        """Count a request in, in the same step as the pick."""
        reservation = Reservation(uncached_tokens, cached_tokens, now)
        self.in_flight += 1
        self.pending_tokens += uncached_tokens
        self.resident_tokens += uncached_tokens + cached_tokens
        self._pending[reservation] = reservation.features
        return reservation

    def first_token(self, reservation: Reservation, now: float) -> None:
        """The engine finished this request's prefill."""
        if self._pending.pop(reservation, None) is not None:
            self.pending_tokens -= reservation.uncached_tokens
            reservation.first_token_at = now

    def release(self, reservation: Reservation, now: float) -> None:
        """Count a request out: finished, failed or cancelled. Idempotent."""
        if reservation.released:
            return
        reservation.released = True
        if self._pending.pop(reservation, None) is not None:
            self.pending_tokens -= reservation.uncached_tokens
        self.in_flight -= 1
        self.resident_tokens -= reservation.uncached_tokens + reservation.cached_tokens
