"""Replay of recorded decisions with other policies: how often they would differ, and the value of that.

Each decision stands alone: loads and caches are those of the recorded policy, so this shows another policy's choice in
its place and not the fleet that would have developed under it. A trace shows that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import heappop, heappush
from itertools import islice
from random import Random

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import OverlapFacts, PickRequest, Policy
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import Backlog, Features
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.report import Recorded, Review, Verdict, mean
from kvproxy.lab.replay.results import percentile
from kvproxy.operate.receipts.files import ReceiptReader
from kvproxy.operate.receipts.receipt import (
    Attempt,
    Receipt,
    ReceiptCandidate,
    first_token_s,
    matched_tokens,
    media_share,
    own_work,
)


@dataclass(frozen=True, slots=True)
class RecordedBlocks:
    """Live blocks as a receipt has them."""

    live: int
    shared: int  # with the recorded request's prompt

    def __len__(self) -> int:
        return self.live

    def count_leading(self, hashes: Sequence[int]) -> int:
        """As of LiveBlocks, of the recorded request's prompt."""
        return self.shared


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """A load as a receipt has it."""

    in_flight: int
    pending_requests: int
    pending_tokens: int
    resident_tokens: int
    live: RecordedBlocks | None
    backlog: Backlog

    def wait_s(self, seconds: Features, slowness: float, now: float) -> float:
        """As of EndpointLoad, at the moment of the decision."""
        return self.backlog.wait_s(seconds, slowness)


@dataclass(frozen=True, slots=True)
class RecordedCandidate:
    """A candidate as a receipt has it."""

    id: EndpointId
    weight: float
    load: RecordedLoad


@dataclass(frozen=True, slots=True)
class FeedbackSample:
    """Data the proxy could learn from a request: work done in so many busy seconds, tokens predicted and cached."""

    at: float
    endpoint: EndpointId
    work: Features | None  # None: its first token could not be seen
    busy_s: float
    predicted_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class RecordedDecision:
    """One placement. `index` is that of the endpoint it went to."""

    at: float  # seconds since the epoch
    receipt: Receipt
    attempt: Attempt
    index: int
    request: PickRequest
    candidates: tuple[RecordedCandidate, ...]
    sample: FeedbackSample | None

    @property
    def answered(self) -> bool:
        """True if its own first token was seen: streamed, and not an attempt that failed."""
        return self.receipt.stream and self.attempt.failure is None and self.receipt.ttft_s is not None


def read_decisions(receipts: Iterable[Receipt]) -> list[RecordedDecision]:
    """Every placement on the receipts, in the order they were made."""
    found = [
        _decision(receipt, attempt, index)
        for receipt in receipts
        for attempt in receipt.attempts
        for index, candidate in enumerate(attempt.candidates)
        if candidate.id == attempt.endpoint
    ]
    return sorted(found, key=lambda decision: decision.at)


def _decision(receipt: Receipt, attempt: Attempt, index: int) -> RecordedDecision:
    received = datetime.fromisoformat(receipt.time).timestamp() - receipt.duration_s
    asks_adapter = any(one.adapter_s is not None for one in attempt.candidates)
    request = PickRequest(
        model=receipt.model,
        session_key=receipt.parent or receipt.session or None,
        facts=_facts(receipt),
        streams=receipt.stream,
        prompt_head=receipt.head.encode(),
        adapter_s={one.id: one.adapter_s or 0.0 for one in attempt.candidates} if asks_adapter else None,
    )
    candidates = tuple([_candidate(one) for one in attempt.candidates])
    return RecordedDecision(
        at=received + attempt.at_s,
        receipt=receipt,
        attempt=attempt,
        index=index,
        request=request,
        candidates=candidates,
        sample=None
        if attempt.failure is not None
        else _feedback_sample(receipt, attempt, attempt.candidates[index], received),
    )


def _facts(receipt: Receipt) -> OverlapFacts:
    blocks = range(receipt.prompt_blocks)  # how many they were is all that a choice needs
    return OverlapFacts(receipt.prompt_tokens or 0, receipt.facts, receipt.hot_tokens, blocks, receipt.block_tokens)


def _feedback_sample(receipt: Receipt, attempt: Attempt, chosen: ReceiptCandidate, received: float) -> FeedbackSample:
    """Return the sample that this request closes: the engine worked on the pending requests and on this one from its
    latest first token to this one's."""
    shown = receipt.stream and receipt.ttft_s is not None and receipt.prompt_tokens is not None
    first_token_s = receipt.duration_s if receipt.ttft_s is None else receipt.ttft_s
    own = own_work(receipt, chosen)
    work = (chosen.work[0] + own[0], chosen.work[1] + own[1], chosen.work[2] + own[2], chosen.work[3] + own[3])
    return FeedbackSample(
        at=received + first_token_s,
        endpoint=chosen.id,
        work=work if shown else None,
        busy_s=max(0.0, first_token_s - attempt.at_s) + max(0.0, chosen.elapsed_s),
        predicted_tokens=matched_tokens(receipt, chosen.id),
        cached_tokens=receipt.cached_tokens,
    )


