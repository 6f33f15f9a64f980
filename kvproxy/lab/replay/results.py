"""Outcomes of the requests of a replay, and the figures of one run and of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvproxy.lab.simulator.timing import TokenGaps

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound="DataclassInstance")


@dataclass(slots=True)
class ReplayOutcome:
    """One request as its client saw it. Times are seconds; None: it never came so far."""

    arrived_at: float
    prompt_tokens: int
    endpoint: int = -1
    predicted_tokens: int = 0
    cached_tokens: int = 0
    placed_at: float | None = None  # on an endpoint; the arrival, unless the router queue held it
    admitted_at: float | None = None  # by the engine
    first_token_at: float | None = None
    finished_at: float | None = None
    preemptions: int = 0
    output_tokens: int = 0
    session: int = -1
    tenant: str = ""
    prefilled_at: int = -1  # endpoint that computed the prompt for the one that answered
    refusals: int = 0  # after too long a wait for room; its client came again at once
    came_again_at: float | None = None  # after the last of them

    @property
    def came_at(self) -> float:
        """Arrival, the latest one of a request whose client came again."""
        return self.arrived_at if self.came_again_at is None else self.came_again_at

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, the router's queue included."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is no second."""
        if self.first_token_at is None or self.finished_at is None or self.output_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class GoodputLimits:
    """Limits of a good answer."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1

    def holds(self, outcome: ReplayOutcome) -> bool:
        """Return True if the outcome is within the limits: the first token and, on average, each one after it."""
        ttft_s = outcome.ttft_s
        tpot_s = outcome.tpot_s
        return ttft_s is not None and ttft_s < self.ttft_s and (tpot_s is None or tpot_s < self.tpot_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy on one trace. `imbalance` is the busiest endpoint's computed tokens against the mean; `hit_rate` the
    share of prompt tokens served from caches; `wrong_share` of the predicted ones not served. TPOT is seconds per
    output token after the first, request by request; ITL, from one token to the next, is over all tokens. `goodput` is
    the share of requests within the limits, `session_mean_s` the time from a session's start to its last answer,
    `fairness` Jain's index of the tenants' mean TTFT (of the sessions' where the trace names no tenants)."""

    requests: int
    failed: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_max_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    itl_p99_s: float
    goodput: float
    session_mean_s: float
    fairness: float
    hit_rate: float
    imbalance: float
    wrong_share: float
    requests_per_s: float
    ttft_mean_sd_s: float = 0.0  # over seeds, of the mean; 0 of a single run


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of sorted values; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarize_outcomes(
    outcomes: Sequence[ReplayOutcome],
    instances: int,
    *,
    token_gaps: TokenGaps | None = None,
    limits: GoodputLimits = GoodputLimits(),
) -> Summary:
    """Figures over every request that finished; goodput over all of them."""
    done = [outcome for outcome in outcomes if outcome.first_token_at is not None]
    ttft = sorted(each.ttft_s for each in done if each.ttft_s is not None)
    e2e = sorted(each.finished_at - each.arrived_at for each in done if each.finished_at is not None)
    tpot = sorted(each.tpot_s for each in done if each.tpot_s is not None)
    computed = [0] * instances
    for each in done:
        computed[each.endpoint if each.prefilled_at < 0 else each.prefilled_at] += (
            each.prompt_tokens - each.cached_tokens
        )
    prompt = sum(each.prompt_tokens for each in done)
    predicted = sum(each.predicted_tokens for each in done)
    missing = sum(max(0, each.predicted_tokens - each.cached_tokens) for each in done)
    return Summary(
        requests=len(outcomes),
        failed=len(outcomes) - len(done),
        ttft_mean_s=_mean(ttft),
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        ttft_max_s=ttft[-1] if ttft else 0.0,
        e2e_mean_s=_mean(e2e),
        e2e_p99_s=percentile(e2e, 0.99),
        tpot_mean_s=_mean(tpot),
        tpot_p99_s=percentile(tpot, 0.99),
        itl_p99_s=0.0 if token_gaps is None else token_gaps.percentile(0.99),
        goodput=sum(map(limits.holds, outcomes)) / len(outcomes) if outcomes else 0.0,
        session_mean_s=_mean(_session_times(done)),
        fairness=_fairness(done),
        hit_rate=sum(each.cached_tokens for each in done) / prompt if prompt else 0.0,
        imbalance=max(computed) * instances / sum(computed) if sum(computed) else 1.0,
        wrong_share=missing / predicted if predicted else 0.0,
        requests_per_s=compute_rate([outcome.arrived_at for outcome in outcomes]),
    )


def _session_times(done: Sequence[ReplayOutcome]) -> list[float]:
    """From each session's first request to its last answer."""
    spans: dict[int, tuple[float, float]] = {}
    for each in done:
        if each.finished_at is not None:
            first, last = spans.get(each.session, (each.arrived_at, each.finished_at))
            spans[each.session] = min(first, each.arrived_at), max(last, each.finished_at)
    return [last - first for first, last in spans.values()]


def _fairness(done: Sequence[ReplayOutcome]) -> float:
    named = any(each.tenant for each in done)
    waits: dict[str | int, list[float]] = {}
    for each in done:
        if each.ttft_s is not None:
            waits.setdefault(each.tenant if named else each.session, []).append(each.ttft_s)
    return jain_index([fmean(each) for each in waits.values()])


def jain_index(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all have as much, 1/n where one of n has all of it."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def compute_rate(arrivals: Sequence[float]) -> float:
    """Arrivals a second over the whole run."""
    if len(arrivals) < 2:
        return 0.0
    span = max(arrivals) - min(arrivals)
    return (len(arrivals) - 1) / span if span > 0 else 0.0


def average_summaries(summaries: Sequence[Summary]) -> Summary:
    """Return the mean over seeds, figure by figure, and how far the mean TTFT differs between them."""
    means = average(summaries)
    spread = stdev(each.ttft_mean_s for each in summaries) if len(summaries) > 1 else 0.0
    return replace(means, requests=round(means.requests), failed=round(means.failed), ttft_mean_sd_s=spread)


def average(runs: Sequence[F]) -> F:
    """Return the mean over runs, figure by figure."""
    rows = [asdict(run) for run in runs]
    return type(runs[0])(**{name: fmean(row[name] for row in rows) for name in rows[0]})


class Ratio(NamedTuple):
    """A geometric mean of ratios and its standard error, which is None where nothing was repeated. 0 of nothing."""

    value: float
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if self.error is None else f"±{self.error:.3f}".replace("±0.", "±."))


def mean_ratio(cells: Iterable[Sequence[tuple[float, float]]]) -> Ratio:
    """Of figures against others, over cells of which each was run with several seeds. The error is that of the seeds
    alone: cells differ by nature. A cell that was run once is taken to scatter as the others do."""
    logs = [[math.log(a / b) for a, b in runs if a > 0 and b > 0] for runs in cells]
    logs = [each for each in logs if each]
    if not logs:
        return Ratio(0.0)
    value = math.exp(fmean(fmean(each) for each in logs))
    freedom = sum(len(each) - 1 for each in logs)
    if not freedom:
        return Ratio(value)
    variance = sum((x - fmean(each)) ** 2 for each in logs for x in each) / freedom
    return Ratio(value, value * math.sqrt(sum(variance / len(each) for each in logs)) / len(logs))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
