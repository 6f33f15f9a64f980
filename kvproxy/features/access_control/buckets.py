"""The token buckets of one `rate_limit`, by what a request counts for; they outlive the filter at a reload."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from kvproxy.base.bounded import BoundedMapping

#: Upper bound of a bucket's debt, as a multiple of its size.
MAX_DEBT = 5.0


class TokenBucket:
    """Fills at `rate_per_s` up to `capacity`; a charge may take it below zero, into debt."""

    __slots__ = ("_at", "_level", "capacity", "on_charge", "rate_per_s")

    def __init__(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        self.rate_per_s = rate_per_s
        self.capacity = capacity
        self._level = capacity
        self._at = now
        #: Called with each charge if others share the bucket; returns the amount to charge.
        self.on_charge: Callable[[float], float] | None = None

    def level(self, now: float) -> float:
        """Return what it holds; negative in debt."""
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) * self.rate_per_s)
            self._at = now
        return self._level

    def resize(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        """Another rate and size from now on, as full as before; a debt grows and shrinks with the size as well."""
        self._level = self.level(now) * (capacity / self.capacity)
        self.rate_per_s = rate_per_s
        self.capacity = capacity

    def charge(self, amount: float, now: float) -> None:
        """Take `amount`, whatever is there, as far as debts go."""
        if self.on_charge is not None:
            amount = self.on_charge(amount)
        self.take(amount, now)

    def take(self, amount: float, now: float) -> None:
        """As `charge`, of what others charged."""
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


class BucketTable(BoundedMapping[str, tuple[tuple[Limit, ...], tuple[TokenBucket, ...]]]):
    """Every key's buckets with the limits they are for, the longest unused first: what outlives a reload."""

    def __init__(self) -> None:
        super().__init__(sys.maxsize)  # `Buckets` bounds it, by its own settings
        #: Called with the key, the kind and the amount of each charge; returns the amount to charge.
        self.watch: Callable[[str, str, float], float] | None = None
        self.present: Buckets | None = None  # the current limits, once they are in use

    def take(self, key: str, kind: str, amount: float, now: float) -> None:
        """Another proxy charged so much to this key's bucket."""
        for bucket in self._shared(key, kind, now):
            bucket.take(amount, now)

    def take_until(self, key: str, kind: str, missing: float, now: float) -> None:
        """At another proxy so much is missing in this key's bucket. Here it is once, however often that is reported."""
        for bucket in self._shared(key, kind, now):
            bucket.take(missing - (bucket.capacity - bucket.level(now)), now)

    def _shared(self, key: str, kind: str, now: float) -> list[TokenBucket]:
        if self.present is None:
            return []
        pairs = zip(self.present.limits, self.present.of(key, now), strict=True)
        return [bucket for limit, bucket in pairs if limit.kind == kind]

    def missing(self, now: float) -> Iterator[tuple[str, str, float]]:
        """Key, kind and what is missing in each bucket that is not full. Not to be changed meanwhile."""
        for key, (limits, buckets) in [*self.items()]:
            for limit, bucket in zip(limits, buckets, strict=True):
                if (missing := bucket.capacity - bucket.level(now)) > 0.0:
                    yield key, limit.kind, missing


class Buckets:
    """One bucket per limit for each of at most `max_keys` keys; the longest unused is dropped first.

    Buckets in the `table` for other limits are converted when their key comes next, each as full (or as deep in debt)
    as it was for its size. They are the same objects, so that requests which began under the other limits are charged
    here too. A limit that had no bucket starts full."""

    def __init__(self, limits: tuple[Limit, ...], max_keys: int, table: BucketTable) -> None:
        self.limits = limits
        self.max_keys = max_keys
        self._table = table

    def __len__(self) -> int:
        """Keys that have buckets."""
        return len(self._table)

    def serve(self) -> None:
        """Make these limits those of the table."""
        self._table.present = self

    def of(self, key: str, now: float) -> tuple[TokenBucket, ...]:
        """Return a key's buckets, one a limit."""
        limits, buckets = self._table.get(key, ((), ()))
        if limits is not self.limits:
            known = {limit.kind: bucket for limit, bucket in zip(limits, buckets, strict=True)}
            buckets = tuple(_bucket(limit, known.get(limit.kind), now) for limit in self.limits)
            if (watch := self._table.watch) is not None:
                for limit, bucket in zip(self.limits, buckets, strict=True):
                    bucket.on_charge = partial(watch, key, limit.kind)
            self._table[key] = (self.limits, buckets)
            while len(self._table) > self.max_keys:
                self._table.popitem()
        return buckets


def _bucket(limit: Limit, known: TokenBucket | None, now: float) -> TokenBucket:
    if known is None:
        return TokenBucket(rate_per_s=limit.rate_per_s, capacity=limit.capacity, now=now)
    known.resize(rate_per_s=limit.rate_per_s, capacity=limit.capacity, now=now)
    return known
