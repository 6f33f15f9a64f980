"""Prefill apart from decode, chosen per request and by others' rules, on request traces in virtual time.

    python -m benchmarks.disaggregation [--requests N] [--jobs N] [--seeds N] [--traces T,T...]

Eight engines, routed by kv_aware: all alike, or 2 that prefill for 6, or 4 for 4. A pull goes over a link of 12.5 GB/s,
or over one that takes 50 times as long; a token's KV is 128 KiB. The prompt is computed where the plan of
kvproxy/features/disaggregation expects the first token earlier, always elsewhere, or by Dynamo's rule (local below
2,048 uncached tokens that are less than 0.7 of the prompt) or llm-d's threshold (elsewhere from 512 uncached tokens
on). Writes disaggregation.md and disaggregation.json of benchmarks/reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.by_trace import Rows, measure_traces
from benchmarks.markdown import table
from benchmarks.routing_cells import capacity_tokens_of, trace_of
from kvproxy.features.disaggregation.plan import LATENCY_S
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.pooled import measure_bound
from kvproxy.lab.replay.results import GoodputLimits, summarize_outcomes
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.lab.simulator.timing import TokenGaps

ENGINES = 8
LOADS = (0.7, 0.9)
LIMITS = GoodputLimits(ttft_s=2.0, tpot_s=0.05)
PULLS_PER_S = 1 / ReplayFleet().pull_s_per_token
SLOWNESS = 50  # of the slow link
#: Engines that prefill alone, of eight, and the rule.
CELLS = tuple(
    (prefill, rule)
    for prefill in (0, 2, 4)
    for rule in ("never", "chosen", "always", "dynamo", "llm_d", "chosen, slow", "always, slow")
    if prefill or rule in ("never", "chosen")
)
NOTES = """48 of 50 are within 5 % in both figures. In the two others, agent_dev, one and three of 300 requests are
separated: the prefiller holds their hot prefix, the decoder does not, and what comes to the decoder meanwhile goes
first. (Counting the decode leg as work there until its pull is done mends these, and costs others up to four times the
first tokens.)

The least ITL of both cannot be had: always separating keeps decoders free of prompts, so its p99 is that of decoding
alone (10 to 40 ms), but prefillers are too few for all prompts, and first tokens take 0.5 to 133 s. The plan prices a
prefill's delay of answers as `kv_aware` does, at 0.04 of it for each. A higher price buys ITL with first tokens, and no
price that was tried has both within 5 % where prompts are worth separating (`0.04 / 0.25 / 1`, load 0.7):
toolagent_like_dev on 4+4 mean TTFT 381 / 392 / 431 ms, ITL p99 89 / 59 / 42 (always 515 and 39), on 2+6 346 / 371 / 417
and 99 / 58 / 47 (always 6,497 and 12); conv_dev on 8 2,400 / 2,629 / 3,456 and 317 / 276 / 231 (never 2,328 and 330),
on 4+4 2,921 / 3,416 / 4,266 and 260 / 240 / 103 (always 27,642 and 14). So the price stays. Engines are simulated.

