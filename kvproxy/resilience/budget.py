"""A retry budget: retries are a share of recent requests, so that an outage is not multiplied. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class _Slot:
    """What happened in one slice of the window."""

    index: int  # which slice of time
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """Allows `share` of the requests of the last `window_s` seconds, plus `min_per_second`, to be retried.

    The window slides in `slots` steps and holds that many numbers, whatever the traffic. `now` is monotonic seconds;
    a `now` before the latest seen one counts as that one.
    """

    def __init__(self, *, share: float, min_per_second: float, window_s: float = 10.0, slots: int = 10) -> None:
        self._share = share
        self._reserve = min_per_second * window_s
        self._slot_s = window_s / slots
        self._slots = slots
        self._window: deque[_Slot] = deque()
        self._requests = 0
        self._retries = 0
        self.began = self.made = 0  # requests and retries so far, for those that share the budget

    def request(self, now: float) -> None:
        """A request began (its first attempt, not its retries)."""
        window = self._window
        if window and int(now / self._slot_s) <= window[-1].index:
            window[-1].requests += 1
        else:
            self._slot(now).requests += 1
        self._requests += 1
        self.began += 1

    def withdraw(self, now: float) -> bool:
        """Take one retry out of the budget; False when it is spent."""
        slot = self._slot(now)
        if self._retries + 1 > self._share * self._requests + self._reserve:
            return False
        slot.retries += 1
        self._retries += 1
        self.made += 1
        return True

    def share(self, requests: int, retries: int, now: float) -> None:
        """Another proxy with the same budget began so many requests, and made so many retries."""
        slot = self._slot(now)
        slot.requests += requests
        slot.retries += retries
        self._requests += requests
        self._retries += retries

    def balance(self, now: float) -> int:
        """Retries that would be allowed now; shown in status."""
        self._slot(now)
        return max(0, math.floor(self._share * self._requests + self._reserve) - self._retries)

    def _slot(self, now: float) -> _Slot:
        window = self._window
        index = int(now / self._slot_s)
        if window and index <= window[-1].index:
            return window[-1]
        while window and window[0].index <= index - self._slots:
            old = window.popleft()
            self._requests -= old.requests
            self._retries -= old.retries
        slot = _Slot(index)
        window.append(slot)
        return slot