def _candidate(one: ReceiptCandidate) -> RecordedCandidate:
    backlog = Backlog(one.work, one.head, one.elapsed_s)
    load = RecordedLoad(
        one.in_flight,
        one.pending_requests,
        one.pending_tokens,
        one.resident_tokens,
        None if one.live_blocks is None else RecordedBlocks(one.live_blocks, one.shared_blocks),
        backlog,
    )
    return RecordedCandidate(one.id, one.weight, load)


#: Seconds from a decision to its first token, had it gone to the candidate of this index.
Expect = Callable[[RecordedDecision, int], float]


def decide_again(reading: ReceiptReader, specs: Sequence[PolicySpec], *, limit: int = 0) -> Review:
    """Every decision on the receipts (of the first `limit` requests, if that is given) by each policy.

    ValueError when there is none. Each policy learns as it goes, from what the proxy saw; what they differ by is judged
    by speeds learned from all the receipts, in hindsight.
    """
    receipts = reading.oldest_first()
    decisions = read_decisions(islice(receipts, limit) if limit else receipts)
    if not decisions:
        raise ValueError(f"no decisions in {reading.path}")
    expect = _hindsight(decisions)
    verdicts = {str(spec): _verdict(spec.make(rng=Random(1)), decisions, expect) for spec in specs}
    return Review(str(reading.path), reading.broken, _recorded(decisions, expect), verdicts)


def _hindsight(decisions: Sequence[RecordedDecision]) -> Expect:
    speeds = SpeedModel()
    for decision in decisions:
        sample = decision.sample
        if sample is not None and sample.work is not None:
            speeds.observe(sample.endpoint, sample.work, sample.busy_s, sample.at)
    end = decisions[-1].at
    ids = {one.id for decision in decisions for one in decision.attempt.candidates}
    slowness = {endpoint: speeds.slowness(endpoint, end) for endpoint in ids}

    def expect(decision: RecordedDecision, index: int) -> float:
        candidate = decision.attempt.candidates[index]
        return first_token_s(decision.receipt, candidate, speeds.seconds, slowness[candidate.id])

    return expect


def _verdict(policy: Policy, decisions: Sequence[RecordedDecision], expect: Expect) -> Verdict:
    feedback = _DelayedFeedback(policy)
    regrets = []
    first_tokens = []
    matched = 0
    different = 0
    for decision in decisions:
        feedback.apply_until(decision.at)
        choice = policy.choose(decision.request, decision.candidates, decision.at)
        policy.placed(decision.request, decision.candidates, choice.index, decision.at, choice=choice)
        feedback.schedule(decision.sample)
        different += choice.index != decision.index
        if choice.costs:
            regrets.append(choice.costs[decision.index] - choice.costs[choice.index])
        first_tokens.append(expect(decision, choice.index))
        matched += matched_tokens(decision.receipt, decision.attempt.candidates[choice.index].id)
    before = [expect(decision, decision.index) for decision in decisions]
    regrets.sort()
    return Verdict(
        different=different,
        differs=different / len(decisions),
        regret_mean=mean(regrets),
        regret_p50=percentile(regrets, 0.5) if regrets else None,
        regret_p99=percentile(regrets, 0.99) if regrets else None,
        ttft_mean_s=sum(first_tokens) / len(decisions),
        ttft_difference_mean_s=(sum(first_tokens) - sum(before)) / len(decisions),
        hit_rate=matched / max(1, _prompt_tokens(decisions)),
    )


def _recorded(decisions: Sequence[RecordedDecision], expect: Expect) -> Recorded:
    matched = sum(matched_tokens(one.receipt, one.attempt.endpoint) for one in decisions)
    seen = [
        one.receipt.ttft_s - one.attempt.at_s for one in decisions if one.answered and one.receipt.ttft_s is not None
    ]
    receipts = {id(one.receipt): one.receipt for one in decisions}.values()
    return Recorded(
        decisions=len(decisions),
        requests=len(receipts),
        policies=tuple(sorted({one.attempt.policy for one in decisions})),
        ttft_mean_s=sum(expect(one, one.index) for one in decisions) / len(decisions),
        real_ttft_mean_s=mean(seen),
        hit_rate=matched / max(1, _prompt_tokens(decisions)),
        media_share=media_share(receipts),
    )


def _prompt_tokens(decisions: Sequence[RecordedDecision]) -> int:
    return sum(one.receipt.prompt_tokens or 0 for one in decisions)


class _DelayedFeedback:
    """Gives a policy the samples of the recorded proxy at the times at which it got them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._coming: list[tuple[float, int, FeedbackSample]] = []
        self._count = 0

    def schedule(self, sample: FeedbackSample | None) -> None:
        if sample is not None:
            self._count += 1
            heappush(self._coming, (sample.at, self._count, sample))

    def apply_until(self, now: float) -> None:
        """Everything learned by then."""
        while self._coming and self._coming[0][0] <= now:
            sample = heappop(self._coming)[2]
            if sample.work is not None:
                self._policy.observe_sample(sample.endpoint, sample.work, sample.busy_s, sample.at)
            if sample.cached_tokens is not None:
                self._policy.observe_reuse(sample.endpoint, sample.predicted_tokens, sample.cached_tokens, sample.at)
