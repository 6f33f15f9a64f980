"""What a live replay found: the common table's one row, and what only a client of real servers can say."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from kvproxy.replay.live import LiveReplay, LiveSettings
from kvproxy.replay.results import ReplayOutcome, ReplayReport, Summary, align_columns, summarize_outcomes
from kvproxy.replay.settings import Pace
from kvproxy.replay.trace import Trace

ROW = "live"


@dataclass(frozen=True, slots=True)
class LiveReport:
    """`summary` is over what ended before the run did. Holds no key."""

    trace: str
    wanted: int  # requests of the trace
    hit_ceiling: float
    summary: Summary
    endpoints: dict[str, dict[str, int]]
    failures: dict[str, int]
    held_back: int
    interrupted: bool
    settings: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The whole report; `policies` as in virtual time."""
        return {
            "trace": self.trace,
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
        """The same for a plot, which knows no more than what both kinds of replay have."""
        return ReplayReport(
            trace=self.trace,
            instances=len(self.endpoints),
            load=0.0,
            requests=self.summary.requests,
            hit_ceiling=self.hit_ceiling,
            bound_ttft_mean_s=0.0,
            bound_ttft_p99_s=0.0,
            baseline=ROW,
            policies={ROW: self.summary},
            settings=self.settings,
        )

    def render_table(self) -> str:
        """For a terminal."""
        summary = self.summary
        ended = f"{summary.requests} of {self.wanted} requests" if self.interrupted else f"{summary.requests} requests"
        lines = [f"{self.trace}: {ended}, {summary.requests_per_s:.2f} a second, hit ceiling {self.hit_ceiling:.3f}"]
        lines[0] += "; times in seconds"
        header = ["policy", "TTFT mean", "p50", "p90", "p99", "e2e", "hit", "imbalance"]
        times = (summary.ttft_mean_s, summary.ttft_p50_s, summary.ttft_p90_s, summary.ttft_p99_s, summary.e2e_mean_s)
        name = ROW + (f" ({summary.failed} failed)" if summary.failed else "")
        row = [name, *(f"{value:.3f}" for value in times), f"{summary.hit_rate:.3f}", f"{summary.imbalance:.2f}"]
        lines += align_columns([header, row])
        rows = [[each, *map(str, counts.values())] for each, counts in self.endpoints.items()]
        lines += ["", *align_columns([["endpoint", "requests", "prompt tokens", "cached"], *rows])] if rows else []
        lines += [f"failed: {count} x {reason}" for reason, count in self.failures.items()]
        if self.held_back:
            lines.append(f"{self.held_back} requests were held back by --concurrency: later than the trace has them")
        if self.interrupted:
            lines.append("interrupted: requests under way then are left out")
        return "\n".join(lines)


def report_live(
    trace: Trace, replay: LiveReplay, settings: LiveSettings, pace: Pace, *, interrupted: bool
) -> LiveReport:
    """Whatever the replay has by now."""
    outcomes = replay.outcomes
    shown = replace(settings, api_key="", url=str(httpx.URL(settings.url).copy_with(username=None, password=None)))
    return LiveReport(
        trace=trace.name,
        wanted=trace.requests,
        hit_ceiling=trace.hit_ceiling(),
        summary=summarize_outcomes(outcomes, max(1, len(replay.endpoints))),
        endpoints={
            name or "(not named)": _counts([each for each in outcomes if each.endpoint == number])
            for number, name in enumerate(replay.endpoints)
        },
        failures=dict(replay.failures.most_common()),
        held_back=replay.held_back,
        interrupted=interrupted,
        settings={"live": asdict(shown), "pace": asdict(pace)},
    )


def _counts(outcomes: list[ReplayOutcome]) -> dict[str, int]:
    return {
        "requests": len(outcomes),
        "prompt_tokens": sum(each.prompt_tokens for each in outcomes),
        "cached_tokens": sum(each.cached_tokens for each in outcomes),
    }
