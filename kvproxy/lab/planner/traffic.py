"""Benefit of cache sizes on a trace: hit rate and TTFT at each, played in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TextIO

from kvproxy.lab.planner.layers import PlanError
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.pooled import measure_bound
from kvproxy.lab.replay.results import Summary, summarize_outcomes
from kvproxy.lab.replay.settings import ReplayFleet, TierPlan
from kvproxy.lab.replay.trace import Trace
from kvproxy.operate.commands.progress import ProgressBar, announce_part


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """The traffic: a trace at a load, which is a share of what the engines reach with the cache that is planned."""

    trace: Trace
    fleet: ReplayFleet
    policy: PolicySpec
    load: float = 0.7
    shares: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)
    host_tokens: int = 0  # of one engine, whatever the size of its cache
    disk_tokens: int = 0
    below: TierPlan = field(default_factory=TierPlan)  # how fast these are

    def fleet_of(self, tokens: int) -> ReplayFleet:
        """Engines with so many tokens of device memory, and what there is below it."""
        fleet = replace(self.fleet, capacity_tokens=tokens)
        if not self.host_tokens and not self.disk_tokens:
            return fleet
        host = self.host_tokens / tokens
        disk = self.disk_tokens / tokens
        return replace(fleet, tiers=replace(self.below, host=host, disk=disk))


@dataclass(frozen=True, slots=True)
class Row:
    """One size of cache, and what the trace made of it."""

    share: float  # of the cache that is planned
    tokens: int  # an engine
    summary: Summary
    ttft_s: Sequence[float]  # every request's, sorted

    @property
    def name(self) -> str:
        """`2x`: for a table."""
        return f"{self.share:g}x"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Goals of the cache; None: no goal."""

    hit_rate: float | None = None
    ttft_s: float | None = None  # on average

    def holds(self, summary: Summary) -> bool:
        """Return a size at which requests fail reaches nothing."""
        return (
            not summary.failed
            and (self.hit_rate is None or summary.hit_rate >= self.hit_rate)
            and (self.ttft_s is None or summary.ttft_mean_s <= self.ttft_s)
        )

    def find_smallest(self, rows: Sequence[Row]) -> Row | None:
        """Return the smallest size that reaches it, and from which on every larger one does."""
        enough = None
        for row in sorted(rows, key=lambda row: -row.tokens):
            if not self.holds(row.summary):
                break
            enough = row
        return enough


def play_sizes(plan: TrafficPlan, *, err: TextIO) -> list[Row]:
    """Every size on the same arrivals, smallest first. Raises PlanError where one holds no block of the trace."""
    sizes = {share: int(plan.fleet.capacity_tokens * share) for share in sorted(plan.shares)}
    if (least := min(sizes.values())) < plan.trace.block_size:
        raise PlanError(f"a cache of {least} tokens holds no block of the trace ({plan.trace.block_size} tokens)")
    announce_part("calibrating the load on one pooled cache", err)
    bound = measure_bound(plan.trace, plan.fleet, plan.load)
    bar = ProgressBar(bound.trace.requests * len(sizes), out=err)
    rows = []
    for share, tokens in sizes.items():
        bar.begin(f"{tokens} tokens")
        outcomes = play_policy(
            bound.trace,
            bound.pace,
            plan.fleet_of(tokens),
            plan.policy.make(rng=Random(1)),
            plan.policy,
            progress=bar.advance,
        )
        bar.end(bound.trace.requests)
        ttft_s = sorted(each.ttft_s for each in outcomes if each.ttft_s is not None)
        rows.append(Row(share, tokens, summarize_outcomes(outcomes, plan.fleet.instances), ttft_s))
    bar.close()
    return rows
