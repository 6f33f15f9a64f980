"""Tier-aware against tier-blind routing on request traces, in virtual time.

    python -m benchmarks.tiers [--requests N] [--jobs N] [--traces T,T...]

Engine memory is cut to a quarter, with host memory of four times what is left, which engines write through to and read
at 20, 5 or 1.5 GB/s; a token's KV is 128 KiB (32 layers, 8 KV heads of 128 values of two bytes). Tier-blind routing
does not hear what events say of host memory; the engines are the same. Loads are stated for engines with all of that
memory on the device. Writes tiers.md and tiers.json of benchmarks/reports.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from benchmarks.by_trace import Rows, measure_traces, ratio_row
from benchmarks.markdown import table
from benchmarks.routing_cells import capacity_tokens_of, trace_of
from kvproxy.replay.compare import PolicySpec, play_policy
from kvproxy.replay.pooled import measure_bound, play_on_pool
from kvproxy.replay.results import summarize_outcomes
from kvproxy.replay.settings import ReplayFleet
from kvproxy.replay.tier_plan import TierPlan

LOADS, INSTANCES = (0.7, 0.9), 8
SPEEDS = (20.0, 5.0, 1.5)
AWARE, BLIND = "kv_aware", "kv_aware+tier_blind"
#: One cache of all engines' size with all memory on the device, routed by exact least work: nothing has to be found.
POOL = "pool"
FALSE, FAILING = "a fifth of the placements false", "a fifth of the reads fail"
AWARE_TARGET, FALSE_TARGET = 0.65, 1.05


@dataclass(frozen=True)
class Cell:
    """One run on a trace."""

    policy: str
    gb_per_s: float
    variant: str = ""
    load: float = LOADS[0]


CELLS = (
    *(Cell(policy, speed, load=load) for load in LOADS for speed in SPEEDS for policy in (BLIND, AWARE)),
    *(Cell(POOL, 0.0, load=load) for load in LOADS),
    *(Cell(AWARE, speed, variant) for speed in SPEEDS for variant in (FALSE, FAILING)),
)


@dataclass(frozen=True)
class Job:
    """All cells of one trace, in another process."""

    requests: int

    def __call__(self, name: str) -> list[dict[str, Any]]:
        fleet = ReplayFleet(instances=INSTANCES, capacity_tokens=capacity_tokens_of(name))
        bounds = {load: measure_bound(trace_of(name), fleet, load) for load in LOADS}
        rows = []
        for cell in CELLS:
            bound = bounds[cell.load]
            trace = bound.trace.cut(min(self.requests, bound.trace.requests))
            plan = TierPlan(
                device=0.25, host=4.0, gb_per_s=cell.gb_per_s, failing_reads=5 if cell.variant == FAILING else 0
            )
            played = replace(fleet, tiers=plan, wrong_share=0.2 if cell.variant == FALSE else 0.0)
            speeds = None
            if cell.policy == POOL:
                outcomes = play_on_pool(trace, bound.pace, fleet)
            else:
                spec = PolicySpec.parse(cell.policy)
                policy = spec.make(rng=Random(1))
                outcomes = play_policy(trace, bound.pace, played, policy, tier_blind=spec.tier_blind, seed=1)
                speeds = policy.speeds
            summary = summarize_outcomes(outcomes, INSTANCES)
            learned = {} if speeds is None else speeds.onboarding.pool_prices(speeds.seconds[1])
            rows.append({
                "trace": name, **asdict(cell), "requests": trace.requests, "failed": summary.failed,
                "ttft_mean_s": round(summary.ttft_mean_s, 5), "ttft_p99_s": round(summary.ttft_p99_s, 5),
                "hit_ratio": round(summary.hit_rate, 4),
                "onboarding_us_per_token": {tier.value: round(1e6 * s, 2) for tier, s in learned.items()},
            })  # fmt: skip
        return rows


def as_markdown(rows: Rows, command: str) -> str:
    """The report."""
    found = {(row["trace"], row["policy"], row["gb_per_s"], row["variant"], row["load"]): row for row in rows}
    traces = list(dict.fromkeys(row["trace"] for row in rows))

    def ratio(speed: float, load: float, figure: str, *, to: tuple[str, str], of: tuple[str, str]) -> list[float]:
        return [
            found[trace, to[0], speed, to[1], load][figure] / found[trace, of[0], speed, of[1], load][figure]
            for trace in traces
        ]

    lines = [
        "# Tiers: what routing gains by knowing what is in host memory", "",
        f"`{command}`. {INSTANCES} simulated engines at a load of what they serve with all memory on the device "
        "and in one pool; engine memory cut to a quarter, host memory of four times that, written through. "
        "A token's KV is 131,072 bytes: 32 layers, 8 KV heads, 128 values each, keys and values, two bytes. "
        "TTFT in ratios; the last column is the geometric mean over the traces.",
    ]  # fmt: skip
    shown = []
    for figure, name in (("ttft_mean_s", "mean TTFT"), ("ttft_p99_s", "p99 TTFT")):
        for load in LOADS:
            for speed in SPEEDS:
                row = ratio(speed, load, figure, to=(AWARE, ""), of=(BLIND, ""))
                target = AWARE_TARGET if figure == "ttft_mean_s" else None
                shown.append(ratio_row(f"{name}, {speed:g} GB/s, load {load}", row, target))
    lines += table(["tier-aware / tier-blind", *traces, "all", "target"], shown)
    lines += [
        "",
        "What there is to be had: the pool has one cache of all engines' size, all of it on the device, so that "
        "nothing is read, and nothing has to be found. On agent_dev a quarter of the memory still holds all that comes "
        "again: nothing lies in host memory alone, and aware is blind. The others would have to be at 0.58 together "
        "for a mean of 0.65, which at load 0.7 is about what the pool is, whose reads cost nothing.",
    ]  # fmt: skip
    had = []
    for load in LOADS:
        for speed in SPEEDS:
            row = [
                found[trace, POOL, 0.0, "", load]["ttft_mean_s"] / found[trace, BLIND, speed, "", load]["ttft_mean_s"]
                for trace in traces
            ]
            had.append(ratio_row(f"mean TTFT, {speed:g} GB/s, load {load}", row))
    lines += table(["pool / tier-blind", *traces, "all", "-"], had)
    disturbed = []
    for variant, target in ((FALSE, FALSE_TARGET), (FAILING, None)):
        for speed in SPEEDS:
            row = ratio(speed, LOADS[0], "ttft_mean_s", to=(AWARE, variant), of=(AWARE, ""))
            disturbed.append(ratio_row(f"{variant} / none, {speed:g} GB/s, load {LOADS[0]}", row, target))
    lines += table(["tier-aware, mean TTFT", *traces, "all", "target"], disturbed)
    figures = []
    for speed in SPEEDS:
        for policy in (BLIND, AWARE):
            cells = [found[trace, policy, speed, "", LOADS[0]] for trace in traces]
            both = [f"{1000 * each['ttft_mean_s']:.0f} ms, {each['hit_ratio']:.2f}" for each in cells]
            figures.append([f"{policy}, {speed:g} GB/s: mean TTFT, hit ratio", *both])
        true_us = 131_072 / speed / 1000
        learned = [found[trace, AWARE, speed, "", LOADS[0]]["onboarding_us_per_token"] for trace in traces]
        prices = [each.get("host", 0.0) for each in learned]
        what = f"host onboarding learned at {speed:g} GB/s, us a token (true: {true_us:.1f})"
        figures.append([what, *(f"{price:.1f}" for price in prices)])
    lines += table(["what", *traces], figures)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure_traces(__doc__ or "", job=Job, as_markdown=as_markdown, requests=4000)
