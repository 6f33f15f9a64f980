"""Several policies on one paced trace, each over several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import TextIO

from kvproxy.replay.outcome import Summary, summarise
from kvproxy.replay.pooled import Bound, paced_bound
from kvproxy.replay.progress import ProgressBar, announce
from kvproxy.replay.report import Report, mean_of
from kvproxy.replay.scenario import PolicySpec, play
from kvproxy.replay.settings import FleetSettings
from kvproxy.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class Comparison:
    """The report, and every request's time to first token by policy (first seed), sorted."""

    report: Report
    ttft_s: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare. The load is a share of the pooled cache's saturated throughput on an undisturbed fleet."""

    fleet: FleetSettings
    policies: Sequence[PolicySpec]
    load: float = 0.7
    baseline: str = ""  # the first policy unless given
    seeds: int = 1
    closed_loop: bool = True
    prior_factor: float = 1.0
    streamed: float = 1.0  # share of the answers


def compare(trace: Trace, plan: Plan, *, err: TextIO, bound: Bound | None = None) -> Comparison:
    """Plays every policy; `bound` spares calibrating the pace anew."""
    if bound is None:
        announce("calibrating the load on one pooled cache", err)
        bound = paced_bound(trace, plan.fleet.undisturbed(), plan.load, closed_loop=plan.closed_loop)
    requests = bound.trace.requests
    bar = ProgressBar(requests * plan.seeds * len(plan.policies), out=err)
    summaries: dict[str, Summary] = {}
    ttft_s: dict[str, list[float]] = {}
    for spec in plan.policies:
        bar.begin(str(spec))
        runs = []
        for seed in range(1, plan.seeds + 1):
            policy = spec.make(rng=Random(seed), prior_factor=plan.prior_factor)
            outcomes = play(
                bound.trace,
                bound.pace,
                plan.fleet,
                policy,
                queue=spec.queue,
                seed=seed,
                streamed=plan.streamed,
                progress=bar.advance,
            )
            bar.end(requests)
            runs.append(summarise(outcomes, plan.fleet.instances))
            ttft_s.setdefault(str(spec), sorted(each.ttft_s for each in outcomes if each.ttft_s is not None))
        summaries[str(spec)] = mean_of(runs)
    bar.close()
    return Comparison(_report(trace, plan, bound, summaries), ttft_s)


def _report(trace: Trace, plan: Plan, bound: Bound, summaries: dict[str, Summary]) -> Report:
    return Report(
        trace=trace.name,
        instances=plan.fleet.instances,
        load=plan.load,
        requests=bound.trace.requests,
        hit_ceiling=bound.trace.hit_ceiling(),
        bound_ttft_mean_s=bound.ttft_mean_s,
        bound_ttft_p99_s=bound.ttft_p99_s,
        baseline=plan.baseline or next(iter(summaries)),
        policies=summaries,
        settings={
            "fleet": asdict(plan.fleet),
            "pace": asdict(bound.pace),
            "seeds": plan.seeds,
            "prior_factor": plan.prior_factor,
            "streamed": plan.streamed,
            "requests_per_s_at_load_1": bound.capacity_per_s,
        },
        of_trace=trace.requests if trace.requests != bound.trace.requests else 0,
    )
