"""Routing policies on the traces of benchmarks/traces, in virtual time.

    python -m benchmarks.routing [--quick] [--jobs N]

Every cell is one `kvproxy replay`; finished ones are kept in .bench/routing.jsonl (with a fingerprint of the code they
depend on), so that a run that was interrupted goes on where it was. Writes benchmarks/reports/routing.{md,json}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import routing_report
from benchmarks.known_speeds import knowing
from kvproxy.replay.pooled import Bound, measure_bound
from kvproxy.replay.results import summarize_outcomes
from kvproxy.replay.scenario import PolicySpec, play_policy
from kvproxy.replay.settings import IndexMode, ReplayFleet
from kvproxy.replay.trace import Trace, read_trace

ROOT = Path(__file__).parents[1]
TRACES = ("conv_dev", "msyn_dev", "toolagent_like_dev", "cc_dev", "agent_dev")
CAPACITY_TOKENS = {"cc_dev": 2_000_000, "agent_dev": 500_000}
POLICIES = ("round_robin", "prefix_affinity", "dynamo", "llm_d", "lmetric", "least_ttft", "kv_aware", "kv_aware+queue")
BOUND_DEPENDS_ON = (
    "kvproxy/replay/pooled.py",
    "kvproxy/replay/trace.py",
    *(f"kvproxy/simulator/{name}.py" for name in ("block_cache", "engine", "scheduler", "timing")),
)
DEPENDS_ON = (
    "kvproxy/routing",
    "kvproxy/kvcache/overlap/merge.py",
    "kvproxy/kvcache/overlap/indexes.py",
    "kvproxy/replay",
    "kvproxy/prefix",
    *BOUND_DEPENDS_ON,
)


@dataclass(frozen=True)
class Cell:
    """One run. `variant` names what is disturbed; "" is nothing."""

    trace: str
    instances: int
    load: float
    policy: str
    variant: str = ""


#: variant -> what it changes; `priors` and `known` are not the fleet's.
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "events 500 ms late": {"index_delay_s": 0.5},
    "approximate index": {"index": IndexMode.APPROXIMATE},
    "priors 4x too fast": {"priors": 4.0},
    "priors 4x too slow": {"priors": 0.25},
    "half the fleet at 0.4x": {"slowness": (2.5,) * 4},
    "one endpoint 3x slower in the middle third": {"slow_middle": 3.0},
    "one endpoint 3x slower in the middle third, known": {"slow_middle": 3.0, "known": True},
    "20 % of entries false": {"wrong_share": 0.2},
    "approximate index told a quarter of the capacity": {"index": IndexMode.APPROXIMATE, "index_capacity": 0.25},
    "approximate index of a quarter of the capacity, fixed": {
        "index": IndexMode.APPROXIMATE, "index_capacity": 0.25, "learn_capacity": False,
    },
    "approximate index told four times the capacity": {"index": IndexMode.APPROXIMATE, "index_capacity": 4.0},
    "approximate index of four times the capacity, fixed": {
        "index": IndexMode.APPROXIMATE, "index_capacity": 4.0, "learn_capacity": False,
    },
}  # fmt: skip
#: Where the others are disturbed as well: faults of engines or knowledge that every policy suffers from.
COMPARED = ("half the fleet at 0.4x", "20 % of entries false")


def cells(*, quick: bool) -> list[Cell]:
    """The grid, and the variants at 8 instances."""
    grid_instances, loads = ((8,), (0.7, 0.9)) if quick else ((4, 8, 16), (0.5, 0.7, 0.9))
    policies = POLICIES[2:] if quick else POLICIES
    plain = [Cell(t, n, x, p) for n in grid_instances for t in TRACES for x in loads for p in policies]
    disturbed = [
        Cell(trace, 8, 0.7, policy, variant)
        for variant in VARIANTS
        if variant
        for trace in TRACES
        for policy in (("kv_aware", "lmetric", "least_ttft") if variant in COMPARED else ("kv_aware",))
    ]
    return plain + disturbed


def fleet_of(cell: Cell) -> ReplayFleet:
    """The engines of a cell."""
    changes = {key: value for key, value in VARIANTS[cell.variant].items() if key not in ("priors", "known")}
    plain = ReplayFleet(instances=cell.instances, capacity_tokens=CAPACITY_TOKENS.get(cell.trace, 819_200))
    return replace(plain, **changes)


def trace_of(name: str) -> Trace:
    """A trace of benchmarks/traces."""
    return read_trace(ROOT / "benchmarks" / "traces" / f"{name}.jsonl.gz")


def bound_of(cell: Cell, work: Path) -> Bound:
    """The cell's pace and bound, computed once and kept."""
    path = work / f"bound-{cell.trace}-{cell.instances}-{cell.load}-{fingerprint(BOUND_DEPENDS_ON)}.pickle"
    if path.exists():
        loaded: Bound = pickle.loads(path.read_bytes())
        return loaded
    bound = measure_bound(trace_of(cell.trace), fleet_of(cell).undisturbed(), cell.load)
    path.with_suffix(f".{os.getpid()}").write_bytes(pickle.dumps(bound))
    path.with_suffix(f".{os.getpid()}").rename(path)
    return bound


