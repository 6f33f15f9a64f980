"""Answers that are not streamed: their first tokens are hidden, their engines' speeds are not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from random import Random

import pytest

from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.speeds import SpeedEstimates
from kvproxy.lab.replay.compare import ComparisonPlan, PolicySpec, compare, play_policy
from kvproxy.lab.replay.pooled import Bound, measure_bound
from kvproxy.lab.replay.results import ReplayOutcome, summarize_outcomes
from kvproxy.lab.replay.settings import JITTER_S, Pace, ReplayFleet
from kvproxy.lab.replay.trace import read_trace
from tests.lab.replay.traces import shared_prefix_trace

TRACES = Path(__file__).parents[3] / "benchmarks/traces"
SEEDS = (1, 2)
#: Half of the engines at 0.4 of the others' speed.
HALF_SLOW = ReplayFleet(instances=4, slowness=(2.5, 2.5))


@cache
def paced() -> Bound:
    """Pace real conversations at a load that this fleet can carry."""
    trace = read_trace(TRACES / "conv_dev.jsonl.gz").cut(400)
    return measure_bound(trace, HALF_SLOW.undisturbed(), 0.4, closed_loop=True)


@cache
def run(*, streamed: float, seed: int = 1) -> tuple[float, SpeedEstimates]:
    """Return the mean time to first token, and the speeds that were learned."""
    policy = KvAware(rng=Random(seed))
    outcomes = play_policy(paced().trace, paced().pace, HALF_SLOW, policy, seed=seed, streamed=streamed)
    return summarize_outcomes(outcomes, HALF_SLOW.instances).ttft_mean_s, policy.speeds.estimates(last(outcomes))


def last(outcomes: object) -> float:
    assert isinstance(outcomes, list)
    return max(one.arrived_at for one in outcomes if isinstance(one, ReplayOutcome))


@pytest.mark.slow
def test_unary_traffic_is_routed_as_well_as_streamed() -> None:
    """Half the fleet at 0.4x: the mean time to first token is within 5 % of what streams teach."""
    streamed = sum(run(streamed=1.0, seed=seed)[0] for seed in SEEDS)
    unary = sum(run(streamed=0.0, seed=seed)[0] for seed in SEEDS)
    assert unary < 1.05 * streamed


def test_slow_engines_are_seen_without_a_single_stream() -> None:
    """By what engines count themselves."""
    _, learned = run(streamed=0.0)
    assert learned.samples_by_kind["streamed"] == 0
    assert learned.samples_by_kind["scraped"] == learned.samples > 100
    slow, fast = (sum(learned.slowness[f"e{one}"] for one in pair) for pair in ((0, 1), (2, 3)))  # type: ignore[index]
    assert 1.7 < slow / fast < 3.0


def test_mixed_traffic_learns_from_both() -> None:
    """Each kind is counted."""
    _, learned = run(streamed=0.5)
    assert min(learned.samples_by_kind.values()) > 100


def test_seeds_are_other_runs_of_the_same_trace() -> None:
    """From the second on, sessions start up to half a second later: the spread of a figure can be seen."""
    trace = shared_prefix_trace()
    plain = Pace().arrivals(trace)
    later = [
        at - before for (at, *_), (before, *_) in zip(Pace().arrivals(trace, jitter=Random(2)), plain, strict=True)
    ]
    assert 0.0 <= min(later) < max(later) <= JITTER_S
    means = {
        summarize_outcomes(play_policy(trace, Pace(), HALF_SLOW, KvAware(rng=Random(seed)), seed=seed), 4).ttft_mean_s
        for seed in (1, 2, 3)
    }
    assert len(means) == 3


def test_the_table_tells_how_far_seeds_differ() -> None:
    """Every ratio has its standard error; a single run has none."""
    plan = ComparisonPlan(HALF_SLOW, [PolicySpec.parse("lmetric"), PolicySpec.parse("kv_aware")], seeds=3)
    several = compare(shared_prefix_trace(), plan, err=StringIO())
    report = several.report
    assert report.policies["kv_aware"].ttft_mean_sd_s > 0.0
    assert (report.ratio("kv_aware").error or 0.0) > 0.0
    assert str(report.ratio("kv_aware")) in report.render_table()
    assert str(report.distance("kv_aware")) in report.render_table()
    single = compare(shared_prefix_trace(), replace(plan, seeds=1), err=StringIO())
    assert "±" not in single.report.render_table()
    assert several.ttft_s == single.ttft_s  # request by request those of the first seed are kept
