"""Decisions read from receipts, in the words of the policies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from kvproxy.receipts.forecast import matched_tokens, own_work
from kvproxy.receipts.receipt import Attempt, Candidate, Receipt
from kvproxy.routing.load import Backlog, Features
from kvproxy.routing.policy import OverlapFacts, PickRequest
from kvproxy.types import EndpointId


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """A load as a receipt tells it."""

    in_flight: int
    pending_requests: int
    pending_tokens: int
    resident_tokens: int
    backlog: Backlog

    def wait_s(self, seconds: Features, slowness: float, now: float) -> float:
        """As of EndpointLoad, at the moment of the decision."""
        return self.backlog.wait_s(seconds, slowness)


@dataclass(frozen=True, slots=True)
class RecordedCandidate:
    """A candidate as a receipt tells it."""

    id: EndpointId
    weight: float
    load: RecordedLoad


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the proxy could learn from a request: work done in so many busy seconds, tokens predicted and cached."""

    at: float
    endpoint: EndpointId
    work: Features | None  # None: its first token could not be seen
    busy_s: float
    predicted_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Decision:
    """One placement. `index` is that of the endpoint it went to."""

    at: float  # seconds since the epoch
    receipt: Receipt
    attempt: Attempt
    index: int
    request: PickRequest
    candidates: tuple[RecordedCandidate, ...]
    lesson: Lesson | None

    @property
    def answered(self) -> bool:
        """Whether its own first token was seen: streamed, and not an attempt that failed."""
        return self.receipt.stream and self.attempt.failure is None and self.receipt.ttft_s is not None


def decisions_of(receipts: Iterable[Receipt]) -> list[Decision]:
    """Every placement on the receipts, in the order they were made."""
    found = [
        _decision(receipt, attempt, index)
        for receipt in receipts
        for attempt in receipt.attempts
        for index, candidate in enumerate(attempt.candidates)
        if candidate.id == attempt.endpoint
    ]
    return sorted(found, key=lambda decision: decision.at)


def _decision(receipt: Receipt, attempt: Attempt, index: int) -> Decision:
    received = datetime.fromisoformat(receipt.time).timestamp() - receipt.duration_s
    request = PickRequest(
        model=receipt.model,
        session_key=receipt.session or None,
        facts=OverlapFacts(receipt.prompt_tokens or 0, receipt.facts, receipt.hot_tokens),
        streams=receipt.stream,
        prompt_head=receipt.head.encode(),
    )
    candidates = tuple([_candidate(one) for one in attempt.candidates])
    return Decision(
        at=received + attempt.at_s,
        receipt=receipt,
        attempt=attempt,
        index=index,
        request=request,
        candidates=candidates,
        lesson=None if attempt.failure is not None else _lesson(receipt, attempt, attempt.candidates[index], received),
    )


def _lesson(receipt: Receipt, attempt: Attempt, chosen: Candidate, received: float) -> Lesson:
    """The engine was busy with what was pending, and with this request, from its latest first token to this one's."""
    shown = receipt.stream and receipt.ttft_s is not None and receipt.prompt_tokens is not None
    first_token_s = receipt.duration_s if receipt.ttft_s is None else receipt.ttft_s
    own = own_work(receipt, chosen.id)
    work = (chosen.work[0] + own[0], chosen.work[1] + own[1], chosen.work[2] + own[2], chosen.work[3] + own[3])
    return Lesson(
        at=received + first_token_s,
        endpoint=chosen.id,
        work=work if shown else None,
        busy_s=max(0.0, first_token_s - attempt.at_s) + max(0.0, chosen.elapsed_s),
        predicted_tokens=matched_tokens(receipt, chosen.id),
        cached_tokens=receipt.cached_tokens,
    )


def _candidate(one: Candidate) -> RecordedCandidate:
    backlog = Backlog(one.work, one.head, one.elapsed_s)
    load = RecordedLoad(one.in_flight, one.pending_requests, one.pending_tokens, one.resident_tokens, backlog)
    return RecordedCandidate(one.id, one.weight, load)
