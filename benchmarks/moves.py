"""KV copied between engines on demand, on request traces in virtual time, against one pooled cache.

    python -m benchmarks.moves [--requests N] [--jobs N] [--traces T,T...]

Routing may send a request together with what another engine has of its prompt, over a link of 12.5 or 2.5 GB/s each way
of each engine (100 and 20 Gbit/s); a token's KV is 128 KiB. Before the engines is the router queue. Writes moves.md and
moves.json of benchmarks/reports.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, replace
from random import Random
from typing import Any

from benchmarks.by_trace import Rows, measure_traces, ratio_row
from benchmarks.markdown import table
from benchmarks.routing_cells import capacity_tokens_of, trace_of
from kvproxy.replay.compare import PolicySpec, play_policy
from kvproxy.replay.pooled import measure_bound, play_on_pool
from kvproxy.replay.results import summarize_outcomes
from kvproxy.replay.settings import ReplayFleet
from kvproxy.replay.transfers import LinkPlan

LOADS, INSTANCES, SPEEDS = (0.7, 0.9), 8, (12.5, 2.5)
POOL, QUEUE, MOVE = "pool", "kv_aware+queue", "kv_aware+queue+move"
#: Against the pool, and with a fifth of the placements false against none.
TARGETS, FALSE_TARGET = {12.5: 1.00, 2.5: 1.05}, 1.05
FALSE = 0.2


@dataclass(frozen=True)
class Cell:
    """One run on a trace."""

    policy: str
    load: float
    gb_per_s: float = 0.0
    wrong_share: float = 0.0
    waits: bool = True


CELLS = (
    *(Cell(QUEUE, load) for load in LOADS),
    *(Cell(MOVE, load, speed) for load in LOADS for speed in SPEEDS),
    *(Cell(MOVE, LOADS[0], speed, FALSE) for speed in SPEEDS),
    *(Cell(MOVE, LOADS[0], speed, waits=False) for speed in SPEEDS),
)


@dataclass(frozen=True)
class Job:
    """All cells of one trace, in another process."""

    requests: int

    def __call__(self, name: str) -> list[dict[str, Any]]:
        fleet = ReplayFleet(instances=INSTANCES, capacity_tokens=capacity_tokens_of(name))
        rows = []
        for load in LOADS:
            bound = measure_bound(trace_of(name), fleet, load)
            trace = bound.trace.cut(min(self.requests, bound.trace.requests))
            pooled = play_on_pool(trace, bound.pace, fleet)
            runs = [(Cell(POOL, load), pooled)]
            for cell in (each for each in CELLS if each.load == load):
                spec = PolicySpec.parse(cell.policy)
                link = LinkPlan(cell.gb_per_s, waits=cell.waits)
                played = replace(fleet, link=link, wrong_share=cell.wrong_share)
                policy = spec.make(rng=Random(1))
                runs.append((cell, play_policy(trace, bound.pace, played, policy, queue=True, move=spec.move, seed=1)))
            for cell, outcomes in runs:
                summary = summarize_outcomes(outcomes, INSTANCES)
                rows.append({"trace": name, **asdict(cell), "requests": trace.requests, "failed": summary.failed,
                             "ttft_mean_s": round(summary.ttft_mean_s, 5),
                             "ttft_p99_s": round(summary.ttft_p99_s, 5),
                             "hit_ratio": round(summary.hit_rate, 4)})  # fmt: skip
        return rows


def as_markdown(rows: Rows, command: str) -> str:
    """The report."""
    found = {(row["trace"], *(row[name] for name in Cell.__dataclass_fields__)): row for row in rows}
    traces = list(dict.fromkeys(row["trace"] for row in rows))

    def ratios(figure: str, to: Cell, of: Cell) -> list[float]:
        def value(trace: str, cell: Cell) -> float:
            return float(found[trace, *astuple(cell)][figure])

        return [value(trace, to) / value(trace, of) for trace in traces]

    lines = [
        "# Moves: KV that is copied between engines on demand", "",
        f"`{command}`. {INSTANCES} simulated engines behind the router queue, each with a link each way; a token's "
        "KV is 131,072 bytes. A request keeps its place and waits for its copy where that costs less than computing; "
        "as the proxy does it, it waits for its turn alone, and is copied for while the router queue holds it. "
        "The pool is one cache of all engines' size, routed by exact least work. TTFT in ratios; the last but one "
        "column is the geometric mean.",
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
            for speed in SPEEDS if load == LOADS[0] else ():
                row = ratios(figure, Cell(MOVE, load, speed, waits=False), Cell(POOL, load))
                shown.append(ratio_row(f"{name}, load {load}, {speed:g} GB/s, as the proxy does it", row))
    lines += table(["of the pool", *traces, "all", "target"], shown)
    disturbed = []
    for speed in SPEEDS:
        row = ratios("ttft_mean_s", Cell(MOVE, LOADS[0], speed, FALSE), Cell(MOVE, LOADS[0], speed))
        disturbed.append(ratio_row(f"load {LOADS[0]}, {speed:g} GB/s", row, FALSE_TARGET))
    lines += table(["a fifth of the placements false / none, mean", *traces, "all", "target"], disturbed)
    found_again = []
    for cell in (Cell(POOL, LOADS[0]), Cell(QUEUE, LOADS[0]), *(Cell(MOVE, LOADS[0], speed) for speed in SPEEDS)):
        hits = [found[trace, *astuple(cell)]["hit_ratio"] for trace in traces]
        speed_name = f", {cell.gb_per_s:g} GB/s" if cell.gb_per_s else ""
        found_again.append([f"{cell.policy}{speed_name}", *(f"{hit:.2f}" for hit in hits)])
    lines += table(["hit ratio", *traces], found_again)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure_traces(__doc__ or "", job=Job, as_markdown=as_markdown, requests=4000)
