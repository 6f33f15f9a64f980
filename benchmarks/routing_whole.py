"""Routing on whole traces with arrivals as recorded, 8 engines: how reports were made before traces had halves, and the
basis that the targets of `benchmarks.routing` were set on.

    python -m benchmarks.routing_whole

Finished cells are kept in .bench/routing-whole.jsonl. Writes reports/routing-whole.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import geometric_mean

from benchmarks.routing_cells import ROOT, TRACES, Cell, fleet_of
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.pooled import measure_bound
from kvproxy.lab.replay.results import summarize_outcomes
from kvproxy.lab.replay.trace import read_trace

ENGINES, LOADS = 8, (0.5, 0.7, 0.9)
OURS = ("kv_aware", "kv_aware+priority")
PEERS = ("lmetric", "least_ttft", "dynamo", "dynamo_agentic")
REPORT = Path(__file__).parent / "reports" / "routing-whole.md"
#: What was to be reached in the mean, by policy and peer.
AT_MOST = {
    ("kv_aware", "lmetric"): 0.78, ("kv_aware", "least_ttft"): 0.87, ("kv_aware", "dynamo"): 0.42,
    ("kv_aware+priority", "lmetric"): 0.70, ("kv_aware+priority", "least_ttft"): 0.78,
    ("kv_aware+priority", "dynamo"): 0.38,
}  # fmt: skip


@dataclass(frozen=True)
class Played:
    """Mean and p99 TTFT of one policy in one cell, in seconds, and the pooled reference's mean."""

    trace: str
    load: float
    policy: str
    mean_s: float
    p99_s: float
    reference_s: float


def play_cell(trace: str, load: float, known: dict[tuple[str, float, str], Played], keep: Path) -> None:
    """Plays what is not known of a trace at a load, and keeps it."""
    missing = [policy for policy in (*OURS, *PEERS) if (trace, load, policy) not in known]
    if not missing:
        return
    fleet = fleet_of(Cell(trace, ENGINES, load, ""))
    whole = read_trace(ROOT / "benchmarks" / "traces" / f"{trace}.jsonl.gz")
    bound = measure_bound(whole, fleet.undisturbed(), load)
    for policy in missing:
        spec = PolicySpec.parse(policy)
        outcomes = play_policy(bound.trace, bound.pace, fleet, spec.make(rng=Random(1)), spec)
        found = summarize_outcomes(outcomes, ENGINES)
        played = Played(trace, load, policy, found.ttft_mean_s, found.ttft_p99_s, bound.summary.ttft_mean_s)
        known[trace, load, policy] = played
        with keep.open("a") as kept:
            kept.write(json.dumps(vars(played)) + "\n")


def ratio(known: dict[tuple[str, float, str], Played], policy: str, peer: str, traces: tuple[str, ...]) -> float:
    """Geometric mean over traces and loads of the policy's mean TTFT against a peer's."""
    cells = [(known[t, x, policy], known[t, x, peer]) for t in traces for x in LOADS]
    return geometric_mean(ours.mean_s / theirs.mean_s for ours, theirs in cells)


def main() -> None:
    """All cells, then the tables."""
    keep = ROOT / ".bench" / "routing-whole.jsonl"
    keep.parent.mkdir(exist_ok=True)
    lines = keep.read_text().splitlines() if keep.exists() else []
    earlier = [Played(**json.loads(line)) for line in lines]
    known = {(each.trace, each.load, each.policy): each for each in earlier}
    for trace in TRACES:
        for load in LOADS:
            play_cell(trace, load, known, keep)
    REPORT.write_text("\n".join(report(known)))


def report(known: dict[tuple[str, float, str], Played]) -> list[str]:
    """Lines of Markdown."""
    means = [
        [policy, *(_with_target(known, policy, peer) for peer in PEERS), _of_reference(known, policy)]
        for policy in OURS
    ]
    by_trace = [
        [policy, peer, *(f"{ratio(known, policy, peer, (trace,)):.3f}" for trace in TRACES)]
        for policy in OURS
        for peer in PEERS
    ]
    cells = [
        [
            trace,
            f"{load:g}",
            *(f"{(one := known[trace, load, name]).mean_s:.3f} / {one.p99_s:.2f}" for name in (*PEERS, *OURS)),
        ]
        for trace in TRACES
        for load in LOADS
    ]
    return [
        "# Routing on whole traces, arrivals as recorded", "", "`python -m benchmarks.routing_whole`", "",
        f"{ENGINES} engines, loads {', '.join(f'{load:g}' for load in LOADS)}, all requests of each trace, "
        "one run a cell, in virtual time. The [routing report](routing.md) stands on report halves with moved "
        "arrivals; its targets were set on figures made like these.", "",
        "## Mean TTFT, geometric means", "",
        *_table(["", *(f"of {peer}" for peer in PEERS), "of the pooled reference"], means), "",
        "## By trace", "", *_table(["policy", "of", *TRACES], by_trace), "",
        "## Cells: mean / p99 TTFT in seconds", "", *_table(["trace", "load", *PEERS, *OURS], cells), "",
    ]  # fmt: skip


def _with_target(known: dict[tuple[str, float, str], Played], policy: str, peer: str) -> str:
    wanted = AT_MOST.get((policy, peer))
    return f"{ratio(known, policy, peer, TRACES):.3f}" + (f" (at most {wanted:.2f})" if wanted else "")


def _of_reference(known: dict[tuple[str, float, str], Played], policy: str) -> str:
    played = [known[trace, load, policy] for trace in TRACES for load in LOADS]
    return f"{geometric_mean(one.mean_s / one.reference_s for one in played):.3f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


if __name__ == "__main__":
    main()
