"""Speed samples from first tokens: the work they end, and the busy seconds it took. Pure.

Every group of first tokens is one sample, so that queueing stands on both sides of the equation."""

from __future__ import annotations

from typing import Protocol

from kvproxy.base.types import LowerTokens
from kvproxy.cluster.routing.work import NO_WORK, Features, sum_of

#: First tokens closer together than this left the engine in one step.
GROUP_GAP_S = 0.002


class OnSample(Protocol):
    """Receives one closed sample: the work, the busy seconds it took, now, and the part of the work that was loaded
    from `lower` tiers. `scraped`: by the engine's counters."""

    def __call__(
        self, work: Features, busy_s: float, now: float, *, lower: LowerTokens = (), scraped: bool = False
    ) -> None: ...


#: Work, the busy seconds of its prefill, and the loaded part of it, tier by tier in order of arrival.
Sample = tuple[Features, float, LowerTokens]


class OpenSample:
    """The one that first tokens still join. `ended_at`: the latest of them, or when its work began."""

    __slots__ = ("_began_at", "_done", "_doubtful", "_lower", "_presumed", "ended_at")

    def __init__(self) -> None:
        self.begin(0.0)

    def begin(self, at: float) -> None:
        """Start over: the engine has begun other work, so earlier data is dropped."""
        self._began_at = self.ended_at = at
        self._done = self._presumed = NO_WORK  # presumed: since the last first token, it joins with the next one
        self._lower: LowerTokens = ()
        self._doubtful = False

    def presume(self, work: Features) -> None:
        """Add work that was prefilled at an unknown time."""
        self._presumed = sum_of(self._presumed, work)

    def doubt(self) -> None:
        """Mark the sample as spoiled by an unknown prompt: the next first token ends no sample."""
        self._doubtful = True

    def is_over(self, now: float) -> bool:
        """Return True if a first token at this time belongs to the next sample."""
        return self.ended_at > self._began_at and now - self.ended_at > GROUP_GAP_S

    def join(self, work: Features, lower: LowerTokens, now: float) -> None:
        """Add the work of a request whose first token came."""
        if self._doubtful:
            self.begin(now)
            return
        for more in (self._presumed, self._done):
            if more is not NO_WORK:
                work = sum_of(more, work)
        self._done = work
        self._presumed = NO_WORK
        if lower:
            self._lower += lower
        self.ended_at = now

    def close(self) -> Sample | None:
        """Return what there is until its end, from which the next one begins; None if that took no time."""
        ended_at = self.ended_at
        busy_s = self.ended_at - self._began_at
        sample = (self._done, busy_s, self._lower) if busy_s > 0.0 else None
        self._began_at = ended_at
        self._done = NO_WORK
        self._lower = ()
        return sample
