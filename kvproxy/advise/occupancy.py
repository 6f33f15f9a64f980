"""How full engines were while requests were recorded: how many answered, how many waited, what they held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvproxy.advise.traffic import RecordedRequest, Traffic
from kvproxy.types import EndpointId

#: Only of streamed answers it is known when they began.
_STREAMED = 0.8
#: Slots bind where a request that begins to answer while others wait makes as many answer as ever: mostly the very
#: number, and else one more or less, since ends are seen a moment late.
_BEGUN, _SAME, _ALIKE = 30, 0.6, 0.9
#: More memory in use than this, and it is memory that is waited for.
_FULL_MEMORY = 0.7


@dataclass(frozen=True, slots=True)
class EngineOccupancy:
    """One engine's."""

    endpoint: EndpointId
    answering: int  # requests past their first token, the most at a time
    waiting_share: float  # of the time in which two or more had none yet
    mean_waiting: float  # of them, in that time
    held_tokens: int  # by answering requests in that time, on average
    begun: tuple[int, ...]  # how many answered after each first token that left others waiting


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Of the engines of one pool; of none where too few answers were streamed."""

    engines: tuple[EngineOccupancy, ...] = ()

    @property
    def answering(self) -> int:
        """The most of any engine."""
        return max((one.answering for one in self.engines), default=0)

    @property
    def held_tokens(self) -> int:
        """Of an engine, on average, while requests waited for each other."""
        return round(sum(one.held_tokens for one in self.engines) / max(1, len(self.engines)))

    @property
    def waiting_share(self) -> float:
        """Of the time, on average."""
        return sum(one.waiting_share for one in self.engines) / max(1, len(self.engines))

    def slots(self, capacity_tokens: int | None) -> int | None:
        """How many sequences engines take at most, where requests waited for one of them to end; else None. One alone
        is not told from requests that end before the next prefill does."""
        begun = [count for one in self.engines for count in one.begun]
        if len(begun) < _BEGUN:
            return None
        usual, times = Counter(begun).most_common(1)[0]
        alike = sum(abs(count - usual) <= 1 for count in begun)
        bound = usual > 1 and times >= _SAME * len(begun) and alike >= _ALIKE * len(begun)
        memory = capacity_tokens is not None and self.held_tokens > _FULL_MEMORY * capacity_tokens
        return usual if bound and not memory else None


NOT_MEASURED = Occupancy()


def measure_occupancy(traffic: Traffic) -> Occupancy:
    """Of every endpoint that answered."""
    streamed = sum(one.first_token_at is not None for one in traffic.requests)
    if streamed < _STREAMED * len(traffic.requests):
        return NOT_MEASURED
    return Occupancy(tuple(_measure(endpoint, own) for endpoint in traffic.endpoints if (own := traffic.on(endpoint))))


def _measure(endpoint: EndpointId, requests: Sequence[RecordedRequest]) -> EngineOccupancy:
    changes = []
    for one in requests:
        first = one.ended_at if one.first_token_at is None else one.first_token_at
        tokens = one.prompt_tokens + (one.output_tokens or 0)
        changes += [(one.arrived_at, 0, 1, 0, 0), (first, 1, -1, 1, tokens), (one.ended_at, 2, 0, -1, -tokens)]
    changes.sort()
    waiting = answering = held = most = 0
    begun, queued_s, waited_s, held_s = [], 0.0, 0.0, 0.0
    for (at, _, more_waiting, more_answering, more_held), (until, *_) in pairwise([*changes, changes[-1]]):
        waiting, answering, held = waiting + more_waiting, answering + more_answering, held + more_held
        most = max(most, answering)
        if more_waiting < 0 and waiting:
            begun.append(answering)
        if waiting >= 2:
            queued_s += until - at
            waited_s += waiting * (until - at)
            held_s += held * (until - at)
    total_s = changes[-1][0] - changes[0][0]
    return EngineOccupancy(
        endpoint,
        answering=most,
        waiting_share=queued_s / total_s if total_s else 0.0,
        mean_waiting=waited_s / queued_s if queued_s else 0.0,
        held_tokens=round(held_s / queued_s) if queued_s else 0,
        begun=tuple(begun),
    )
