"""The reports of runs that were not simulated: a live server's, and recorded decisions decided again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from kvproxy.lab.replay.live import LiveReplay, LiveSettings
from kvproxy.lab.replay.report import (
    FIGURES,
    MORE_FIGURES,
    MORE_LEGEND,
    ReplayReport,
    align_columns,
    name_half,
    name_row,
)
from kvproxy.lab.replay.results import GoodputLimits, ReplayOutcome, Summary, summarize_outcomes
from kvproxy.lab.replay.settings import Pace
from kvproxy.lab.replay.trace import Half, Trace
from kvproxy.operate.receipts.receipt import describe_media

ROW = "live"


@dataclass(frozen=True, slots=True)
class LiveReport:
    """`summary` is over what ended before the run did. Holds no key."""

    trace: str
    half: Half
    wanted: int  # requests of the trace
    hit_ceiling: float
    summary: Summary
    endpoints: dict[str, dict[str, int]]
    failures: dict[str, int]
    held_back: int
    interrupted: bool
    settings: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the whole report; `policies` as in virtual time."""
        return {
            "trace": self.trace,
            "half": self.half,
            "instances": len(self.endpoints),
            "requests": self.summary.requests,
            "hit_ceiling": self.hit_ceiling,
            "interrupted": self.interrupted,
            "held_back": self.held_back,
            "failures": self.failures,
            "endpoints": self.endpoints,
            "settings": self.settings,
            "policies": {ROW: asdict(self.summary)},
        }

    def plotted(self) -> ReplayReport:
        """Return the same for a plot, limited to the fields that both kinds of replay have."""
        return ReplayReport(
            trace=self.trace,
            half=self.half,
            instances=len(self.endpoints),
            load=0.0,
            requests=self.summary.requests,
            hit_ceiling=self.hit_ceiling,
            reference=None,
            baseline=ROW,
            runs={ROW: [self.summary]},
            settings=self.settings,
        )

    def render_table(self, *, all_figures: bool = False) -> str:
        """For a terminal."""
        summary = self.summary
        ended = f"{summary.requests} of {self.wanted} requests" if self.interrupted else f"{summary.requests} requests"
        lines = [
            f"{self.trace}, {name_half(self.half)}: {ended}, {summary.requests_per_s:.2f} a second, "
            f"hit ceiling {self.hit_ceiling:.3f}; times in s, between tokens in ms"
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
    return LiveReport(
        trace=trace.name,
        half=trace.half,
        wanted=trace.requests,
        hit_ceiling=trace.hit_ceiling(),
        summary=summarize_outcomes(
            outcomes, max(1, len(replay.endpoints)), token_gaps=replay.token_gaps, limits=limits
        ),
        endpoints={
            name or "(not named)": _counts([each for each in outcomes if each.endpoint == number])
            for number, name in enumerate(replay.endpoints)
        },
        failures=dict(replay.failures.most_common()),
        held_back=replay.held_back,
        interrupted=interrupted,
        settings={"live": asdict(shown), "pace": asdict(pace), "goodput": asdict(limits)},
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
        """Return the whole review."""
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