The free memory of the decoder is no term of the plan: it needs room for the prompt by either. Measured with an oracle
that kept prompts for which the decoder had no room, at an eighth and a quarter of the memory (conv_dev and msyn_dev,
load 0.7): mean TTFT 0.83 to 1.11 of that without, 0.98 on average, and more than 1.06 in two of eight cells."""


def play(trace: Any, pace: Any, fleet: ReplayFleet, prefill: int, rule: str, seed: int) -> dict[str, Any]:
    """Return the figures of one run with so many engines that prefill alone."""
    gaps = TokenGaps()
    name, _, link = rule.partition(", ")
    spec = replace(PolicySpec.parse("kv_aware+no_admission"), apart=name)
    outcomes = play_policy(
        trace,
        pace,
        replace(fleet, prefill=prefill, pull_s_per_token=fleet.pull_s_per_token * (SLOWNESS if link else 1)),
        spec.make(rng=Random(seed)),
        spec,
        seed=seed,
        token_gaps=gaps,
    )
    summary = summarize_outcomes(outcomes, ENGINES, token_gaps=gaps, limits=LIMITS)
    return {
        "prefill": prefill,
        "rule": rule,
        "seed": seed,
        "requests": summary.requests,
        "failed": summary.failed,
        "separated": sum(one.prefilled_at >= 0 for one in outcomes),
        "ttft_mean_s": round(summary.ttft_mean_s, 5),
        "ttft_p99_s": round(summary.ttft_p99_s, 5),
        "itl_p99_s": round(summary.itl_p99_s, 5),
        "e2e_mean_s": round(summary.e2e_mean_s, 5),
        "goodput": round(summary.goodput, 4),
    }


@dataclass(frozen=True)
class Job:
    """All cells of one trace, in another process."""

    requests: int
    seeds: int

    def __call__(self, name: str) -> list[dict[str, Any]]:
        fleet = ReplayFleet(instances=ENGINES, capacity_tokens=capacity_tokens_of(name))
        rows = []
        for load in LOADS:
            bound = measure_bound(trace_of(name), fleet, load)
            trace = bound.trace.cut(min(self.requests, bound.trace.requests))
            for prefill, rule in CELLS:
                for seed in range(1, self.seeds + 1):
                    run = play(trace, bound.pace, fleet, prefill, rule, seed)
                    rows.append({"trace": name, "load": load, **run})
        return rows


def as_markdown(rows: Rows, command: str) -> str:
    """Render the report."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))

    def value(trace: str, load: float, cell: tuple[int, str], figure: str) -> float:
        prefill, rule = cell
        wanted = {"trace": trace, "load": load, "prefill": prefill, "rule": rule}
        return fmean(row[figure] for row in rows if wanted.items() <= row.items())

    lines = [
        "# Prefill apart from decode", "",
        f"`{command}`. {ENGINES} simulated engines behind the router queue; a pull at {PULLS_PER_S:,.0f} tokens/s and "
        f"{1000 * LATENCY_S:g} ms, at a {SLOWNESS}th of that where it says `slow`. `8` are engines that do both, `2+6` "
        f"two that prefill for six. Within limits: the first token in {LIMITS.ttft_s:g} s, and "
        f"{1000 * LIMITS.tpot_s:g} ms a token.",
    ]  # fmt: skip
    figures = (
        ("ttft_mean_s", "mean TTFT, ms", 1000),
        ("itl_p99_s", "ITL p99, ms", 1000),
        ("e2e_mean_s", "mean completion, s", 1),
        ("goodput", "share within limits", 1),
    )
    for load in LOADS:
        for figure, name, factor in figures:
            shown = []
            for cell in CELLS:
                found = [factor * value(trace, load, cell, figure) for trace in traces]
                shown.append([_name(*cell), *(f"{one:.3g}" for one in found)])
            lines += table([f"{name}, load {load}", *traces], shown)
    shares = []
    for cell in CELLS:
        row = [_name(*cell)]
        for trace in traces:
            counts = (value(trace, LOADS[0], cell, name) for name in ("separated", "requests"))
            separated, requests = counts
            row.append(f"{separated / requests:.2f}")
        shares.append(row)
    lines += table([f"share separated, load {LOADS[0]}", *traces], shares)
    lines += [
        "",
        "The choice against that of always and never with the earlier first tokens (of 8 that do both: never); within "
        "5 % in bold.",
    ]
    for figure, name, _ in figures[:2]:
        ratios = []
        for load in LOADS:
            for prefill, link in ((0, ""), (2, ""), (4, ""), (2, ", slow"), (4, ", slow")):
                row = [f"{_name(prefill, 'chosen')}{link}, load {load}"]
                for trace in traces:
                    rules = ("never", f"always{link}") if prefill else ("never",)
                    waits = {value(trace, load, (prefill, rule), "ttft_mean_s"): rule for rule in rules}
                    best = value(trace, load, (prefill, waits[min(waits)]), figure)
                    ratio = value(trace, load, (prefill, f"chosen{link}"), figure) / best
                    row.append(f"**{ratio:.2f}**" if ratio <= 1.05 else f"{ratio:.2f}")
                ratios.append(row)
        lines += table([name.partition(",")[0], *traces], ratios)
    lines += ["", NOTES]
    return "\n".join(lines) + "\n"


def _name(prefill: int, rule: str) -> str:
    return f"{prefill}+{ENGINES - prefill}, {rule}" if prefill else f"{ENGINES}, {rule}"


if __name__ == "__main__":
    measure_traces(__doc__ or "", job=Job, as_markdown=as_markdown, requests=2000, seeds=1)
