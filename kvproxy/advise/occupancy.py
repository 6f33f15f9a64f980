"""How full engines were while requests were recorded: how many answered, how many waited, what they held."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.advise.traffic import RecordedRequest, Traffic
from kvproxy.types import EndpointId

#: Only of streamed answers it is known when they began.
_STREAMED = 0.8
#: Slots bind where, in most of the time in which requests wait for each other, as many answer as ever do.
_PINNED, _OF_SPAN = 0.6, 0.05
#: More memory in use than this, and it is memory that is waited for.
_FULL = 0.85


@dataclass(frozen=True, slots=True)
class Occupancy:
    """One engine's. Shares are of the time between the first arrival and the last end."""

    endpoint: EndpointId
    answering: int  # requests past their first token, the most at a time
    waiting_share: float  # of the time in which two or more had none yet
    pinned_share: float  # of that time, in which as many answered as ever did
    held_tokens: int  # by answering requests in that time, on average
    mean_waiting: float  # requests without a first token, in that time

    def slots(self, capacity_tokens: int | None) -> int | None:
        """How many sequences the engine takes at most, where requests waited for one of them to end; else None."""
        if self.waiting_share < _OF_SPAN or self.pinned_share < _PINNED or self.answering < 1:
            return None
        full = capacity_tokens is not None and self.held_tokens > _FULL * capacity_tokens
        return None if full else self.answering


def measure_occupancy(traffic: Traffic) -> list[Occupancy]:
    """Of every endpoint that answered; nothing where too few answers were streamed."""
    streamed = sum(one.first_token_at is not None for one in traffic.requests)
    if streamed < _STREAMED * len(traffic.requests):
        return []
    return [_measure(endpoint, own) for endpoint in traffic.endpoints if (own := traffic.on(endpoint))]


def _measure(endpoint: EndpointId, requests: Sequence[RecordedRequest]) -> Occupancy:
    changes = []
    for one in requests:
        first = one.ended_at if one.first_token_at is None else one.first_token_at
        tokens = one.prompt_tokens + (one.output_tokens or 0)
        changes += [(one.arrived_at, 0, 1, 0, 0), (first, 1, -1, 1, tokens), (one.ended_at, 2, 0, -1, -tokens)]
    changes.sort()
    spans = _spans(changes)
    most = max((answering for _, _, answering, _ in spans), default=0)
    queued = [span for span in spans if span[1] >= 2]
    queued_s = sum(duration for duration, *_ in queued)
    total_s = changes[-1][0] - changes[0][0]
    return Occupancy(
        endpoint,
        answering=most,
        waiting_share=queued_s / total_s if total_s else 0.0,
        pinned_share=sum(s for s, _, answering, _ in queued if answering >= max(1, most - 1)) / queued_s
        if queued_s
        else 0.0,
        held_tokens=round(sum(s * held for s, _, _, held in queued) / queued_s) if queued_s else 0,
        mean_waiting=sum(s * waiting for s, waiting, _, _ in queued) / queued_s if queued_s else 0.0,
    )


def _spans(changes: Sequence[tuple[float, int, int, int, int]]) -> list[tuple[float, int, int, int]]:
    """(seconds, waiting, answering, held tokens) between one change and the next."""
    spans, waiting, answering, held = [], 0, 0, 0
    for (at, _, more_waiting, more_answering, more_held), (until, *_) in itertools.pairwise(changes):
        waiting, answering, held = waiting + more_waiting, answering + more_answering, held + more_held
        if until > at:
            spans.append((until - at, waiting, answering, held))
    return spans
