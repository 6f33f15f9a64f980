"""Several policies on one paced trace, each over several seeds, with a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import TextIO

from kvproxy.replay.pooled import Bound, measure_bound
from kvproxy.replay.report import ReplayReport
from kvproxy.replay.results import GoodputLimits, Summary, summarize_outcomes
from kvproxy.replay.scenario import PolicySpec, play_policy
from kvproxy.replay.settings import ReplayFleet
from kvproxy.replay.trace import Trace
from kvproxy.simulator.timing import TokenGaps

_WIDTH = 30


def announce_part(what: str, out: TextIO) -> None:
    """A part without figures begins; on a terminal the bar takes the line over."""
    out.write(f"\r\033[K{what} ..." if out.isatty() else f"{what} ...\n")
    out.flush()


class ProgressBar:
    """One line, redrawn at most a hundred times."""

    def __init__(self, total: int, *, out: TextIO) -> None:
        self._total = max(1, total)
        self._out = out if out.isatty() else None
        self._plain = None if out.isatty() else out
        self._drawn = -1
        self._label = ""
        self._before = 0

    def begin(self, label: str) -> None:
        """A part of the work begins; `advance` counts within it."""
        self._label = label
        self._drawn = -1
        if self._plain is not None:
            announce_part(f"replaying {label}", self._plain)
        self.advance(0)

    def advance(self, done: int) -> None:
        """`done` of this part is finished."""
        percent = min(100, 100 * (self._before + done) // self._total)
        if self._out is None or percent == self._drawn:
            return
        self._drawn = percent
        filled = percent * _WIDTH // 100
        self._out.write(f"\r\033[K[{'#' * filled}{'.' * (_WIDTH - filled)}] {percent:3d} %  {self._label}")
        self._out.flush()

    def end(self, done: int) -> None:
        """The part is finished."""
        self._before += done

    def close(self) -> None:
        """Takes the bar away."""
        if self._out is not None:
            self._out.write("\r\033[K")
            self._out.flush()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The report, and every request's time to first token by policy (first seed), sorted."""

    report: ReplayReport
    ttft_s: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """What to compare. The load is a share of the pooled cache's saturated throughput on an undisturbed fleet."""

    fleet: ReplayFleet
    policies: Sequence[PolicySpec]
    load: float = 0.7
    baseline: str = ""  # the first policy unless given
    seeds: int = 1
    closed_loop: bool = True
    prior_factor: float = 1.0
    streamed: float = 1.0  # share of the answers
    goodput: GoodputLimits = field(default_factory=GoodputLimits)


def compare(trace: Trace, plan: ComparisonPlan, *, err: TextIO, bound: Bound | None = None) -> Comparison:
    """Plays every policy; with `bound` the pace is not calibrated again."""
    if bound is None:
        announce_part("calibrating the load on one pooled cache", err)
        bound = measure_bound(
            trace, plan.fleet.undisturbed(), plan.load, closed_loop=plan.closed_loop, limits=plan.goodput
        )
    requests = bound.trace.requests
    bar = ProgressBar(requests * plan.seeds * len(plan.policies), out=err)
    runs: dict[str, list[Summary]] = {}
    ttft_s: dict[str, list[float]] = {}
    for spec in plan.policies:
        bar.begin(str(spec))
        for seed in range(1, plan.seeds + 1):
            token_gaps = TokenGaps()
            policy = spec.make(rng=Random(seed), prior_factor=plan.prior_factor)
            outcomes = play_policy(
                bound.trace,
                bound.pace,
                plan.fleet,
                policy,
                queue=spec.queue,
                priority=spec.priority,
                seed=seed,
                streamed=plan.streamed,
                token_gaps=token_gaps,
                progress=bar.advance,
            )
            bar.end(requests)
            summary = summarize_outcomes(outcomes, plan.fleet.instances, token_gaps=token_gaps, limits=plan.goodput)
            runs.setdefault(str(spec), []).append(summary)
            ttft_s.setdefault(str(spec), sorted(each.ttft_s for each in outcomes if each.ttft_s is not None))
    bar.close()
    return Comparison(_report(trace, plan, bound, runs), ttft_s)


def _report(trace: Trace, plan: ComparisonPlan, bound: Bound, runs: dict[str, list[Summary]]) -> ReplayReport:
    return ReplayReport(
        trace=trace.name,
        half=trace.half,
        instances=plan.fleet.instances,
        load=plan.load,
        requests=bound.trace.requests,
        hit_ceiling=bound.trace.hit_ceiling(),
        reference=bound.summary,
        baseline=plan.baseline or next(iter(runs)),
        runs=runs,
        settings={
            "fleet": asdict(plan.fleet),
            "pace": asdict(bound.pace),
            "seeds": plan.seeds,
            "prior_factor": plan.prior_factor,
            "streamed": plan.streamed,
            "goodput": asdict(plan.goodput),
            "requests_per_s_at_load_1": bound.capacity_per_s,
        },
        of_trace=trace.requests if trace.requests != bound.trace.requests else 0,
    )
