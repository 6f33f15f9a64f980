"""Recorded decisions decided again by other policies: how often they would differ, and what that is worth.

Each decision stands alone: loads and caches are what the recorded policy had made of them, so this says what another
policy would have done in its place and not what a fleet under it would have become. A trace says that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import islice
from random import Random

from kvproxy.receipts.forecast import first_token_s, matched_tokens
from kvproxy.receipts.reading import Reading
from kvproxy.replay.decided_report import Recorded, Review, Verdict, mean
from kvproxy.replay.outcome import percentile
from kvproxy.replay.recorded import Decision, Lesson, decisions_of
from kvproxy.replay.scenario import PolicySpec
from kvproxy.routing.policy import Policy
from kvproxy.routing.speeds import SpeedModel

#: Seconds from a decision to its first token, had it gone to the candidate of this index.
Expect = Callable[[Decision, int], float]


def decide_again(reading: Reading, specs: Sequence[PolicySpec], *, limit: int = 0) -> Review:
    """Every decision on the receipts (of the first `limit` requests, if that is given) by each policy.

    ValueError when there is none. Each policy learns as it goes, from what the proxy saw; what they differ by is judged
    by speeds learned from all the receipts, in hindsight.
    """
    receipts = reading.oldest_first()
    decisions = decisions_of(islice(receipts, limit) if limit else receipts)
    if not decisions:
        raise ValueError(f"no decisions in {reading.path}")
    expect = _hindsight(decisions)
    verdicts = {str(spec): _verdict(spec.make(rng=Random(1)), decisions, expect) for spec in specs}
    return Review(str(reading.path), reading.broken, _recorded(decisions, expect), verdicts)


def _hindsight(decisions: Sequence[Decision]) -> Expect:
    speeds = SpeedModel()
    for decision in decisions:
        lesson = decision.lesson
        if lesson is not None and lesson.work is not None:
            speeds.observe(lesson.endpoint, lesson.work, lesson.busy_s, lesson.at)
    end = decisions[-1].at
    ids = {one.id for decision in decisions for one in decision.attempt.candidates}
    slowness = {endpoint: speeds.slowness(endpoint, end) for endpoint in ids}

    def expect(decision: Decision, index: int) -> float:
        candidate = decision.attempt.candidates[index]
        return first_token_s(decision.receipt, candidate, speeds.seconds, slowness[candidate.id])

    return expect


def _verdict(policy: Policy, decisions: Sequence[Decision], expect: Expect) -> Verdict:
    school = _School(policy)
    regrets, first_tokens, matched, different = [], [], 0, 0
    for decision in decisions:
        school.until(decision.at)
        choice = policy.choose(decision.request, decision.candidates, decision.at)
        policy.placed(decision.request, decision.candidates, choice.index, decision.at, choice=choice)
        school.later(decision.lesson)
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


def _recorded(decisions: Sequence[Decision], expect: Expect) -> Recorded:
    matched = sum(matched_tokens(one.receipt, one.attempt.endpoint) for one in decisions)
    seen = [
        one.receipt.ttft_s - one.attempt.at_s for one in decisions if one.answered and one.receipt.ttft_s is not None
    ]
    return Recorded(
        decisions=len(decisions),
        requests=len({id(one.receipt) for one in decisions}),
        policies=tuple(sorted({one.attempt.policy for one in decisions})),
        ttft_mean_s=sum(expect(one, one.index) for one in decisions) / len(decisions),
        real_ttft_mean_s=mean(seen),
        hit_rate=matched / max(1, _prompt_tokens(decisions)),
    )


def _prompt_tokens(decisions: Sequence[Decision]) -> int:
    return sum(one.receipt.prompt_tokens or 0 for one in decisions)


class _School:
    """Teaches a policy what the proxy learned, when it learned it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._coming: list[tuple[float, int, Lesson]] = []
        self._count = 0

    def later(self, lesson: Lesson | None) -> None:
        """What a decision will have taught."""
        if lesson is not None:
            self._count += 1
            heappush(self._coming, (lesson.at, self._count, lesson))

    def until(self, now: float) -> None:
        """Everything learned by then."""
        while self._coming and self._coming[0][0] <= now:
            lesson = heappop(self._coming)[2]
            if lesson.work is not None:
                self._policy.observe_sample(lesson.endpoint, lesson.work, lesson.busy_s, lesson.at)
            if lesson.cached_tokens is not None:
                self._policy.observe_reuse(lesson.endpoint, lesson.predicted_tokens, lesson.cached_tokens, lesson.at)
