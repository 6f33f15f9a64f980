"""How busy a pool is with prefill, and how often it is asked, by what is routed to it."""

from __future__ import annotations


class Utilisation:
    """Prefill seconds and requests routed per endpoint-second, over the last `window_s`. Before that is known half of
    the time and no request are believed."""

    def __init__(self, *, window_s: float = 20.0, ceiling: float = 0.9, prior: float = 0.5) -> None:
        self._window_s = window_s
        self._ceiling = ceiling
        self._prior = prior
        self._started_at: float | None = None
        self._current = 0.0  # endpoint-shares of work in the window under way
        self._previous = 0.0  # and in the one before it
        self._arrived = 0.0  # endpoint-shares of requests in the window under way
        self._arrived_before = 0.0

    def add(self, work_s: float, endpoints: int, now: float) -> None:
        """`work_s` seconds of prefill were routed to one of `endpoints`."""
        self._roll(now)
        self._current += work_s / endpoints
        self._arrived += 1.0 / endpoints

    def rho(self, now: float) -> float:
        """Share of the pool's time that is prefill, at most the ceiling."""
        return min(self._ceiling, self._rate(self._roll(now), self._previous, self._current, now))

    def arrivals_per_s(self, now: float) -> float:
        """Requests a second for each endpoint."""
        return self._rate(self._roll(now), self._arrived_before, self._arrived, now)

    def _rate(self, started_at: float, before: float, current: float, now: float) -> float:
        """Per second, over the window under way and the rest of the one before it."""
        share = (now - started_at) / self._window_s
        return (before * (1.0 - share) + current) / self._window_s

    def _roll(self, now: float) -> float:
        """Moves the window to `now`; its start."""
        if self._started_at is None:
            self._started_at, self._previous = now, self._prior * self._window_s
        elapsed = now - self._started_at
        if elapsed < self._window_s:
            return self._started_at
        recent = elapsed < 2 * self._window_s
        self._previous, self._arrived_before = (self._current, self._arrived) if recent else (0.0, 0.0)
        self._current = self._arrived = 0.0
        self._started_at += self._window_s * (elapsed // self._window_s)
        return self._started_at
