"""What one request's receipt is made of, noted while it runs: a few tuples a decision, nothing formatted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from heapq import nsmallest

import msgspec

from kvproxy.cluster.decision import Sight
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.receipts.receipt import Candidate
from kvproxy.routing.backlog import backlog_of
from kvproxy.routing.load import Features
from kvproxy.routing.policy import NO_FACTS, OverlapFacts
from kvproxy.routing.speeds import SpeedModel
from kvproxy.types import EndpointId

log = logging.getLogger(__name__)

#: Candidates noted of one decision: the chosen one and the cheapest.
MAX_CANDIDATES = 64
#: Attempts and refusals noted of one request.
MAX_ATTEMPTS = 32


class Placed(msgspec.Struct):
    """One decision. What its candidates had to wait is left to be worked out when the receipt is written."""

    at: float
    endpoint: EndpointId
    policy: str
    reason: str
    preference: str | None
    seconds: Features | None
    candidates: list[Candidate]
    left_out: int
    failure: str | None = None


class Observed:
    """The witness of one request (`kvproxy.cluster.decision.Witness`)."""

    __slots__ = ("decisions", "facts", "head", "refusals")

    def __init__(self) -> None:
        self.facts: OverlapFacts = NO_FACTS
        self.head = b""  # the prompt's first bytes; hashed before they are written
        self.decisions: list[Placed] = []
        self.refusals: list[str] = []

    def placed(self, sight: Sight, now: float) -> None:
        """Note the decision and what it was made of."""
        self.facts, self.head = sight.request.facts, sight.request.prompt_head
        if len(self.decisions) < MAX_ATTEMPTS:
            try:
                self.decisions.append(_noted(sight, now))
            except Exception:
                log.exception("a decision is missing on its receipt")

    def refused(self, reason: str, now: float) -> None:
        """Note that nobody could be picked."""
        if len(self.refusals) < MAX_ATTEMPTS:
            self.refusals.append(reason)

    def failed(self, reason: str) -> None:
        """Note how the last attempt failed."""
        if self.decisions:
            self.decisions[-1].failure = reason


def _noted(sight: Sight, now: float) -> Placed:
    speeds, costs = sight.speeds, sight.costs
    chosen = _recorded(sight)
    candidates = [_candidate(sight.candidates[i], costs[i] if costs else None, speeds, now) for i in chosen]
    return Placed(
        at=now,
        endpoint=sight.chosen.id,
        policy=sight.policy,
        reason=sight.reason,
        preference=sight.preference,
        seconds=None if speeds is None else speeds.seconds,
        candidates=candidates,
        left_out=len(sight.candidates) - len(chosen),
    )


def _recorded(sight: Sight) -> Sequence[int]:
    """Which candidates are noted, by index."""
    count = len(sight.candidates)
    if count <= MAX_CANDIDATES:
        return range(count)
    costs, index = sight.costs, sight.candidates.index(sight.chosen)
    others = (i for i in range(count) if i != index)
    best = nsmallest(MAX_CANDIDATES - 1, others, key=costs.__getitem__ if costs else None)
    return sorted([*best, index])


def _candidate(endpoint: Endpoint, cost: float | None, speeds: SpeedModel | None, now: float) -> Candidate:
    load = endpoint.load
    slowness = None if speeds is None else speeds.slowness(endpoint.id, now)
    outlook = backlog_of(load, None if speeds is None else speeds.seconds, slowness or 1.0, now)
    return Candidate(
        endpoint.id,
        load.in_flight,
        load.pending_requests,
        load.pending_tokens,
        load.resident_tokens,
        outlook.work,
        outlook.head,
        outlook.elapsed_s,
        endpoint.weight,
        cost,
        slowness,
    )
