"""KV copied between engines on demand, on request traces in virtual time, against one pooled cache.

    python -m benchmarks.moves [--requests N] [--jobs N] [--traces T,T...]

Routing may send a request together with what another engine has of its prompt, over a link of 12.5 or 2.5 GB/s each way
of each engine (100 and 20 Gbit/s); a token's KV is 128 KiB. Before the engines is the router queue. Writes moves.md and
moves.json of benchmarks/reports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.routing_cells import CAPACITY_TOKENS, ROOT, TRACES, trace_of
from benchmarks.tiers import row_of
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


class Job:
    """All cells of one trace, in another process."""

    def __init__(self, requests: int) -> None:
        self._requests = requests

    def __call__(self, name: str) -> list[dict[str, Any]]:
        fleet = ReplayFleet(instances=INSTANCES, capacity_tokens=CAPACITY_TOKENS.get(name, 819_200))
        rows = []
        for load in LOADS:
            bound = measure_bound(trace_of(name), fleet, load)
            trace = bound.trace.cut(min(self._requests, bound.trace.requests))
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


def as_markdown(rows: Sequence[dict[str, Any]], command: str) -> str:
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
        "column is the geometric mean.", "",
        f"| of the pool | {' | '.join(traces)} | all | target |", "|---|" + "---|" * (len(traces) + 2),
    ]  # fmt: skip
    for figure, name in (("ttft_mean_s", "mean"), ("ttft_p99_s", "p99")):
        for load in LOADS:
            lines.append(row_of(f"{name}, load {load}, no copies", ratios(figure, Cell(QUEUE, load), Cell(POOL, load))))
            for speed in SPEEDS:
                row = ratios(figure, Cell(MOVE, load, speed), Cell(POOL, load))
                target = TARGETS[speed] if figure == "ttft_mean_s" else None
                lines.append(row_of(f"{name}, load {load}, {speed:g} GB/s", row, target))
            for speed in SPEEDS if load == LOADS[0] else ():
                row = ratios(figure, Cell(MOVE, load, speed, waits=False), Cell(POOL, load))
                lines.append(row_of(f"{name}, load {load}, {speed:g} GB/s, as the proxy does it", row))
    lines += ["", f"| a fifth of the placements false / none, mean | {' | '.join(traces)} | all | target |",
              "|---|" + "---|" * (len(traces) + 2)]  # fmt: skip
    for speed in SPEEDS:
        row = ratios("ttft_mean_s", Cell(MOVE, LOADS[0], speed, FALSE), Cell(MOVE, LOADS[0], speed))
        lines.append(row_of(f"load {LOADS[0]}, {speed:g} GB/s", row, FALSE_TARGET))
    lines += ["", f"| hit ratio | {' | '.join(traces)} |", "|---|" + "---|" * len(traces)]
    for cell in (Cell(POOL, LOADS[0]), Cell(QUEUE, LOADS[0]), *(Cell(MOVE, LOADS[0], speed) for speed in SPEEDS)):
        hits = [found[trace, *astuple(cell)]["hit_ratio"] for trace in traces]
        speed_name = f", {cell.gb_per_s:g} GB/s" if cell.gb_per_s else ""
        lines.append(f"| {cell.policy}{speed_name} | " + " | ".join(f"{hit:.2f}" for hit in hits) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000, help="of each trace at most (default 4000)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--traces", default=",".join(TRACES), help="of benchmarks/traces (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports", help="folder of the report")
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        rows = [row for group in pool.imap(Job(args.requests), args.traces.split(",")) for row in group]
    command = "python -m benchmarks.moves" + (f" --requests {args.requests}" if args.requests != 4000 else "")
    (args.out / "moves.json").write_text(json.dumps({"command": command, "runs": rows}) + "\n")
    report = as_markdown(rows, command)
    (args.out / "moves.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
