"""Policies side by side: the figures, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import stdev
from typing import Any

from kvproxy.replay.outcome import Summary

_LEGEND = (
    "TTFT (with its p50, p90, p99) and e2e are seconds; hit is the share of prompt tokens found in cache; imbalance",
    "the busiest engine against the mean; the last two are mean TTFT against the pooled cache's and the baseline's.",
)
_COLUMNS = ("policy", "TTFT mean", "p50", "p90", "p99", "e2e", "hit", "imbalance", "vs bound", "vs ")


@dataclass(frozen=True, slots=True)
class Report:
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

    def as_table(self) -> str:
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
        return aligned([header, *rows])

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


def mean_of(summaries: Sequence[Summary]) -> Summary:
    """The mean over seeds, figure by figure, and how far the mean TTFT differs between them."""
    rows = [asdict(summary) for summary in summaries]
    means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    counts = {"requests": round(means["requests"]), "failed": round(means["failed"])}
    spread = stdev(each.ttft_mean_s for each in summaries) if len(summaries) > 1 else 0.0
    return Summary(**{**means, **counts, "ttft_mean_sd_s": spread})


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


def _ratio(value: float, base: float) -> float:
    return value / base if base else 0.0
