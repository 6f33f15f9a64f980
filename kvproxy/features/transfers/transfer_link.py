"""Limits of transfers on the link between instances, and its measured speed."""

from __future__ import annotations

import math

from kvproxy.base.types import Clock
from kvproxy.features.transfers.settings import TransferSettings

#: Weight of a new transfer's speed against earlier ones, and how long speeds are valid.
_NEW = 0.3
SPEED_AGE_S = 60.0


class Link:
    """Concurrency and bandwidth limits for transfers, plus measured throughput."""

    def __init__(self, settings: TransferSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.running = 0
        self._speed = 0.0
        self._seen_at = -math.inf
        self._budget = float(settings.tokens_per_second)
        self._refilled_at = clock()

    @property
    def tokens_per_s(self) -> float:
        """Of one transfer; 0: none was seen lately."""
        return self._speed if self._clock() - self._seen_at <= SPEED_AGE_S else 0.0

    def why_refused(self, tokens: int, compute_s: float) -> str:
        """Why so many tokens, which take so long to compute, are not transferred now (a metric label); "": they may."""
        now = self._clock()
        most = float(self._settings.tokens_per_second)
        self._budget = min(most, self._budget + most * (now - self._refilled_at))
        self._refilled_at = now
        if self.running >= self._settings.at_once:
            return "busy"
        if min(tokens, most) > self._budget:
            return "budget"
        return "slow" if tokens / (self.tokens_per_s or math.inf) > compute_s else ""

    def begin(self, tokens: int) -> None:
        """Begin a transfer of `tokens`."""
        self.running += 1
        self._budget -= tokens

    def end(self, tokens: int, seconds: float) -> None:
        """End a transfer that brought `tokens`."""
        self.running -= 1
        if tokens and seconds > 0.0:
            seen = tokens / seconds
            speed = self.tokens_per_s
            self._speed, self._seen_at = speed + _NEW * (seen - speed) if speed else seen, self._clock()
