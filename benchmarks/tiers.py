"""Tier-aware against tier-blind routing on request traces, in virtual time.

    python -m benchmarks.tiers [--requests N] [--jobs N] [--seeds N] [--traces T,T...]

Engine memory is cut to a quarter, with host memory of four times what is left, which engines write through to and read
at 20, 5 or 1.5 GB/s; a token's KV is 128 KiB (32 layers, 8 KV heads of 128 values of two bytes). Tier-blind routing
ignores events of host memory; the engines are the same. Loads are stated for engines with all of that memory on the
device. Writes tiers.md and tiers.json of benchmarks/reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.by_trace import Rows, measure_traces, ratio_row
from benchmarks.markdown import table
from benchmarks.moves import find_parts
from benchmarks.routing_cells import capacity_tokens_of, trace_of
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.pooled import Bound, average_seconds, measure_bound, play_on_pool
from kvproxy.lab.replay.results import summarize_outcomes
from kvproxy.lab.replay.settings import ReplayFleet, TierPlan
from kvproxy.lab.replay.trace import Trace

LOADS, INSTANCES = (0.7, 0.9), 8
SPEEDS = (20.0, 5.0, 1.5)
AWARE, BLIND = "kv_aware", "kv_aware+tier_blind"
#: One cache of all engines' size with all memory on the device, routed by exact least work: nothing has to be found.
POOL = "pool"
#: Reads that cost nothing, and engines with all of the memory on the device: what is between a figure and the pool.
FREE, DEVICE = 1e6, "kv_aware, all on the device"
FALSE, FAILING = "a fifth of the placements false", "a fifth of the reads fail"
AWARE_TARGET, FALSE_TARGET = 0.65, 1.05

FLOOR = (
    "What is between a figure and the least there is, step by step, each to tier-blind at that speed: the reads' "
    "own time, host memory being no device memory, the cache being eight and not one, and waiting as such. What "
    "the last line says no routing can reach; and a wanted 0.65 is out of reach of knowing tiers where the third "
    "line is above it, as at load 0.7. On agent_dev a quarter of the memory still holds all that comes again: "
    "nothing lies in host memory alone, and aware is blind. A read takes 6.6, 26 and 87 us a token, computing 100 "
    "and more behind a longer prompt (200 behind 32,000 tokens), and a read holds up the engine's step as "
    "computing does: at 1.5 GB/s what is found in host memory is worth little."
)


@dataclass(frozen=True)
class Cell:
    """One run on a trace."""

    policy: str
    gb_per_s: float
    variant: str = ""
    load: float = LOADS[0]


CELLS = (
    *(Cell(policy, speed, load=load) for load in LOADS for speed in SPEEDS for policy in (BLIND, AWARE)),
    *(Cell(policy, 0.0, load=load) for load in LOADS for policy in (POOL, DEVICE)),
    *(Cell(AWARE, FREE, load=load) for load in LOADS),
    *(Cell(AWARE, speed, variant) for speed in SPEEDS for variant in (FALSE, FAILING)),
)


@dataclass(frozen=True)
class Job:
    """All cells of one trace, in another process."""

    requests: int
    seeds: int

    def __call__(self, name: str) -> list[dict[str, Any]]:
        fleet = ReplayFleet(instances=INSTANCES, capacity_tokens=capacity_tokens_of(name))
        bounds = {load: measure_bound(trace_of(name), fleet, load) for load in LOADS}
        rows: list[dict[str, Any]] = []
        for cell in CELLS:
            bound = bounds[cell.load]
            trace = bound.trace.cut(min(self.requests, bound.trace.requests))
            rows += [
                {"trace": name, **asdict(cell), "seed": seed, "requests": trace.requests,
                 **_play(trace, bound, fleet, cell, seed)}
                for seed in range(1, 1 + (1 if cell.policy == POOL else self.seeds))
            ]  # fmt: skip
        return rows


def _play(trace: Trace, bound: Bound, fleet: ReplayFleet, cell: Cell, seed: int) -> dict[str, Any]:
    speeds, seconds = None, (0.0, *average_seconds(fleet)[1:])  # of the prompt alone, beside no decodes
    if cell.policy == POOL:
        outcomes = play_on_pool(trace, bound.pace, fleet)
    else:
        free, failing = cell.gb_per_s == FREE, 5 if cell.variant == FAILING else 0
        plan = TierPlan(device=0.25, host=4.0, gb_per_s=cell.gb_per_s or FREE, failing_reads=failing,
                        latency_s=0.0 if free else 0.001)  # fmt: skip
        tiers = None if cell.policy == DEVICE else plan
        played = replace(fleet, tiers=tiers, wrong_share=0.2 if cell.variant == FALSE else 0.0)
        spec = PolicySpec.parse(AWARE if cell.policy == DEVICE else cell.policy)
        policy = spec.make(rng=Random(seed))
        outcomes = play_policy(trace, bound.pace, played, policy, replace(spec, queue=False), seed=seed)
        speeds = policy.speeds
    summary = summarize_outcomes(outcomes, INSTANCES)
    learned = {} if speeds is None else speeds.onboarding.pool_prices(speeds.seconds[1])
    return {
        "failed": summary.failed, "hit_ratio": round(summary.hit_rate, 4),
        "ttft_mean_s": round(summary.ttft_mean_s, 5), "ttft_p99_s": round(summary.ttft_p99_s, 5),
        **find_parts(outcomes, seconds),
        "onboarding_us_per_token": {tier.value: round(1e6 * s, 2) for tier, s in learned.items()},
    }  # fmt: skip


def as_markdown(rows: Rows, command: str) -> str:
    """Render the report."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in rows:
        cell = run["trace"], run["policy"], run["gb_per_s"], run["variant"], run["load"]
        found.setdefault(cell, []).append(run)
    traces = list(dict.fromkeys(row["trace"] for row in rows))

    def value(trace: str, policy: str, speed: float, load: float, figure: str, variant: str = "") -> float:
        return fmean(float(row[figure]) for row in found[trace, policy, speed, variant, load])

    def ratio(speed: float, load: float, figure: str, *, to: tuple[str, str], of: tuple[str, str]) -> list[float]:
        return [
            value(trace, to[0], speed, load, figure, to[1]) / value(trace, of[0], speed, load, figure, of[1])
            for trace in traces
        ]

    lines = [
        "# Tiers: what routing gains by knowing what is in host memory", "",
        f"`{command}`. {INSTANCES} simulated engines at a load of what they serve with all memory on the device "
        "and in one pool; engine memory cut to a quarter, host memory of four times that, written through. "
        "A token's KV is 131,072 bytes: 32 layers, 8 KV heads, 128 values each, keys and values, two bytes. "
        f"TTFT in ratios, means of {max(row['seed'] for row in rows)} seeds; the last column but one is the geometric "
        "mean over the traces.",
    ]  # fmt: skip
    shown = []
    for figure, name in (("ttft_mean_s", "mean TTFT"), ("ttft_p99_s", "p99 TTFT")):
        for load in LOADS:
            for speed in SPEEDS:
                row = ratio(speed, load, figure, to=(AWARE, ""), of=(BLIND, ""))
                target = AWARE_TARGET if figure == "ttft_mean_s" else None
                shown.append(ratio_row(f"{name}, {speed:g} GB/s, load {load}", row, target))
    lines += table(["tier-aware / tier-blind", *traces, "all", "target"], shown)
    lines += ["", FLOOR]
    for load in LOADS:
        chain = []
        for speed in SPEEDS:
            steps = (
                (f"tier-aware, {speed:g} GB/s", AWARE, speed, "ttft_mean_s"),
                ("...if reads took no time", AWARE, FREE, "ttft_mean_s"),
                ("...with all memory on the device", DEVICE, 0.0, "ttft_mean_s"),
                ("...and that in one pool", POOL, 0.0, "ttft_mean_s"),
                ("...and no request waited", POOL, 0.0, "own_s"),
            )
            for what, policy, gb_per_s, figure in steps:
                row = [
                    value(one, policy, gb_per_s, load, figure) / value(one, BLIND, speed, load, "ttft_mean_s")
                    for one in traces
                ]
                chain.append(ratio_row(what, row))
        lines += table([f"mean TTFT / tier-blind, load {load}", *traces, "all", "-"], chain)
    disturbed = []
    for variant, target in ((FALSE, FALSE_TARGET), (FAILING, None)):
        for speed in SPEEDS:
            row = ratio(speed, LOADS[0], "ttft_mean_s", to=(AWARE, variant), of=(AWARE, ""))
            disturbed.append(ratio_row(f"{variant} / none, {speed:g} GB/s, load {LOADS[0]}", row, target))
    lines += table(["tier-aware, mean TTFT", *traces, "all", "target"], disturbed)
    figures = []
    for speed in SPEEDS:
        for policy in (BLIND, AWARE):
            both = [
                f"{1000 * value(one, policy, speed, LOADS[0], 'ttft_mean_s'):.0f} ms, "
                f"{value(one, policy, speed, LOADS[0], 'hit_ratio'):.2f}"
                for one in traces
            ]
            figures.append([f"{policy}, {speed:g} GB/s: mean TTFT, hit ratio", *both])
        true_us = 131_072 / speed / 1000
        learned = [found[trace, AWARE, speed, "", LOADS[0]][0]["onboarding_us_per_token"] for trace in traces]
        prices = [each.get("host", 0.0) for each in learned]
        what = f"host onboarding learned at {speed:g} GB/s, us a token (true: {true_us:.1f})"
        figures.append([what, *(f"{price:.1f}" for price in prices)])
    lines += table(["what", *traces], figures)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure_traces(__doc__ or "", job=Job, as_markdown=as_markdown, requests=4000, seeds=2)
