"""What became of the requests of a replay: policies side by side, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import stdev
from typing import Any

_LEGEND = (
    "TTFT (with its p50, p90, p99) and e2e are seconds; hit is the share of prompt tokens found in cache; imbalance",
    "the busiest engine against the mean; the last two are mean TTFT against the pooled cache's and the baseline's.",
)
_COLUMNS = ("policy", "TTFT mean", "p50", "p90", "p99", "e2e", "hit", "imbalance", "vs bound", "vs ")


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


def summarize_outcomes(outcomes: Sequence[ReplayOutcome], instances: int) -> Summary:
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
        requests_per_s=compute_rate([outcome.arrived_at for outcome in outcomes]),
    )


def compute_rate(arrivals: Sequence[float]) -> float:
    """Arrivals a second over the whole run."""
    if len(arrivals) < 2:
        return 0.0
    span = max(arrivals) - min(arrivals)
    return (len(arrivals) - 1) / span if span > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What one replay found. `bound_ttft_mean_s` is the pooled cache's, 0 when there is none (a live run)."""

    trace: str
    instances: int
    load: float
    requests: int
    hit_ceiling: float
    bound_ttft_mean_s: float
    bound_ttft_p99_s: float
    baseline: str
    policies: Mapping[str, Summary]
    settings: Mapping[str, Any]
    of_trace: int = 0
    """Requests of the trace itself, where it was repeated; 0: it was played once."""

    def ratio(self, policy: str) -> float:
        """Mean TTFT against the baseline's."""
        return _ratio(self.policies[policy].ttft_mean_s, self.policies[self.baseline].ttft_mean_s)

    def distance(self, policy: str) -> float:
        """Mean TTFT against the pooled-cache bound's."""
        return _ratio(self.policies[policy].ttft_mean_s, self.bound_ttft_mean_s)

    def as_json(self) -> dict[str, Any]:
        """The whole report."""
        return {
            "trace": self.trace,
            "instances": self.instances,
            "load": self.load,
            "requests": self.requests,
            "requests_of_trace": self.of_trace or self.requests,
            "hit_ceiling": self.hit_ceiling,
            "bound": {"ttft_mean_s": self.bound_ttft_mean_s, "ttft_p99_s": self.bound_ttft_p99_s},
            "baseline": self.baseline,
            "settings": dict(self.settings),
            "policies": {
                name: {**asdict(summary), "vs_bound": self.distance(name), "vs_baseline": self.ratio(name)}
                for name, summary in self.policies.items()
            },
        }

    def render_table(self) -> str:
        """For a terminal: what was played, the rows, what the columns are."""
        return "\n".join([self.title(), *self.rows(), *(_LEGEND if self.bound_ttft_mean_s else ())])

    def title(self) -> str:
        """What was played."""
        title = f"{self.trace}: {self.requests} requests"
        if self.of_trace:
            title += f" ({self.of_trace}, repeated)"
        title += f", {self.instances} instances, load {self.load:g}, hit ceiling {self.hit_ceiling:.3f}"
        if self.bound_ttft_mean_s:
            title += f", pooled-cache bound {self.bound_ttft_mean_s:.3f} s (p99 {self.bound_ttft_p99_s:.3f} s)"
        return title

    def rows(self) -> list[str]:
        """The table alone."""
        rows = [self._row(name, summary) for name, summary in self.policies.items()]
        header = [*_COLUMNS[:-1], _COLUMNS[-1] + self.baseline]
        return align_columns([header, *rows])

    def _row(self, name: str, summary: Summary) -> list[str]:
        times = (summary.ttft_mean_s, summary.ttft_p50_s, summary.ttft_p90_s, summary.ttft_p99_s, summary.e2e_mean_s)
        return [
            name + (f" ({summary.failed} failed)" if summary.failed else ""),
            f"{times[0]:.3f}" + (f" ±{summary.ttft_mean_sd_s:.3f}" if summary.ttft_mean_sd_s else ""),
            *(f"{value:.3f}" for value in times[1:]),
            f"{summary.hit_rate:.3f}",
            f"{summary.imbalance:.2f}",
            f"{self.distance(name):.2f}" if self.bound_ttft_mean_s else "-",
            f"{self.ratio(name):.2f}",
        ]


def average_summaries(summaries: Sequence[Summary]) -> Summary:
    """The mean over seeds, figure by figure, and how far the mean TTFT differs between them."""
    rows = [asdict(summary) for summary in summaries]
    means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    counts = {"requests": round(means["requests"]), "failed": round(means["failed"])}
    spread = stdev(each.ttft_mean_s for each in summaries) if len(summaries) > 1 else 0.0
    return Summary(**{**means, **counts, "ttft_mean_sd_s": spread})


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


def _ratio(value: float, base: float) -> float:
    return value / base if base else 0.0
