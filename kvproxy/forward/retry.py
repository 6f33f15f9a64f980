"""Where a request's next attempt goes, and after what pause. Decides only; nothing here waits or sends."""

from __future__ import annotations

import random

from kvproxy.cluster.endpoint import Endpoint
from kvproxy.config.schema import RetrySettings
from kvproxy.resilience.retry import full_jitter_s
from kvproxy.types import EndpointId


class Attempts:
    """The history of one request's attempts.

    An endpoint may ask for several attempts on itself (its own `retry`); then every other engine is tried once, since
    the ranks of one fail together; after such a round all are eligible again.
    """

    __slots__ = ("_in_a_row", "_retry", "_rng", "_rounds", "_tried", "again")

    def __init__(self, retry: RetrySettings, *, rng: random.Random) -> None:
        self._retry = retry
        self._rng = rng
        self._tried: set[EndpointId] = set()
        self._rounds = 0
        self._in_a_row = 0
        self.again: EndpointId | None = None  # the endpoint whose own retry is next

    @property
    def excluded(self) -> frozenset[EndpointId]:
        """Endpoints tried in this round."""
        return frozenset(self._tried)

    def failed(self, endpoint: Endpoint) -> float | None:
        """Seconds to pause before the next attempt; None when this endpoint's failure is to be the answer."""
        own = endpoint.retry
        self._in_a_row += 1
        if own is not None and self._in_a_row < own.attempts:
            self.again = endpoint.id
            return min(own.max_backoff, own.backoff * own.multiplier ** (self._in_a_row - 1))
        self.again = None
        self._in_a_row = 0
        self._tried.add(endpoint.id)
        self._tried.update(endpoint.engine.members)
        return 0.0 if own is None or own.fallback else None

    def next_round(self) -> float | None:
        """All endpoints were tried: seconds to pause (full jitter) until all are eligible again, None if they are."""
        if not self._tried:
            return None
        self._tried.clear()
        self._rounds += 1
        retry = self._retry
        return full_jitter_s(self._rounds, base_s=retry.backoff, max_s=retry.max_backoff, rng=self._rng)
