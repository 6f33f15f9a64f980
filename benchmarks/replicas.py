"""Several routers that exchange their decisions with a delay, against one router: mean TTFT in virtual time.

    python -m benchmarks.replicas [--requests N] [--jobs N] [--traces T,T...] [--seeds N,N...]

Every request of a trace goes to a router by chance. Each router has its own ledgers, approximate index, learned speeds
and policy (kv_aware), and the proxy's own code of the exchange (kvproxy/features/exchange) carries its changes to the
others, each message with the same delay. *Unseen*: the prefill that a request stands behind since another router placed
it on the same endpoint within the delay. Writes replicas.md of benchmarks/reports."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.routing_cells import ROOT, capacity_tokens_of, trace_of
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.pooled import Bound, measure_bound
from kvproxy.lab.replay.replicas import ManyRouters, Replica
from kvproxy.lab.replay.results import ReplayOutcome
from kvproxy.lab.replay.router import LiveRequest, Placement, SimEndpoint
from kvproxy.lab.replay.settings import IndexMode, Pace, ReplayFleet
from kvproxy.lab.replay.trace import Trace
from kvproxy.lab.replay.view import IndexView, endpoint_id
from kvproxy.lab.replay.virtual_time import VirtualTime
from kvproxy.lab.simulator.engine import Engine

TRACES = ("conv_dev", "toolagent_like_dev", "msyn_dev")
INSTANCES, LOAD = 8, 0.7
ROUTERS, WITH_EVENTS, DELAYS_S = (2, 4, 8), (4,), (0.01, 0.05, 0.25)
FLEET_TRACE, FLEET, FLEET_RATE, FLEET_ROUTERS = "toolagent_like_dev", 1000, 2000.0, (2, 4)
FLEET_DELAYS_S = 0.005, 0.01  # workers hear of each other in 4 to 5 ms
GOALS = {0.01: 1.01, 0.05: 1.03, 0.25: 1.10}


@dataclass(frozen=True)
class Cell:
    """One run. `delay_s` None: no exchange. `index`: the routers' source of the engines' caches."""

    trace: str
    routers: int
    delay_s: float | None
    requests: int
    seed: int
    index: IndexMode = IndexMode.APPROXIMATE
    instances: int = INSTANCES


class _Chance(Random):
    """Remembers what came out."""

    latest: Any = None

    def choice(self, seq: Any) -> Any:
        self.latest = super().choice(seq)
        return self.latest


@dataclass
class _Placed:
    at: float
    router: int
    placement: Placement


class _Watched(ManyRouters):
    """Keeps what was placed where, by which router."""

    def __init__(self, *parts: Any, chance: _Chance) -> None:
        super().__init__(*parts, chance=chance)
        self.placed: dict[int, list[_Placed]] = defaultdict(list)  # by endpoint
        self._router = chance

    def arrive(self, request: LiveRequest, now: float) -> Placement | None:
        placement = super().arrive(request, now)
        if placement is not None:
            self.placed[placement.endpoint.index].append(_Placed(now, self._router.latest.number, placement))
        return placement

    def unseen_s(self, delay_s: float) -> float:
        """Of all requests: prefill that others placed before them within the delay, less what was over by then."""
        lost_s = 0.0
        for line in self.placed.values():
            for number, one in enumerate(line):
                for other in reversed(line[:number]):
                    if one.at - other.at >= delay_s:
                        break
                    if other.router != one.router:
                        lost_s += max(0.0, other.placement.prefill_s - (one.at - other.at))
        return lost_s


@lru_cache(1)
def _bound_of(trace: str, fleet: ReplayFleet) -> Bound:
    """Measure the trace at its pace: the runs of one follow each other."""
    return measure_bound(trace_of(trace), fleet, LOAD)


def world_of(cell: Cell) -> tuple[ReplayFleet, Trace, Pace]:
    """Return its engines, and what they are asked at which pace. A larger fleet gets that many copies of the sessions,
    and all its engines are so fast that FLEET_RATE is the same load."""
    fleet = ReplayFleet(instances=INSTANCES, capacity_tokens=capacity_tokens_of(cell.trace), index=cell.index)
    bound = _bound_of(cell.trace, fleet)
    copies = cell.instances // INSTANCES
    trace, pace = bound.trace.cut(cell.requests // copies).clone(copies), bound.pace
    if copies == 1:
        return fleet, trace, pace
    faster = FLEET_RATE * pace.duration_s(trace) / trace.requests
    fleet = replace(fleet, instances=cell.instances, slowness=(1.0 / faster,) * cell.instances)
    return fleet, trace, replace(pace, scale=pace.scale / faster)


def run_cell(cell: Cell) -> dict[str, Any]:
    """Its figures."""
    started = time.process_time()
    fleet, trace, pace = world_of(cell)
    blocks, duration_s = fleet.blocks_of(trace), pace.duration_s(trace)
    settings = [fleet.engine_settings(blocks.size, index, duration_s) for index in range(fleet.instances)]
    engines = [SimEndpoint(endpoint_id(index), index, Engine(each)) for index, each in enumerate(settings)]
    spec, there = PolicySpec.parse("kv_aware"), range(fleet.instances)
    replicas = [
        Replica(
            number,
            engines,
            there,
            spec.make(rng=Random(number)),
            IndexView(fleet, blocks.size, rng=Random(number + 1)),
        )
        for number in range(cell.routers)
    ]
    routers = _Watched(replicas, engines, there, cell.delay_s, chance=_Chance(7))
    prepared = time.process_time()
    run = VirtualTime(blocks, pace, routers, routers, jitter=Random(cell.seed))
    outcomes: Sequence[ReplayOutcome] = run.run()
    ttfts = [one.first_token_at - one.arrived_at for one in outcomes if one.first_token_at is not None]
    prompt = sum(one.prompt_tokens for one in outcomes)
    peers = [peer for one in replicas for peer in one.peers.known.values()]
    return {
        "cell": cell,
        "ttft_mean_s": statistics.fmean(ttfts),
        "ttft_p99_s": sorted(ttfts)[int(0.99 * len(ttfts))],
        "cached": sum(one.cached_tokens for one in outcomes) / prompt,
        "unseen_s": routers.unseen_s(cell.delay_s or 0.0) / len(ttfts),
        "messages": routers.messages,
        "bytes": routers.bytes,
        "requests": len(outcomes),
        "gaps": sum(peer.gaps + peer.lost for peer in peers),
        "took_s": time.process_time() - prepared,
        "prepared_s": prepared - started,
    }


def render_fleet(rows: Sequence[dict[str, Any]], command: str) -> str:
    """Render the report on the large fleet."""
    lines = [
        "# A thousand engines behind one to four routers",
        "",
        f"`{command}`: kv_aware on {FLEET:,} simulated engines, {FLEET_RATE:,.0f} requests a second of "
        f"{FLEET_TRACE}, copied for so many engines (what several sessions share stays shared), at load {LOAD:g}, in "
        "virtual time. Each request is placed by a router of chance, which weighs every engine; the exchange is the "
        "proxy's own code, each word so many milliseconds late (workers hear of each other in 4 to 5). Wanted: the "
        "mean and the 99th percentile of the time to first token within 1 % of one router's. *Unseen*: prefill that a "
        "request stands behind since another router placed it there within the delay, over one router's mean.",
        "",
        "| routers | late | seed | requests | mean TTFT (s) | ratio | p99 (s) | ratio | cached | unseen | CPU, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    alone = {row["cell"].seed: row for row in rows if row["cell"].routers == 1}
    for row in sorted(rows, key=lambda row: (row["cell"].seed, row["cell"].routers, row["cell"].delay_s or 0.0)):
        one = alone[row["cell"].seed]
        late = "" if row["cell"].delay_s is None else f"{1000 * row['cell'].delay_s:g} ms"
        figures = " | ".join(f"{row[name]:.3f} | {row[name] / one[name]:.3f}" for name in ("ttft_mean_s", "ttft_p99_s"))
        cell = row["cell"]
        lines.append(
            f"| {cell.routers} | {late} | {cell.seed} | {row['requests']:,} | {figures} | {row['cached']:.1%} "
            f"| {row['unseen_s'] / one['ttft_mean_s']:.3f} | {row['took_s']:.0f} |"
        )
    return "\n".join([*lines, ""]) + (Path(__file__).parent / "replicas_fleet_notes.md").read_text()


def render(rows: Sequence[dict[str, Any]], command: str) -> str:
    """Render the report."""
    seeds = len({row["cell"].seed for row in rows})
    lines = [
        "# Several routers against one",
        "",
        f"`{command}`: kv_aware on {INSTANCES} engines at load {LOAD:g}, each request by a router of chance; mean TTFT "
        f"against one router, over {seeds} seed(s). The exchange is the proxy's own code, each word so many "
        "milliseconds late; `none`: the routers tell each other nothing. *Unseen*: prefill that a request stands "
        "behind since another router placed it there within the delay, over one router's mean TTFT.",
        "",
        "With the approximate index alone (no KV events):",
        "",
        *table([row for row in rows if row["cell"].index is IndexMode.APPROXIMATE]),
        "",
        "Where each router follows the engines' KV events as well:",
        "",
        *table([row for row in rows if row["cell"].index is IndexMode.EVENTS]),
        "",
        "One router, for scale:",
        "",
        "| trace | index | requests | mean TTFT (s) | cached |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["cell"].trace, row["cell"].index, row["cell"].seed)):
        cell = row["cell"]
        if cell.routers == 1 and cell.seed == min(each["cell"].seed for each in rows):
            figures = f"{row['requests']} | {row['ttft_mean_s']:.3f} | {row['cached']:.1%}"
            lines.append(f"| {cell.trace} | {cell.index.value} | {figures} |")
    told = [row for row in rows if row["messages"]]
    sent, requests = sum(row["messages"] for row in told), sum(row["requests"] for row in told)
    size = sum(row["bytes"] for row in told)
    lines += [
        "",
        f"Told without batching: {sent / requests:.1f} messages and {size / requests:,.0f} bytes a request; gaps and "
        f"losses: {sum(row['gaps'] for row in told)}.",
        "",
    ]
    return "\n".join(lines) + (Path(__file__).parent / "replicas_notes.md").read_text()


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Ratios to one router of the same trace and seed."""
    by = {(row["cell"].trace, row["cell"].routers, row["cell"].delay_s, row["cell"].seed): row for row in rows}
    traces, seeds = list(dict.fromkeys(key[0] for key in by)), {key[3] for key in by}
    lines = [
        "| routers | late | " + " | ".join(traces) + " | mean | goal | unseen |",
        "|---|---|" + "---|" * (len(traces) + 3),
    ]
    for routers, delay_s in sorted({key[1:3] for key in by if key[1] > 1}, key=lambda one: (one[0], one[1] or 9.0)):
        ratios, unseen = (
            [
                statistics.fmean(
                    by[trace, routers, delay_s, seed][figure] / by[trace, 1, None, seed]["ttft_mean_s"]
                    for seed in seeds
                )
                for trace in traces
            ]
            for figure in ("ttft_mean_s", "unseen_s")
        )
        late = "none" if delay_s is None else f"{1000 * delay_s:g} ms"
        goal = "" if delay_s is None else f"{GOALS[delay_s]:.2f}"
        shown = " | ".join(f"{one:.3f}" for one in ratios)
        behind = "" if delay_s is None else f"{statistics.fmean(unseen):.3f}"
        lines.append(f"| {routers} | {late} | {shown} | {statistics.fmean(ratios):.3f} | {goal} | {behind} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", action="store_true")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.fleet:
        requests = args.requests or 20_000
        cells = [
            Cell(FLEET_TRACE, routers, delay_s, requests, seed, instances=FLEET)
            for seed in seeds
            for routers, delay_s in [(1, None), *((n, delay) for n in FLEET_ROUTERS for delay in FLEET_DELAYS_S)]
        ]
    else:
        requests = args.requests or 2000
        cells = [
            Cell(trace, routers, delay_s, requests, seed, index)
            for trace in args.traces.split(",")
            for index, many in ((IndexMode.APPROXIMATE, ROUTERS), (IndexMode.EVENTS, WITH_EVENTS))
            for seed in seeds
            for routers, delay_s in [(1, None), *((n, delay) for n in many for delay in (*DELAYS_S, None))]
        ]
    rows = []
    command = f"python -m benchmarks.replicas{' --fleet' * args.fleet} --requests {requests} --seeds {args.seeds}"
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for row in pool.imap_unordered(run_cell, cells):
            rows.append(row)
            cell = row["cell"]
            print(
                f"{cell.trace} {cell.index} {cell.routers} {cell.delay_s} {cell.seed}: {row['ttft_mean_s']:.4f} s "
                f"cached {row['cached']:.3f} gaps {row['gaps']} took {row['took_s']:.1f}+{row['prepared_s']:.1f} s",
                flush=True,
            )
    text = (render_fleet if args.fleet else render)(rows, command)
    (args.out / ("replicas-fleet.md" if args.fleet else "replicas.md")).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
