"""The default policy with nothing configured beside its nearest peers: five traces at loads 0.7 and 0.9, and scenarios.

    python -m benchmarks.routing_defaults [--requests N] [--seeds N] [--cells NAME,...]

One process, 8 engines, report halves, virtual time. The report is written anew after every cell, so that a run that was
stopped is a report of the cells it finished. Writes reports/routing-defaults.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, geometric_mean

from benchmarks.markdown import table
from benchmarks.routing_cells import TRACES, Cell, fleet_of, trace_of
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.pooled import measure_bound
from kvproxy.lab.replay.results import Summary, summarize_outcomes
from kvproxy.lab.replay.scenarios import SCENARIOS

ENGINES = 8
LOADS = (0.9, 0.7)
DEFAULT = "kv_aware"
PEERS = ("lmetric", "least_ttft", "dynamo_agentic")
REPORT = Path(__file__).parent / "reports" / "routing-defaults.md"
NOTES = Path(__file__).parent / "routing_defaults_notes.md"


@dataclass(frozen=True)
class Figures:
    """Seconds of one policy in one cell, means over the seeds."""

    mean_s: float
    p99_s: float
    e2e_s: float


#: By policy.
Played = dict[str, Figures]


def play_cell(name: str, load: float, *, requests: int, seeds: int) -> Played:
    """Play the default and its peers on one trace or scenario; `requests` bounds traces alone, since a scenario's
    events lie in shares of its run."""
    fleet = fleet_of(Cell(name, ENGINES, load, ""))
    trace = trace_of(name)
    bound = measure_bound(trace if name in SCENARIOS else trace.cut(requests), fleet.undisturbed(), load)
    played = {}
    for policy in (DEFAULT, *PEERS):
        spec = PolicySpec.parse(policy)
        found: list[Summary] = []
        for seed in range(1, seeds + 1):
            policy_of_run = spec.make(rng=Random(seed))
            outcomes = play_policy(bound.trace, bound.pace, fleet, policy_of_run, spec, seed=seed)
            found.append(summarize_outcomes(outcomes, ENGINES))
        played[policy] = Figures(
            fmean(one.ttft_mean_s for one in found),
            fmean(one.ttft_p99_s for one in found),
            fmean(one.e2e_mean_s for one in found),
        )
    return played


def as_markdown(cells: dict[str, Played], *, command: str, about: str) -> str:
    """Render the report: summary first, then a line a cell."""
    best = [(figure, [_of_best(played, figure) for played in cells.values()]) for figure in ("mean_s", "p99_s")]
    summary = [
        [
            f"{figure.removesuffix('_s')} of",
            *(f"{geometric_mean(_of(played, peer, figure) for played in cells.values()):.3f}" for peer in PEERS),
            f"{geometric_mean(ratios):.3f}",
            f"{sum(ratio > 1.0 for ratio in ratios)} of {len(ratios)}",
        ]
        for figure, ratios in best
    ]
    e2e = [f"{geometric_mean(_of(played, peer, 'e2e_s') for played in cells.values()):.3f}" for peer in PEERS]
    lines = [
        "# Routing with nothing configured", "", f"`{command}`. {about}", "",
        "Time to first token of `kv_aware`, as it is without any setting, as a ratio to each peer; geometric means "
        "over the cells. The best peer is the lower of the three in that cell and figure. Below 1 is better.",
        *table(["", *PEERS, "the best peer", "cells above 1.0"], [*summary, ["end to end, mean of", *e2e, "", ""]]),
        "", f"Above 1.0 of the best peer, the worst first, in the mean: {_worse(cells, 'mean_s')}.",
        "", f"In the p99: {_worse(cells, 'p99_s')}.",
        "", "## Cells", "", "Mean and p99 in seconds; ratios to the best peer.",
        *table(
            ["cell", *(f"{policy} mean / p99" for policy in (DEFAULT, *PEERS)), "mean of best", "p99 of best"],
            [
                [
                    name,
                    *(f"{played[policy].mean_s:.3f} / {played[policy].p99_s:.2f}" for policy in (DEFAULT, *PEERS)),
                    f"{_of_best(played, 'mean_s'):.2f}",
                    f"{_of_best(played, 'p99_s'):.2f}",
                ]
                for name, played in cells.items()
            ],
        ), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _of(played: Played, peer: str, figure: str) -> float:
    ratio: float = getattr(played[DEFAULT], figure) / getattr(played[peer], figure)
    return ratio


def _of_best(played: Played, figure: str) -> float:
    return max(_of(played, peer, figure) for peer in PEERS)


def _worse(cells: dict[str, Played], figure: str) -> str:
    """List the cells where a peer is better, with the ratio."""
    ratios = {name: _of_best(played, figure) for name, played in cells.items()}
    worst = sorted((name for name, ratio in ratios.items() if ratio > 1.0), key=lambda name: -ratios[name])
    return "; ".join(f"{name} {ratios[name]:.2f}" for name in worst) or "none"


def _wanted(names: Sequence[str]) -> list[tuple[str, float]]:
    traces = [(name, load) for load in LOADS for name in TRACES if name in names]
    return traces + [(name, SCENARIOS[name].load) for name in names if name in SCENARIOS]


def main() -> None:
    everything = ",".join((*TRACES, *SCENARIOS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of each trace at most (default 1000)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each policy (default 1)")
    parser.add_argument("--cells", default=everything, help="traces and scenarios (default all)")
    args = parser.parse_args()
    wanted = _wanted(args.cells.split(","))
    command = f"python -m benchmarks.routing_defaults --requests {args.requests} --seeds {args.seeds}"
    cells: dict[str, Played] = {}
    for name, load in wanted:
        cells[f"{name}, {load:g}"] = play_cell(name, load, requests=args.requests, seeds=args.seeds)
        about = f"{ENGINES} engines, report halves, virtual time; {len(cells)} of {len(wanted)} cells asked for."
        REPORT.write_text(as_markdown(cells, command=command, about=about) + NOTES.read_text())
    print(REPORT.read_text())


if __name__ == "__main__":
    main()
