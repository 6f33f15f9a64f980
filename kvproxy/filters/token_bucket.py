"""Token buckets: pure arithmetic, the time is an argument."""

from __future__ import annotations

#: A bucket goes no deeper into debt than so many times what it holds.
MAX_DEBT = 5.0


class TokenBucket:
    """Fills at `rate_per_s` up to `capacity`; a charge may take it below zero, into debt."""

    __slots__ = ("_at", "_level", "capacity", "rate_per_s")

    def __init__(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        self.rate_per_s = rate_per_s
        self.capacity = capacity
        self._level = capacity
        self._at = now

    def level(self, now: float) -> float:
        """What it holds; negative in debt."""
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) * self.rate_per_s)
            self._at = now
        return self._level

    def resize(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        """Another rate and size from now on, as full as before; a debt grows and shrinks with the size as well."""
        self._level = self.level(now) * (capacity / self.capacity)
        self.rate_per_s, self.capacity = rate_per_s, capacity

    def charge(self, amount: float, now: float) -> None:
        """Take `amount`, whatever is there, as far as debts go."""
        self._level = max(self.level(now) - max(0.0, amount), -MAX_DEBT * self.capacity)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until it holds `amount`; 0 when it does already."""
        return max(0.0, (min(amount, self.capacity) - self.level(now)) / self.rate_per_s)
