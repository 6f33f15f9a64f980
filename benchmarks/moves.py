"""KV copied between engines on demand, on request traces in virtual time, against one pooled cache.

    python -m benchmarks.moves [--requests N] [--jobs N] [--seeds N] [--traces T,T...]

Routing may send a request together with what another engine has of its prompt, over a link of 12.5 or 2.5 GB/s each way
of each engine (100 and 20 Gbit/s); a token's KV is 128 KiB. Before the engines is the router queue. Beside them: a link
that copies in no time, and where the time of a request goes. Writes moves.md and moves.json of benchmarks/reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.by_trace import Rows, measure_traces, ratio_row
from benchmarks.markdown import table
from benchmarks.routing_cells import capacity_tokens_of, trace_of
from kvproxy.cluster.routing.work import Features, features_of, seconds_of
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.pooled import average_seconds, measure_bound, play_on_pool
from kvproxy.lab.replay.results import ReplayOutcome, summarize_outcomes
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.lab.replay.transfers import LinkPlan

LOADS, INSTANCES, SPEEDS = (0.7, 0.9), 8, (12.5, 2.5)
FREE = 1e6  # GB/s, with no latency: what copies are worth that take no time
POOL, QUEUE, MOVE = "pool", "kv_aware", "kv_aware+move"
#: Against the pool, and with a fifth of the placements false against none.
TARGETS, FALSE_TARGET = {12.5: 1.00, 2.5: 1.05}, 1.05
FALSE = 0.2


WHERE = (
    "Where the mean time goes, in ms: own prefill (as if alone) + router queue + placing to admission (the copy and "
    "the engine's own line) + the rest of the prefill (beside others); and the hit ratio."
)
NOTE = (
    "What is left above the pool has two parts. A copy's own time is in the third figure: nearly all of the "
    "difference on cc_dev, where in the pool hardly a request waits. And copies are held twice, so that less is found"
    " again than in the pool, as the hit ratio shows; that costs most at load 0.9, where a little more work is much "
    "more waiting. So a copy costs 0.15 of what it saves besides, for the memory it takes, which no link shows; "
    "nothing is copied where requests in flight and the copy would fill nine tenths of an engine; and what a "
    "session's next turns usually wait at an endpoint counts as it does without copies, although the session could "
    "leave again: without these three 1.07, 1.19, 1.04 and 1.18 for the first two speeds at both loads, and 1.04 and "
    "1.08 for copies in no time. Tried on the tuning halves: the price at 0.05, 0.1 and 0.3 (the last better on "
    "toolagent_like_dev, 5 % worse on cc_dev), and more of it the dearer own work is to others; a quarter and half of"
    " those usual waits (half: 1.5 % better at load 0.7, 2.5 % worse at 2.5 GB/s and 0.9); refusing from six tenths "
    "on; giving up first, at the source, what was copied away (up to 5 % better where memory is short, 5 to 10 % "
    "worse on cc_dev, whose sessions come back); comparing each endpoint's cost with and without the copy, a copy's "
    "lateness in full, links at a third of their time, and copying only what takes a quarter of computing (the last "
    "two on toolagent_like_dev and cc_dev alone): within 3 % either way. Copies that no request waits for, made while"
    " the router queue holds it, came to 1.23 and 1.26 at load 0.7 (1.08 and 1.17 with the wait): that way is gone."
)


@dataclass(frozen=True)
class Cell:
    """One run on a trace."""

    policy: str
    load: float
    gb_per_s: float = 0.0
    wrong_share: float = 0.0


CELLS = (
    *(Cell(QUEUE, load) for load in LOADS),
    *(Cell(MOVE, load, speed) for load in LOADS for speed in (*SPEEDS, FREE)),
    *(Cell(MOVE, LOADS[0], speed, FALSE) for speed in SPEEDS),
)


@dataclass(frozen=True)
class Job:
    """All cells of one trace, in another process."""

    requests: int
    seeds: int

    def __call__(self, name: str) -> list[dict[str, Any]]:
        fleet = ReplayFleet(instances=INSTANCES, capacity_tokens=capacity_tokens_of(name))
        rows = []
        for load in LOADS:
            bound = measure_bound(trace_of(name), fleet, load)
            trace = bound.trace.cut(min(self.requests, bound.trace.requests))
            runs = [(Cell(POOL, load), 0, play_on_pool(trace, bound.pace, fleet))]
            for cell in (each for each in CELLS if each.load == load):
                spec = PolicySpec.parse(cell.policy)
                link = LinkPlan(cell.gb_per_s, latency_s=0.0 if cell.gb_per_s == FREE else 0.002)
                played = replace(fleet, link=link, wrong_share=cell.wrong_share)
                for seed in range(1, self.seeds + 1):
                    policy = spec.make(rng=Random(seed))
                    found = play_policy(trace, bound.pace, played, policy, spec, seed=seed)
                    runs.append((cell, seed, found))
            for cell, seed, outcomes in runs:
                summary = summarize_outcomes(outcomes, INSTANCES)
                rows.append({"trace": name, **asdict(cell), "seed": seed, "requests": trace.requests,
                             "failed": summary.failed, "ttft_mean_s": round(summary.ttft_mean_s, 5),
                             "ttft_p99_s": round(summary.ttft_p99_s, 5), "hit_ratio": round(summary.hit_rate, 4),
                             **find_parts(outcomes, average_seconds(fleet))})  # fmt: skip
        return rows


def find_parts(outcomes: Sequence[ReplayOutcome], seconds: Features) -> dict[str, float]:
    """Where the mean time to first token goes: the request's own prefill if it were alone, and what it waits for."""
    own, queued, admitted = [], [], []
    for one in outcomes:
        if one.first_token_at is not None and one.placed_at is not None and one.admitted_at is not None:
            own.append(seconds_of(features_of(one.prompt_tokens - one.cached_tokens, one.cached_tokens), seconds))
            queued.append(one.placed_at - one.arrived_at)
            admitted.append(one.admitted_at - one.placed_at)
    parts = {"own_s": own, "queued_s": queued, "admitted_s": admitted}
    return {name: round(fmean(values), 5) for name, values in parts.items()}


