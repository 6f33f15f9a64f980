"""Data of one request's receipt, noted while it runs: a few tuples a decision, nothing formatted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest

import msgspec

from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.costs import onboarding_s_of
from kvproxy.cluster.routing.policy import NO_FACTS, OverlapFacts, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import Features
from kvproxy.operate.receipts.receipt import ReceiptCandidate
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver

#: Candidates noted of one decision: the chosen one and the cheapest.
MAX_CANDIDATES = 64
#: Attempts and refusals noted of one request.
MAX_ATTEMPTS = 32


class Placed(msgspec.Struct):
    """One decision. The waits of its candidates are computed when the receipt is written."""

    at: float
    endpoint: EndpointId
    policy: str
    reason: str
    preference: str | None
    seconds: Features | None
    candidates: list[ReceiptCandidate]
    left_out: int
    failure: str | None = None


class AttemptLog(RequestObserver):
    """Log of one request's attempts; `on_finished` takes it when the request is over."""

    __slots__ = ("_on_finished", "decisions", "facts", "head", "refusals")

    def __init__(self, on_finished: Callable[[Exchange, AttemptLog, float], None] | None = None) -> None:
        self.facts: OverlapFacts = NO_FACTS
        self.head = b""  # the prompt's first bytes; hashed before they are written
        self.decisions: list[Placed] = []
        self.refusals: list[str] = []
        self._on_finished = on_finished

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        """Note the decision and what it was made of."""
        self.facts = decision.request.facts
        self.head = decision.request.prompt_head
        if len(self.decisions) < MAX_ATTEMPTS:
            self.decisions.append(_noted(decision, now))

    def refused(self, exchange: Exchange, refusal: str, now: float) -> None:
        """Note that no endpoint could be picked."""
        if len(self.refusals) < MAX_ATTEMPTS:
            self.refusals.append(refusal)

    def attempt_failed(self, exchange: Exchange, reason: str, now: float) -> None:
        """Note how the last attempt failed."""
        if self.decisions:
            self.decisions[-1].failure = reason

    def finished(self, exchange: Exchange, now: float) -> None:
        """Hand over the log; the receipt can be written."""
        if "deciding" in exchange.hooks:  # the decision was made by more than the facts
            self.facts = exchange.facts or NO_FACTS
        if self._on_finished is not None:
            self._on_finished(exchange, self, now)


def _noted(decision: Decision[Endpoint], now: float) -> Placed:
    speeds = decision.speeds
    costs = decision.costs
    chosen = _recorded(decision)
    request = decision.request
    candidates = [_candidate(decision.candidates[i], costs[i] if costs else None, speeds, request, now) for i in chosen]
    return Placed(
        at=now,
        endpoint=decision.endpoint.id,
        policy=decision.policy,
        reason=decision.reason,
        preference=decision.preference,
        seconds=None if speeds is None else speeds.seconds,
        candidates=candidates,
        left_out=len(decision.candidates) - len(chosen),
    )


def _recorded(decision: Decision[Endpoint]) -> Sequence[int]:
    """Return the indexes of the candidates to note."""
    count = len(decision.candidates)
    if count <= MAX_CANDIDATES:
        return range(count)
    costs = decision.costs
    index = decision.index
    others = (i for i in range(count) if i != index)
    best = nsmallest(MAX_CANDIDATES - 1, others, key=costs.__getitem__ if costs else None)
    return sorted([*best, index])


def _candidate(
    endpoint: Endpoint, cost: float | None, speeds: SpeedModel | None, request: PickRequest, now: float
) -> ReceiptCandidate:
    load = endpoint.load
    adapter_s = request.adapter_s
    slowness = None if speeds is None else speeds.slowness(endpoint.id, now)
    held = request.facts.by_endpoint.get(endpoint.id)
    onboarding_s = 0.0
    if held is not None and held.lower and speeds is not None:
        onboarding_s = onboarding_s_of(held, request.facts.prompt_tokens, endpoint.id, speeds)
    backlog = load.backlog(None if speeds is None else speeds.seconds, slowness or 1.0, now)
    return ReceiptCandidate(
        endpoint.id,
        load.in_flight,
        load.pending_requests,
        load.pending_tokens,
        load.resident_tokens,
        backlog.work,
        backlog.head,
        backlog.elapsed_s,
        endpoint.weight,
        cost,
        slowness,
        live_blocks=None if load.live is None else len(load.live),
        shared_blocks=0 if load.live is None else load.live.count_leading(request.facts.blocks),
        onboarding_s=onboarding_s,
        adapter_s=None if adapter_s is None else adapter_s.get(endpoint.id),
    )
