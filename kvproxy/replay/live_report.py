"""What a live replay found: the common table's one row, and what only a client of real servers can say."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from kvproxy.replay.live import LiveReplay, LiveSettings
from kvproxy.replay.report import FIGURES, MORE_FIGURES, MORE_LEGEND, ReplayReport, align_columns, name_half, name_row
from kvproxy.replay.results import GoodputLimits, ReplayOutcome, Summary, summarize_outcomes
from kvproxy.replay.settings import Pace
from kvproxy.replay.trace import Half, Trace

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
        """The whole report; `policies` as in virtual time."""
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
        """The same for a plot, which knows no more than what both kinds of replay have."""
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
    """Whatever the replay has by now."""
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
