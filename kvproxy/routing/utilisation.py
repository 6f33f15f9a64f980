"""How busy a pool is with prefill, and how often it is asked, by what is routed to it."""

from __future__ import annotations

from typing import NamedTuple


class _Window(NamedTuple):
    """Endpoint-shares of work and of requests in the window under way, and in the one before it."""

    started_at: float
    work: float
    work_before: float
    arrived: float
    arrived_before: float


class Utilisation:
    """Prefill seconds and requests routed per endpoint-second, over the last `window_s`. Before that is known half of
    the time and no request are believed."""

    def __init__(self, *, window_s: float = 20.0, ceiling: float = 0.9, prior: float = 0.5) -> None:
        self._window_s = window_s
        self._ceiling = ceiling
        self._prior = prior
        self._window: _Window | None = None

    def add(self, work_s: float, endpoints: int, now: float) -> None:
        """`work_s` seconds of prefill are routed to one of `endpoints`."""
        started_at, work, work_before, arrived, arrived_before = self._at(now)
        self._window = _Window(
            started_at, work + work_s / endpoints, work_before, arrived + 1.0 / endpoints, arrived_before
        )

    def rho(self, now: float) -> float:
        """Share of the pool's time that is prefill, at most the ceiling."""
        window = self._at(now)
        return min(self._ceiling, self._rate(window.started_at, window.work_before, window.work, now))

    def arrivals_per_s(self, now: float) -> float:
        """Requests a second for each endpoint."""
        window = self._at(now)
        return self._rate(window.started_at, window.arrived_before, window.arrived, now)

    def _rate(self, started_at: float, before: float, current: float, now: float) -> float:
        """Per second, over the window under way and the rest of the one before it."""
        share = (now - started_at) / self._window_s
        return (before * (1.0 - share) + current) / self._window_s

    def _at(self, now: float) -> _Window:
        """The window under way at `now`; the first one begins with the first request."""
        window = self._window
        if window is None:
            return _Window(now, 0.0, self._prior * self._window_s, 0.0, 0.0)
        elapsed = now - window.started_at
        if elapsed < self._window_s:
            return window
        started_at = window.started_at + self._window_s * (elapsed // self._window_s)
        if elapsed < 2 * self._window_s:
            return _Window(started_at, 0.0, window.work, 0.0, window.arrived)
        return _Window(started_at, 0.0, 0.0, 0.0, 0.0)
