"""Cells of the routing benchmark: each is one policy, once, on one trace or scenario."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.known_speeds import knowing
from kvproxy.cluster.routing.policy import Policy
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.pooled import Bound, measure_bound, play_on_pool
from kvproxy.lab.replay.results import summarize_outcomes
from kvproxy.lab.replay.scenarios import SCENARIOS
from kvproxy.lab.replay.settings import IndexMode, ReplayFleet
from kvproxy.lab.replay.trace import Half, Trace, read_trace
from kvproxy.lab.simulator.timing import TokenGaps

ROOT = Path(__file__).parents[1]
TRACES = ("conv_dev", "msyn_dev", "toolagent_like_dev", "cc_dev", "agent_dev")
_CAPACITY_TOKENS = {"cc_dev": 2_000_000, "agent_dev": 500_000}
OURS = ("kv_aware", "kv_aware+no_queue", "kv_aware+priority", "kv_aware+no_queue+priority")
PEERS = ("dynamo", "dynamo_agentic", "llm_d", "llm_d_sticky", "lmetric", "least_ttft")
SCENARIO_PEERS = ("dynamo", "dynamo_agentic", "lmetric", "least_ttft", "prefix_affinity", "least_request")

#: More are not played: sessions that keep 16 engines busy would be tens of thousands.
REQUESTS = 4000

#: Left out with other fleet sizes, for time.
ONLY_AT_EIGHT = ("llm_d", "llm_d_sticky")


def capacity_tokens_of(trace: str) -> int:
    """Return the capacity of an engine: enough for its share of recurring prompts, but not for all."""
    return _CAPACITY_TOKENS.get(trace, 819_200)


@dataclass(frozen=True)
class Cell:
    """One run. `variant` names what is disturbed; "" is nothing."""

    trace: str  # or a scenario
    instances: int
    load: float
    policy: str
    variant: str = ""
    seed: int = 1


#: variant -> what it changes; `priors` and `known` are not the fleet's.
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "events 500 ms late": {"index_delay_s": 0.5},
    "approximate index": {"index": IndexMode.APPROXIMATE},
    "priors 4x too fast": {"priors": 4.0},
    "priors 4x too slow": {"priors": 0.25},
    "one endpoint 3x slower in the middle third": {"slow_middle": 3.0},
    "one endpoint 3x slower in the middle third, known": {"slow_middle": 3.0, "known": True},
    "approximate index told a quarter of the capacity": {"index": IndexMode.APPROXIMATE, "index_capacity": 0.25},
    "approximate index of a quarter of the capacity, fixed": {
        "index": IndexMode.APPROXIMATE, "index_capacity": 0.25, "learn_capacity": False,
    },
    "approximate index told four times the capacity": {"index": IndexMode.APPROXIMATE, "index_capacity": 4.0},
    "approximate index of four times the capacity, fixed": {
        "index": IndexMode.APPROXIMATE, "index_capacity": 4.0, "learn_capacity": False,
    },
}  # fmt: skip


def cells(*, quick: bool) -> list[Cell]:
    """All of them, what matters most first: a run that is cut short has whole tables."""
    grid = (*PEERS, *OURS)
    eight = [Cell(t, 8, x, p) for x in (0.9, 0.7) for t in TRACES for p in grid]
    scenarios = [Cell(name, 8, each.load, p) for name, each in SCENARIOS.items() for p in (*SCENARIO_PEERS, *OURS)]
    if quick:
        return eight + scenarios
    low = [Cell(t, 8, 0.5, p) for t in TRACES for p in grid]
    elsewhere = tuple(policy for policy in grid if policy not in ONLY_AT_EIGHT)
    others = [Cell(t, n, x, p) for x in (0.9, 0.7, 0.5) for n in (4, 16) for t in TRACES for p in elsewhere]
    disturbed = [Cell(t, 8, 0.7, "kv_aware", variant) for variant in VARIANTS if variant for t in TRACES]
    again = [replace(cell, seed=2) for cell in (*eight, *scenarios)]
    short = [cell for cell in again if cell.trace in TRACES[:3] and cell.load == 0.9]
    last = [cell for cell in again if cell not in short]
    return [*eight, *scenarios, *short, *low, *others, *disturbed, *last]


def fleet_of(cell: Cell) -> ReplayFleet:
    """Return the engines of a cell."""
    if cell.trace in SCENARIOS:
        return SCENARIOS[cell.trace].disturb(ReplayFleet(instances=cell.instances))
    changes = {key: value for key, value in VARIANTS[cell.variant].items() if key not in ("priors", "known")}
    plain = ReplayFleet(instances=cell.instances, capacity_tokens=capacity_tokens_of(cell.trace))
    return replace(plain, **changes)


def trace_of(name: str) -> Trace:
    """Return the report half of a trace of benchmarks/traces or of a scenario."""
    if name in SCENARIOS:
        return SCENARIOS[name].draw(Half.REPORT)
    return read_trace(ROOT / "benchmarks" / "traces" / f"{name}.jsonl.gz").take_half(Half.REPORT)


def reference_of(cell: Cell, work: Path, version: str) -> Bound:
    """Return the cell's pace and the pooled reference, computed once and kept."""
    path = work / f"reference-{cell.trace}-{cell.instances}-{cell.load}-{version}.pickle"
    if path.exists():
        loaded: Bound = pickle.loads(path.read_bytes())
        return loaded
    fleet = fleet_of(cell).undisturbed()
    bound = measure_bound(trace_of(cell.trace), fleet, cell.load)
    if bound.trace.requests > REQUESTS:
        trace, token_gaps = bound.trace.cut(REQUESTS), TokenGaps()
        outcomes = play_on_pool(trace, bound.pace, fleet, token_gaps=token_gaps)
        bound = replace(
            bound, trace=trace, summary=summarize_outcomes(outcomes, fleet.instances, token_gaps=token_gaps)
        )
    path.with_suffix(f".{os.getpid()}").write_bytes(pickle.dumps(bound))
    path.with_suffix(f".{os.getpid()}").rename(path)
    return bound


def run_cell(cell: Cell, work: Path, version: str) -> dict[str, Any]:
    """One run's figures."""
    started = time.process_time()
    reference = reference_of(cell, work, version)
    prepared = time.process_time()
    fleet, spec = fleet_of(cell), PolicySpec.parse(cell.policy)
    token_gaps = TokenGaps()
    outcomes = play_policy(
        reference.trace,
        reference.pace,
        fleet,
        _policy_of(cell, spec, fleet, reference),
        spec,
        seed=cell.seed,
        token_gaps=token_gaps,
    )
    summary = asdict(summarize_outcomes(outcomes, fleet.instances, token_gaps=token_gaps))
    return {
        **asdict(cell),
        **_rounded(summary),
        "reference": _rounded({name: getattr(reference.summary, name) for name in ("ttft_mean_s", "ttft_p99_s")}),
        "took_s": round(time.process_time() - prepared, 2),
        "reference_took_s": round(prepared - started, 2),
    }


def _policy_of(cell: Cell, spec: PolicySpec, fleet: ReplayFleet, reference: Bound) -> Policy:
    changes = VARIANTS[cell.variant]
    rng = Random(cell.seed)
    if "known" in changes:
        return knowing(fleet, reference.pace.duration_s(reference.trace), rng=rng)
    return spec.make(rng=rng, prior_factor=changes.get("priors", 1.0))


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in figures.items()}


def distinct(values: Sequence[Any]) -> list[Any]:
    """Each once, in order."""
    return list(dict.fromkeys(values))
