"""Policies side by side, live runs and recorded decisions, as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import httpx

from kvproxy.lab.replay.live import LiveReplay, LiveSettings
from kvproxy.lab.replay.results import (
    GoodputLimits,
    Ratio,
    ReplayOutcome,
    Summary,
    average_summaries,
    mean_ratio,
    summarize_outcomes,
)
from kvproxy.lab.replay.settings import Pace
from kvproxy.lab.replay.trace import Half, Trace
from kvproxy.operate.log_lines import align_columns
from kvproxy.operate.receipts.receipt import describe_media

REFERENCE = "pooled reference"


F = TypeVar("F")


class Column(NamedTuple, Generic[F]):
    """A figure of a table."""

    title: str
    show: Callable[[F], str]


def format_seconds(value: float) -> str:
    """Format seconds with three digits or so."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.1f}"


FIGURES: Sequence[Column[Summary]] = (
    Column("TTFT", lambda each: format_seconds(each.ttft_mean_s)),
    Column("p99", lambda each: format_seconds(each.ttft_p99_s)),
    Column("e2e", lambda each: format_seconds(each.e2e_mean_s)),
    Column("ITL p99", lambda each: _milliseconds(each.itl_p99_s)),
    Column("goodput", lambda each: f"{each.goodput:.3f}"),
    Column("hit", lambda each: f"{each.hit_rate:.3f}"),
    Column("busy", lambda each: f"{each.imbalance:.2f}"),
)
MORE_FIGURES: Sequence[Column[Summary]] = (
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
        prefill = self.settings.get("fleet", {}).get("prefill")
        roles = f" ({prefill} prefill)" if prefill else ""
        title += f", {self.instances} instances{roles}, load {self.load:g}, hit ceiling {self.hit_ceiling:.3f}"
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


def _cells(name: str, summary: Summary, columns: Sequence[Column[Summary]]) -> list[str]:
    return [name_row(name, summary), *(column.show(summary) for column in columns)]


ROW = "live"


@dataclass(frozen=True, slots=True)
class LiveReport:
    """`played` has one row, over what ended before the run did. Holds no key."""

    played: ReplayReport
    wanted: int  # requests of the trace
    endpoints: dict[str, dict[str, int]]
    failures: dict[str, int]
    held_back: int
    interrupted: bool

    @property
    def summary(self) -> Summary:
        """Figures of the row."""
        return self.played.runs[ROW][0]

    def as_json(self) -> dict[str, Any]:
        """Return the whole report; `policies` as in virtual time."""
        played = self.played
        return {
            **{name: getattr(played, name) for name in ("trace", "half", "instances", "requests", "hit_ceiling")},
            "interrupted": self.interrupted,
            "held_back": self.held_back,
            "failures": self.failures,
            "endpoints": self.endpoints,
            "settings": played.settings,
            "policies": {ROW: asdict(self.summary)},
        }

    def render_table(self, *, all_figures: bool = False) -> str:
        summary = self.summary
        ended = f"{summary.requests} of {self.wanted} requests" if self.interrupted else f"{summary.requests} requests"
        lines = [
            f"{self.played.trace}, {name_half(self.played.half)}: {ended}, {summary.requests_per_s:.2f} a second, "
            f"hit ceiling {self.played.hit_ceiling:.3f}; times in s, between tokens in ms"
        ]
        for figures in (FIGURES, MORE_FIGURES) if all_figures else (FIGURES,):
            header = ["policy", *(column.title for column in figures)]
            lines += align_columns([header, [name_row(ROW, summary), *(column.show(summary) for column in figures)]])
        lines += MORE_LEGEND if all_figures else ()
        rows = [[each, *map(str, counts.values())] for each, counts in self.endpoints.items()]
        lines += ["", *align_columns([["endpoint", "requests", "prompt tokens", "cached"], *rows])] if rows else []
        lines += [f"failed: {count} x {reason}" for reason, count in self.failures.items()]
        if self.held_back:
            lines.append(f"{self.held_back} requests were held back by --concurrency: later than the trace has them")
        if self.interrupted:
            lines.append("interrupted: requests under way then are left out")
        return "\n".join(lines)


def report_live(
    trace: Trace,
    replay: LiveReplay,
    settings: LiveSettings,
    pace: Pace,
    *,
    interrupted: bool,
    limits: GoodputLimits = GoodputLimits(),
) -> LiveReport:
    """Return a report of the outcomes so far."""
    outcomes = replay.outcomes
    shown = replace(settings, api_key="", url=str(httpx.URL(settings.url).copy_with(username=None, password=None)))
    endpoints = {
        name or "(not named)": _counts([each for each in outcomes if each.endpoint == number])
        for number, name in enumerate(replay.endpoints)
    }
    summary = summarize_outcomes(outcomes, max(1, len(replay.endpoints)), token_gaps=replay.token_gaps, limits=limits)
    played = ReplayReport(
        trace=trace.name,
        half=trace.half,
        instances=len(endpoints),
        load=0.0,
        requests=summary.requests,
        hit_ceiling=trace.hit_ceiling(),
        reference=None,
        baseline=ROW,
        runs={ROW: [summary]},
        settings={"live": asdict(shown), "pace": asdict(pace), "goodput": asdict(limits)},
    )
    return LiveReport(
        played,
        wanted=trace.requests,
        endpoints=endpoints,
        failures=dict(replay.failures.most_common()),
        held_back=replay.held_back,
        interrupted=interrupted,
    )


def _counts(outcomes: list[ReplayOutcome]) -> dict[str, int]:
    return {
        "requests": len(outcomes),
        "prompt_tokens": sum(each.prompt_tokens for each in outcomes),
        "cached_tokens": sum(each.cached_tokens for each in outcomes),
    }


_COLUMNS = ("policy", "differs", "regret mean", "p50", "p99", "TTFT", "difference", "hit")


@dataclass(frozen=True, slots=True)
class Recorded:
    """Figures of the recorded decisions. TTFT is from the decision: expected by hindsight, and measured (streams
    alone)."""

    decisions: int
    requests: int
    policies: tuple[str, ...]
    ttft_mean_s: float
    real_ttft_mean_s: float | None
    hit_rate: float  # share of the prompt tokens that the chosen endpoints were estimated to hold
    media_share: float = 0.0  # of the prompt tokens: pictures, audio and video


@dataclass(frozen=True, slots=True)
class Verdict:
    """One policy against the recorded decisions. Regret: extra cost of the recorded choices, by this policy's own costs
    and in its own unit; None if it has none. The difference in TTFT is below 0 where this policy is better."""

    different: int
    differs: float
    regret_mean: float | None
    regret_p50: float | None
    regret_p99: float | None
    ttft_mean_s: float
    ttft_difference_mean_s: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Review:
    """Every policy against what was decided."""

    receipts: str
    broken_lines: int
    recorded: Recorded
    policies: Mapping[str, Verdict]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def render_table(self) -> str:
        """For a terminal: seconds, shares, regret in each policy's own unit."""
        recorded = self.recorded
        title = (
            f"{self.receipts}: {recorded.decisions} decisions of {recorded.requests} requests "
            f"by {', '.join(recorded.policies)}"
        )
        if media := describe_media(recorded.media_share):
            title += f"; {media}"
        if self.broken_lines:
            title += f"; {self.broken_lines} lines are no receipts"
        first = ["as recorded", "", "", "", "", f"{recorded.ttft_mean_s:.3f}", "", f"{recorded.hit_rate:.3f}"]
        lines = align_columns([_COLUMNS, first, *(_row(name, verdict) for name, verdict in self.policies.items())])
        lines.append("Regret is in each policy's own unit of cost: compare it along a row only. TTFT is seconds.")
        if recorded.real_ttft_mean_s is not None:
            lines.append(
                f"TTFT is expected, by speeds learned in hindsight; really it was {recorded.real_ttft_mean_s:.3f} s"
            )
        return "\n".join([title, *lines])


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def _signed(seconds: float) -> str:
    """Without a sign where nothing is left of it."""
    text = f"{seconds:+.3f}"
    return text[1:] if float(text) == 0 else text


def _row(name: str, verdict: Verdict) -> list[str]:
    regrets = (verdict.regret_mean, verdict.regret_p50, verdict.regret_p99)
    return [
        name,
        f"{100 * verdict.differs:.1f} %",
        *("-" if value is None else f"{value:.4g}" for value in regrets),
        f"{verdict.ttft_mean_s:.3f}",
        _signed(verdict.ttft_difference_mean_s),
        f"{verdict.hit_rate:.3f}",
    ]