def as_markdown(rows: Rows, command: str) -> str:
    """Render the report."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in rows:
        found.setdefault((run["trace"], *(run[name] for name in Cell.__dataclass_fields__)), []).append(run)
    traces = list(dict.fromkeys(row["trace"] for row in rows))

    def value(trace: str, cell: Cell, figure: str) -> float:
        return fmean(float(row[figure]) for row in found[trace, *astuple(cell)])

    def ratios(figure: str, to: Cell, of: Cell) -> list[float]:
        return [value(trace, to, figure) / value(trace, of, figure) for trace in traces]

    lines = [
        "# Moves: KV that is copied between engines on demand", "",
        f"`{command}`. {INSTANCES} simulated engines behind the router queue, each with a link each way; a token's "
        "KV is 131,072 bytes. A request keeps its place and waits for its copy where that costs less than computing. "
        "The pool is one cache of all engines' size, routed by exact least work. TTFT in ratios, means of "
        f"{len({row['seed'] for row in rows if row['seed']})} seeds; the last but one column is the geometric mean. "
        "`copied in no time`: a link without end, what copies could be worth at most; `nothing waits`: what the pool "
        "itself would be if no request waited for anything, only its own prefill of what the pool lacks.",
    ]  # fmt: skip
    shown = []
    for figure, name in (("ttft_mean_s", "mean"), ("ttft_p99_s", "p99")):
        for load in LOADS:
            row = ratios(figure, Cell(QUEUE, load), Cell(POOL, load))
            shown.append(ratio_row(f"{name}, load {load}, no copies", row))
            for speed in SPEEDS:
                row = ratios(figure, Cell(MOVE, load, speed), Cell(POOL, load))
                target = TARGETS[speed] if figure == "ttft_mean_s" else None
                shown.append(ratio_row(f"{name}, load {load}, {speed:g} GB/s", row, target))
            row = ratios(figure, Cell(MOVE, load, FREE), Cell(POOL, load))
            shown.append(ratio_row(f"{name}, load {load}, copied in no time", row))
            if figure == "ttft_mean_s":
                alone = [value(one, Cell(POOL, load), "own_s") / value(one, Cell(POOL, load), figure) for one in traces]
                shown.append(ratio_row(f"{name}, load {load}, nothing waits", alone))
    lines += table(["of the pool", *traces, "all", "target"], shown)
    disturbed = []
    for speed in SPEEDS:
        row = ratios("ttft_mean_s", Cell(MOVE, LOADS[0], speed, FALSE), Cell(MOVE, LOADS[0], speed))
        disturbed.append(ratio_row(f"load {LOADS[0]}, {speed:g} GB/s", row, FALSE_TARGET))
    lines += table(["a fifth of the placements false / none, mean", *traces, "all", "target"], disturbed)
    lines += ["", WHERE]
    parts_of = []
    for load in LOADS:
        moves = (Cell(MOVE, load, speed) for speed in (*SPEEDS, FREE))
        for cell in (Cell(POOL, load), Cell(QUEUE, load), *moves):
            speed_name = (
                "" if not cell.gb_per_s else f", {cell.gb_per_s:g} GB/s" if cell.gb_per_s < FREE else ", no time"
            )
            row_of = [f"{cell.policy}{speed_name}, load {load}"]
            for trace in traces:
                parts = [1000 * value(trace, cell, part) for part in ("own_s", "queued_s", "admitted_s")]
                rest = 1000 * value(trace, cell, "ttft_mean_s") - sum(parts)
                times = " + ".join(f"{part:.0f}" for part in (*parts, rest))
                row_of.append(f"{times}; {value(trace, cell, 'hit_ratio'):.3f}")
            parts_of.append(row_of)
    lines += table(["ms", *traces], parts_of)
    lines += ["", NOTE]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure_traces(__doc__ or "", job=Job, as_markdown=as_markdown, requests=4000, seeds=2)
