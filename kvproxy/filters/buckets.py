"""The token buckets of one `rate_limit`, by what a request counts for; they outlive the filter at a reload."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from kvproxy.bounded import BoundedMapping

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


@dataclass(frozen=True, slots=True)
class Limit:
    """One limited thing: `kind` names it in headers, errors and metrics."""

    kind: str
    per_minute: float
    burst_minutes: float

    @property
    def rate_per_s(self) -> float:
        """How fast a bucket fills."""
        return self.per_minute / 60.0

    @property
    def capacity(self) -> float:
        """A bucket holds at least one unit, or no request would ever be let in."""
        return max(1.0, self.per_minute * self.burst_minutes)


class Buckets:
    """A bucket a limit for each of at most `max_keys` keys; the longest unused goes first.

    Made after a `former` one with other limits it takes over a key's buckets of that moment when the key comes next,
    each as full (or as deep in debt) as it was for its size. They are the same objects, so that requests which began
    under the former limits are charged here too. A limit the former had not starts full.
    """

    def __init__(self, limits: tuple[Limit, ...], max_keys: int, *, former: Buckets | None = None) -> None:
        self.limits = limits
        self.max_keys = max_keys
        self._held = BoundedMapping[str, tuple[TokenBucket, ...]](max_keys)
        self._before: dict[str, dict[str, TokenBucket]] = {} if former is None else former._known()

    def __len__(self) -> int:
        """Keys that have buckets."""
        return len(self._held)

    def same(self, limits: tuple[Limit, ...], max_keys: int) -> bool:
        """Whether these would be the same buckets."""
        return (limits, max_keys) == (self.limits, self.max_keys)

    def of(self, key: str, now: float) -> tuple[TokenBucket, ...]:
        """A key's buckets, one a limit."""
        try:
            return self._held[key]
        except KeyError:
            buckets = self._held[key] = self._made(key, now)
            return buckets

    def _made(self, key: str, now: float) -> tuple[TokenBucket, ...]:
        known = self._before.pop(key, {})
        return tuple(_bucket(limit, known.get(limit.kind), now) for limit in self.limits)

    def _known(self) -> dict[str, dict[str, TokenBucket]]:
        """Every key's buckets by what they limit, the present ones and as many earlier ones as there is room for."""
        kinds = [limit.kind for limit in self.limits]
        held = {key: dict(zip(kinds, buckets, strict=True)) for key, buckets in self._held.items()}
        room = self.max_keys - len(held)
        return {**dict(islice(self._before.items(), room)), **held}


def _bucket(limit: Limit, known: TokenBucket | None, now: float) -> TokenBucket:
    if known is None:
        return TokenBucket(rate_per_s=limit.rate_per_s, capacity=limit.capacity, now=now)
    known.resize(rate_per_s=limit.rate_per_s, capacity=limit.capacity, now=now)
    return known
