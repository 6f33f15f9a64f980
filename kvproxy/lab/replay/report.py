"""Policies side by side, as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from kvproxy.lab.replay.results import Ratio, Summary, average_summaries, mean_ratio
from kvproxy.lab.replay.trace import Half

REFERENCE = "pooled reference"


class Column(NamedTuple):
    """A figure of a table."""

    title: str
    show: Callable[[Summary], str]


def format_seconds(value: float) -> str:
    """Format seconds with three digits or so."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.1f}"


FIGURES = (
    Column("TTFT", lambda each: format_seconds(each.ttft_mean_s)),
    Column("p99", lambda each: format_seconds(each.ttft_p99_s)),
    Column("e2e", lambda each: format_seconds(each.e2e_mean_s)),
    Column("ITL p99", lambda each: _milliseconds(each.itl_p99_s)),
    Column("goodput", lambda each: f"{each.goodput:.3f}"),
    Column("hit", lambda each: f"{each.hit_rate:.3f}"),
    Column("busy", lambda each: f"{each.imbalance:.2f}"),
)
MORE_FIGURES = (
    Column("TTFT p50", lambda each: format_seconds(each.ttft_p50_s)),
    Column("p90", lambda each: format_seconds(each.ttft_p90_s)),
    Column("longest", lambda each: format_seconds(each.ttft_max_s)),
    Column("e2e p99", lambda each: format_seconds(each.e2e_p99_s)),
    Column("TPOT", lambda each: _milliseconds(each.tpot_mean_s)),
    Column("p99", lambda each: _milliseconds(each.tpot_p99_s)),
    Column("session", lambda each: format_seconds(each.session_mean_s)),
    Column("fairness", lambda each: f"{each.fairness:.3f}"),
    Column("false", lambda each: f"{each.wrong_share:.3f}"),
)
MORE_LEGEND = (
    "longest: the longest TTFT; TPOT: ms a token after the first; session: s from its start to its last",
    "answer; fairness: Jain's index of the tenants' (or sessions') mean TTFT; false: share of predicted",
    "cached tokens that were not there",
)


def name_half(half: Half) -> str:
    """For a title."""
    return "both halves" if half is Half.BOTH else f"{half} half"


def name_row(name: str, summary: Summary) -> str:
    """Return a row's name, with what failed."""
    return name + (f" ({summary.failed} failed)" if summary.failed else "")


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Results of one replay: every policy's runs, one per seed. `reference` is the result of a greedy policy over one
    pooled cache; None if there is none (a live run)."""

    trace: str
    half: Half
    instances: int
    load: float
    requests: int
    hit_ceiling: float
    reference: Summary | None
    baseline: str
    runs: Mapping[str, Sequence[Summary]]
    settings: Mapping[str, Any]
    routers: str = ""  # number of routers and delay of their messages, if not one router
    of_trace: int = 0
    """Requests of the trace itself, where it was repeated; 0: it was played once."""

    @property
    def policies(self) -> Mapping[str, Summary]:
        """Every policy's figures, averaged over its runs."""
        return {name: average_summaries(runs) for name, runs in self.runs.items()}

    def ratio(self, policy: str) -> Ratio:
        """Mean TTFT against the baseline's, seed by seed."""
        pairs = zip(self.runs[policy], self.runs[self.baseline], strict=True)
        return mean_ratio([[(mine.ttft_mean_s, base.ttft_mean_s) for mine, base in pairs]])

    def distance(self, policy: str) -> Ratio:
        """Mean TTFT against the pooled reference's."""
        if self.reference is None:
            return Ratio(0.0)
        return mean_ratio([[(mine.ttft_mean_s, self.reference.ttft_mean_s) for mine in self.runs[policy]]])

    def as_json(self) -> dict[str, Any]:
        """Return the whole report. `bound` and `vs_bound` are the former names of the reference, to be
        dropped in 2.0."""
        reference = None if self.reference is None else asdict(self.reference)
        former = {} if reference is None else {name: reference[name] for name in ("ttft_mean_s", "ttft_p99_s")}
        return {
            "trace": self.trace,
            "half": self.half,
            "instances": self.instances,
            "load": self.load,
            "requests": self.requests,
            "requests_of_trace": self.of_trace or self.requests,
            "hit_ceiling": self.hit_ceiling,
            "reference": reference,
            "bound": former,
            "baseline": self.baseline,
            "settings": dict(self.settings),
            "policies": {name: self._policy_json(name, summary) for name, summary in self.policies.items()},
        }

    def _policy_json(self, name: str, summary: Summary) -> dict[str, Any]:
        ratio = self.ratio(name)
        distance = self.distance(name)
        return {
            **asdict(summary),
            "vs_baseline": ratio.value,
            "vs_baseline_se": ratio.error,
            "vs_reference": distance.value,
            "vs_reference_se": distance.error,
            "vs_bound": distance.value,
            "runs": [asdict(each) for each in self.runs[name]],
        }

    def render_table(self, *, all_figures: bool = False) -> str:
        """For a terminal of 100 columns: what was played, the rows, what the columns are; the rest if asked."""
        lines = [self.title(), *self.rows(), *self._legend()]
        if all_figures:
            lines += ["", *self.more_rows(), *MORE_LEGEND]
        return "\n".join(lines)

    def title(self) -> str:
        """Return what was played."""
        title = f"{self.trace}, {name_half(self.half)}: {self.requests} requests"
        if self.of_trace:
            title += f" ({self.of_trace}, repeated)"
        title += f", {self.instances} instances, load {self.load:g}, hit ceiling {self.hit_ceiling:.3f}"
        return f"{title}, {self.routers}" if self.routers else title

    def rows(self) -> list[str]:
        """Return the table alone."""
        header = ["policy", *(column.title for column in FIGURES), "/pooled", "/baseline"]
        rows = [
            [*_cells(name, summary, FIGURES), str(self.distance(name)), str(self.ratio(name))]
            for name, summary in self.policies.items()
        ]
        if self.reference is not None:
            rows.append([*_cells(REFERENCE, self.reference, FIGURES), "", ""])
        return align_columns([header, *rows])

    def more_rows(self) -> list[str]:
        """Return the figures that the first table leaves out."""
        rows = [_cells(name, summary, MORE_FIGURES) for name, summary in self.policies.items()]
        return align_columns([["policy", *(column.title for column in MORE_FIGURES)], *rows])

    def _legend(self) -> list[str]:
        limits = self.settings.get("goodput", {})
        seeds = len(self.runs[self.baseline])
        return [
            "TTFT (mean, p99) and e2e: s; ITL p99: ms between tokens; goodput: share with TTFT under "
            f"{limits.get('ttft_s', 0):g} s",
            f"and TPOT under {1000 * limits.get('tpot_s', 0):g} ms; hit: share of prompt tokens found in cache; "
            "busy: busiest engine over mean;",
            f"/pooled, /baseline: mean TTFT over the {REFERENCE}'s (a greedy policy on one pooled cache)",
            f"and over {self.baseline}'s, geometric mean of {seeds} seed"
            + ("s ± its standard error" if seeds > 1 else "; --seeds 3 gives it a spread"),
        ]


def _cells(name: str, summary: Summary, columns: Sequence[Column]) -> list[str]:
    return [name_row(name, summary), *(column.show(summary) for column in columns)]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