def run_cell(job: tuple[Cell, Path]) -> dict[str, Any]:
    """One run's figures."""
    cell, work = job
    started = time.perf_counter()
    bound = bound_of(cell, work)
    fleet, spec = fleet_of(cell), PolicySpec.parse(cell.policy)
    changes = VARIANTS[cell.variant]
    policy = spec.make(rng=Random(1), prior_factor=changes.get("priors", 1.0))
    if "known" in changes:
        policy = knowing(fleet, bound.pace.duration_s(bound.trace), rng=Random(1))
    outcomes = play_policy(bound.trace, bound.pace, fleet, policy, queue=spec.queue, priority=spec.priority)
    return {
        **asdict(cell),
        **asdict(summarize_outcomes(outcomes, fleet.instances)),
        "bound_ttft_mean_s": bound.summary.ttft_mean_s,
        "bound_ttft_p99_s": bound.summary.ttft_p99_s,
        "bound_hit_rate": bound.summary.hit_rate,
        "took_s": round(time.perf_counter() - started, 2),
    }


def fingerprint(places: Sequence[str] = DEPENDS_ON) -> str:
    """Of the code the figures depend on: files, and folders with all that is in them."""
    digest = hashlib.sha256()
    for place in places:
        for path in sorted((ROOT / place).rglob("*.py")) or [ROOT / place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def known_results(path: Path, version: str) -> dict[Cell, dict[str, Any]]:
    """What earlier runs of the same code found."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if row.pop("version") == version:
            found[Cell(*(row[name] for name in ("trace", "instances", "load", "policy", "variant")))] = row
    return found


def run_missing(wanted: Iterable[Cell], work: Path, *, jobs: int) -> list[dict[str, Any]]:
    """Every cell's figures, in order."""
    version, path = fingerprint(), work / "routing.jsonl"
    results = known_results(path, version)
    wanted = list(wanted)
    missing = [cell for cell in wanted if cell not in results]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, path.open("a") as kept:
        for done, row in enumerate(pool.imap_unordered(run_cell, [(cell, work) for cell in missing]), start=1):
            results[Cell(*(row[name] for name in ("trace", "instances", "load", "policy", "variant")))] = row
            kept.write(json.dumps({**row, "version": version}) + "\n")
            kept.flush()
            print(f"\r{done}/{len(missing)}", end="", file=sys.stderr, flush=True)
    return [results[cell] for cell in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 instances at loads 0.7 and 0.9 only")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports", help="folder of the report")
    args = parser.parse_args()
    work = ROOT / ".bench"
    work.mkdir(exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = run_missing(cells(quick=args.quick), work, jobs=args.jobs)
    command = "python -m benchmarks.routing" + (" --quick" if args.quick else "")
    (args.out / "routing.json").write_text(json.dumps({"command": command, "runs": rows}, indent=1) + "\n")
    text = routing_report.as_markdown(rows, command=command)
    (args.out / "routing.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
