"""What became of each request of a replay, and what that says about the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it. Times are seconds; None: it never came so far."""

    arrived_at: float
    prompt_tokens: int
    endpoint: int = -1
    predicted_tokens: int = 0
    cached_tokens: int = 0
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, the router's queue included."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy on one trace. `imbalance` is the busiest endpoint's computed tokens against the mean; `hit_rate` the
    share of prompt tokens served from caches; `wrong_share` of the predicted ones not served."""

    requests: int
    failed: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_mean_s: float
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


def summarise(outcomes: Sequence[Outcome], instances: int) -> Summary:
    """Figures over every request that finished."""
    done = [outcome for outcome in outcomes if outcome.first_token_at is not None]
    ttft = sorted(each.ttft_s for each in done if each.ttft_s is not None)
    e2e = [each.finished_at - each.arrived_at for each in done if each.finished_at is not None]
    computed = [0] * instances
    for each in done:
        computed[each.endpoint] += each.prompt_tokens - each.cached_tokens
    prompt = sum(each.prompt_tokens for each in done)
    predicted = sum(each.predicted_tokens for each in done)
    missing = sum(max(0, each.predicted_tokens - each.cached_tokens) for each in done)
    return Summary(
        requests=len(outcomes),
        failed=len(outcomes) - len(done),
        ttft_mean_s=sum(ttft) / len(ttft) if ttft else 0.0,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        e2e_mean_s=sum(e2e) / len(e2e) if e2e else 0.0,
        hit_rate=sum(each.cached_tokens for each in done) / prompt if prompt else 0.0,
        imbalance=max(computed) * instances / sum(computed) if sum(computed) else 1.0,
        wrong_share=missing / predicted if predicted else 0.0,
        requests_per_s=rate_of([outcome.arrived_at for outcome in outcomes]),
    )


def rate_of(arrivals: Sequence[float]) -> float:
    """Arrivals a second over the whole run."""
    if len(arrivals) < 2:
        return 0.0
    span = max(arrivals) - min(arrivals)
    return (len(arrivals) - 1) / span if span > 0 else 0.0
