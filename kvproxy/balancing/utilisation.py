"""How busy a pool is with prefill, by what is routed to it."""

from __future__ import annotations


class Utilisation:
    """Prefill seconds routed per endpoint-second, over the last `window_s` (half is believed before that is known)."""

    def __init__(self, *, window_s: float = 20.0, ceiling: float = 0.9, prior: float = 0.5) -> None:
        self._window_s = window_s
        self._ceiling = ceiling
        self._prior = prior
        self._started_at: float | None = None
        self._current = 0.0  # endpoint-shares of work in the window under way
        self._previous = 0.0  # and in the one before it

    def add(self, work_s: float, endpoints: int, now: float) -> None:
        """`work_s` seconds of prefill were routed to one of `endpoints`."""
        self._roll(now)
        self._current += work_s / endpoints

    def rho(self, now: float) -> float:
        """Share of the pool's time that is prefill, at most the ceiling."""
        started_at = self._roll(now)
        share = (now - started_at) / self._window_s
        return min(self._ceiling, (self._previous * (1.0 - share) + self._current) / self._window_s)

    def _roll(self, now: float) -> float:
        """Moves the window to `now`; its start."""
        if self._started_at is None:
            self._started_at, self._previous = now, self._prior * self._window_s
        elapsed = now - self._started_at
        if elapsed < self._window_s:
            return self._started_at
        self._previous = self._current if elapsed < 2 * self._window_s else 0.0
        self._current = 0.0
        self._started_at += self._window_s * (elapsed // self._window_s)
        return self._started_at
