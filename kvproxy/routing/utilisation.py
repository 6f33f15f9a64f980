"""How busy a pool is with prefill, and how often it is asked, by what is routed to it."""

from __future__ import annotations


class Utilisation:
    """Prefill seconds and requests routed per endpoint-second, over the last `window_s`. Before that is known half of
    the time and no request are believed."""

    __slots__ = (
        "_arrived",
        "_arrived_before",
        "_ceiling",
        "_prior_work",
        "_started_at",
        "_window_s",
        "_work",
        "_work_before",
    )

    def __init__(self, *, window_s: float = 20.0, ceiling: float = 0.9, prior: float = 0.5) -> None:
        self._window_s = window_s
        self._ceiling = ceiling
        self._prior_work = prior * window_s
        self._started_at: float | None = None  # of the window under way; the first begins with the first request
        self._work = self._work_before = 0.0  # endpoint-shares, in this window and in the one before it
        self._arrived = self._arrived_before = 0.0  # the same of requests

    def add(self, work_s: float, endpoints: int, now: float) -> None:
        """`work_s` seconds of prefill are routed to one of `endpoints`."""
        if self._started_at is None or now - self._started_at >= self._window_s:
            self._started_at, self._work, self._work_before, self._arrived, self._arrived_before = self._at(now)
        self._work += work_s / endpoints
        self._arrived += 1.0 / endpoints

    def rates(self, now: float) -> tuple[float, float]:
        """rho, the share of the pool's time that is prefill, at most the ceiling; and requests a second for each
        endpoint. Both over the window under way and the rest of the one before it."""
        started_at, window_s = self._started_at, self._window_s
        work, work_before, arrived, arrived_before = self._work, self._work_before, self._arrived, self._arrived_before
        if started_at is None or now - started_at >= window_s:
            started_at, work, work_before, arrived, arrived_before = self._at(now)
        rest = 1.0 - (now - started_at) / window_s
        rho = (work_before * rest + work) / window_s
        return min(self._ceiling, rho), (arrived_before * rest + arrived) / window_s

    def _at(self, now: float) -> tuple[float, float, float, float, float]:
        """A window later than the one under way: its start, work and work before, requests and requests before."""
        if self._started_at is None:
            return now, 0.0, self._prior_work, 0.0, 0.0
        elapsed = now - self._started_at
        started_at = self._started_at + self._window_s * (elapsed // self._window_s)
        if elapsed < 2 * self._window_s:
            return started_at, 0.0, self._work, 0.0, self._arrived
        return started_at, 0.0, 0.0, 0.0, 0.0
