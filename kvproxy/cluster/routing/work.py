"""Prefill work in the features that its time is linear in, and its seconds. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec

from kvproxy.base.types import LowerTokens

#: Float within which sums stay finite, for values from another process.
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]

#: (requests, sum u, sum u*(c+u/2), sum o) for u uncached tokens after c cached ones, and o pooled seconds to load those
#: of them on lower tiers: prefill time is linear in these.
Features = tuple[Finite, Finite, Finite, Finite]

NO_WORK: Features = (0.0, 0.0, 0.0, 0.0)

#: Pending tokens that the engine works on at once, about: a step's token budget.
HEAD_TOKENS = 2048

#: Upper bound on the requests in it, however short they are.
HEAD_REQUESTS = 256

#: Upper bound on the progress of a running step, as a share of its estimate.
MAX_PROGRESS = 0.95

#: A step over this many times its estimate is not the estimated one: the engine does something else, and no pending
#: work counts as done.
OVERDUE = 2.0


class PromptSplit(NamedTuple):
    """A prompt's tokens at one endpoint."""

    uncached_tokens: int  # tokens to be computed
    cached_tokens: int
    lower: LowerTokens = ()  # cached tokens on lower tiers
    onboarding_s: float = 0.0  # time to load these


def features_of(uncached_tokens: float, cached_tokens: float, onboarding_s: float = 0.0) -> Features:
    """Return the prefill work of one request, whose cached tokens are loaded from lower tiers in `onboarding_s`."""
    return (1.0, uncached_tokens, uncached_tokens * (cached_tokens + uncached_tokens * 0.5), onboarding_s)


def prefill_s(uncached_tokens: float, cached_tokens: float, onboarding_s: float, seconds: Features) -> float:
    """Time of one request's prefill: `seconds_of(features_of(...), seconds)`, written out for every pick."""
    request_s, token_s, attention_s, _ = seconds
    own = request_s + uncached_tokens * (token_s + attention_s * (cached_tokens + 0.5 * uncached_tokens))
    return own + onboarding_s


def seconds_of(work: Features, seconds: Features) -> float:
    """Time of `work` when each unit of it takes `seconds`."""
    return work[0] * seconds[0] + work[1] * seconds[1] + work[2] * seconds[2] + work[3] * seconds[3]


def sum_of(a: Features, b: Features) -> Features:
    """Both works together."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])


def head_of(works: Iterable[Features]) -> Features:
    """Return what the engine is at once at work on, of pending work with the oldest first."""
    requests = tokens = attention = lower = 0.0
    for a, b, c, d in works:
        requests = requests + a
        tokens = tokens + b
        attention = attention + c
        lower = lower + d
        if tokens >= HEAD_TOKENS or requests >= HEAD_REQUESTS:
            break
    return (requests, tokens, attention, lower)


def difference(a: Features, b: Features) -> Features:
    """Return the first without the second."""
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3])


class Backlog(msgspec.Struct, frozen=True):
    """Prefill work left at an engine at one moment."""

    work: Features  # all pending work
    head: Features  # the part in progress
    elapsed_s: float  # since that part began, as far as is known

    def wait_s(self, seconds: Features, slowness: float) -> float:
        """Until it would begin with a request placed now; `seconds` and `slowness` as in `EndpointLoad.wait_s`."""
        if self.work is NO_WORK:
            return 0.0
        head_s = seconds_of(self.head, seconds)
        progress = min(MAX_PROGRESS * slowness * head_s, max(0.0, self.elapsed_s))
        if self.elapsed_s > OVERDUE * slowness * head_s:
            progress = 0.0
        return max(0.0, slowness * seconds_of(self.work, seconds) - progress)


IDLE = Backlog(NO_WORK, NO_WORK, 0.0)
