"""Several routers that tell each other what they decide, late, against one router: mean TTFT in virtual time.

    python -m benchmarks.replicas [--requests N] [--jobs N] [--traces T,T...]

Every request of a trace goes to a router by chance. Each router has its own ledgers, approximate index, learned speeds
and policy (kv_aware), and the proxy's own code of the exchange (kvproxy/sync) carries what it does to the others, each
word so many milliseconds late. Writes replicas.md of benchmarks/reports.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.routing_cells import CAPACITY_TOKENS, ROOT, trace_of
from kvproxy.kvcache.overlap.indexes import LocalIndexes
from kvproxy.replay.compare import PolicySpec
from kvproxy.replay.pooled import Bound, measure_bound
from kvproxy.replay.results import ReplayOutcome
from kvproxy.replay.router import LiveRequest, Placement, SimEndpoint, VirtualRouter
from kvproxy.replay.settings import IndexMode, ReplayFleet
from kvproxy.replay.view import IndexView, endpoint_id
from kvproxy.replay.virtual_time import VirtualTime
from kvproxy.routing.load import EndpointLoad
from kvproxy.routing.policy import Policy
from kvproxy.routing.work import Features
from kvproxy.simulator.engine import Engine
from kvproxy.sync import wire
from kvproxy.sync.journal import Journal
from kvproxy.sync.peers import Peers
from kvproxy.sync.wire import Origin
from kvproxy.sync.world import World
from kvproxy.types import EndpointId

TRACES = ("conv_dev", "toolagent_like_dev", "msyn_dev")
INSTANCES, LOAD, BEAT_S = 8, 0.7, 0.5
ROUTERS, DELAYS_S = (2, 4, 8), (0.01, 0.05, 0.25)
GOALS = {0.01: 1.01, 0.05: 1.03, 0.25: 1.10}


class RoutersCluster:
    """One router's part in the exchange (a ClusterPart)."""

    def __init__(self, indexes: LocalIndexes, policy: Policy, endpoints: Sequence[SimEndpoint]) -> None:
        self.indexes: LocalIndexes | None = indexes
        self.policy = policy
        self._loads = {one.id: one.load for one in endpoints}

    def loads(self) -> Iterable[tuple[EndpointId, EndpointLoad]]:
        return self._loads.items()

    def load(self, endpoint: EndpointId) -> EndpointLoad | None:
        return self._loads.get(endpoint)

    def load_told(self, endpoint: EndpointId, in_flight_before: int) -> None:
        """Nothing waits for it here."""

    def observe_sample(self, endpoint: EndpointId, work: Features, busy_s: float, now: float, *, scraped: bool) -> None:
        self.policy.observe_sample(endpoint, work, busy_s, now, scraped=scraped)

    def placed_elsewhere(self, endpoint: EndpointId, routed_s: float, requests: int, bound: int, now: float) -> None:
        self.policy.placed_elsewhere(endpoint, routed_s, requests, bound, len(self._loads), now)

    def drained(self) -> Mapping[EndpointId, bool]:
        return {}

    def drain(self, endpoint: EndpointId, *, draining: bool) -> None:
        """No operator here."""


class Scraped:
    """One engine as every router has it, for the scrape."""

    def __init__(self, engine: SimEndpoint, seen_as: Sequence[SimEndpoint]) -> None:
        self._engine, self._seen_as = engine, seen_as

    def scrape_engine(self, now: float) -> None:
        for one in self._seen_as:
            one.prefills = self._engine.prefills
            one.scrape_engine(now)


class Replica:
    """One router with its ledgers, index, policy, and its side of the exchange."""

    def __init__(self, number: int, fleet: ReplayFleet, block_size: int, engines: Sequence[SimEndpoint]) -> None:
        self.number = number
        self.endpoints = [SimEndpoint(one.id, one.index, one.engine) for one in engines]
        policy = PolicySpec.parse("kv_aware").make(rng=Random(number))
        view = IndexView(fleet, block_size, rng=Random(number + 1))
        self.router = VirtualRouter(self.endpoints, policy, view)
        self.view = view
        self.sent: list[bytes] = []
        journal = Journal(Origin("r", number, 1), on_news=lambda: None)
        world = World({"c": RoutersCluster(view._local, policy, self.endpoints)})
        self.peers = Peers(journal, lambda: world, send=lambda payload, to: self.sent.append(payload), beat_s=BEAT_S)
        journal.follow(world)


class ManyRouters:
    """As VirtualRouter, each request by one of the routers. `delay_s` None: they tell each other nothing."""

    def __init__(self, replicas: Sequence[Replica], engines: Sequence[SimEndpoint], delay_s: float | None) -> None:
        self._replicas, self._engines, self._delay_s = replicas, engines, delay_s
        columns = zip(*(one.endpoints for one in replicas), strict=True)
        self.endpoints = [Scraped(engine, seen) for engine, seen in zip(engines, columns, strict=True)]
        self._chance = Random(7)
        self._placed: dict[str, tuple[Replica, Placement]] = {}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count, self._next_beat = 0, BEAT_S
        self.messages = self.bytes = 0

    def arrive(self, request: LiveRequest, now: float) -> Placement | None:
        self._deliver(now)
        replica = self._chance.choice(self._replicas)
        inner = replica.router.arrive(request, now)
        assert inner is not None
        self._placed[request.name] = replica, inner
        self._tell(replica, now)
        return Placement(request, self._engines[inner.endpoint.index], inner.reservation, inner.settle, inner.priority)

    def first_token(self, placement: Placement, now: float) -> None:
        self._deliver(now)
        replica, inner = self._placed[placement.request.name]
        replica.router.first_token(inner, now)
        self._tell(replica, now)

    def finished(self, placement: Placement, now: float) -> None:
        self._deliver(now)
        replica, inner = self._placed.pop(placement.request.name)
        replica.router.finished(inner, now)
        self._tell(replica, now)

    def release(self, now: float) -> Placement | None:
        return None

    def next_release_at(self, now: float) -> float | None:
        return None

    def _tell(self, replica: Replica, now: float) -> None:
        if self._delay_s is None or len(self._replicas) == 1:
            return
        replica.peers.publish(now)
        for payload in replica.sent:
            self._count += 1
            self.messages, self.bytes = self.messages + 1, self.bytes + len(payload)
            heapq.heappush(self._under_way, (now + self._delay_s, self._count, replica.number, payload))
        replica.sent.clear()

    def _deliver(self, now: float) -> None:
        if self._delay_s is None or len(self._replicas) == 1:
            return
        while min(self._next_beat, self._under_way[0][0] if self._under_way else now + 1.0) <= now:
            if self._under_way and self._under_way[0][0] <= self._next_beat:
                at, _, sender, payload = heapq.heappop(self._under_way)
                for replica in self._replicas:
                    if replica.number != sender:
                        replica.peers.receive(wire.decode(payload), len(payload), at)
            else:
                at, self._next_beat = self._next_beat, self._next_beat + BEAT_S
                for replica in self._replicas:
                    replica.peers.beat(at)
                    self._tell(replica, at)


@dataclass(frozen=True)
class Cell:
    """One run. `delay_s` None: no exchange."""

    trace: str
    routers: int
    delay_s: float | None
    requests: int
    seed: int


@lru_cache(1)
def _bound_of(trace: str, fleet: ReplayFleet) -> Bound:
    """The trace at its pace: the runs of one follow each other."""
    return measure_bound(trace_of(trace), fleet, LOAD)


def run_cell(cell: Cell) -> dict[str, Any]:
    """Its figures."""
    started = time.process_time()
    fleet = ReplayFleet(
        instances=INSTANCES, capacity_tokens=CAPACITY_TOKENS.get(cell.trace, 819_200), index=IndexMode.APPROXIMATE
    )
    bound = _bound_of(cell.trace, fleet)
    trace, pace = bound.trace.cut(cell.requests), bound.pace
    blocks, duration_s = fleet.blocks_of(trace), pace.duration_s(trace)
    settings = [fleet.engine_settings(blocks.size, index, duration_s) for index in range(fleet.instances)]
    engines = [SimEndpoint(endpoint_id(index), index, Engine(each)) for index, each in enumerate(settings)]
    replicas = [Replica(number, fleet, blocks.size, engines) for number in range(cell.routers)]
    routers = ManyRouters(replicas, engines, cell.delay_s)
    prepared = time.process_time()
    run = VirtualTime(blocks, pace, routers, replicas[0].view, jitter=Random(cell.seed))  # type: ignore[arg-type]
    outcomes: Sequence[ReplayOutcome] = run.run()
    ttfts = [one.first_token_at - one.arrived_at for one in outcomes if one.first_token_at is not None]
    prompt = sum(one.prompt_tokens for one in outcomes)
    peers = [peer for one in replicas for peer in one.peers.known.values()]
    return {
        "cell": cell,
        "ttft_mean_s": statistics.fmean(ttfts),
        "cached": sum(one.cached_tokens for one in outcomes) / prompt,
        "messages": routers.messages,
        "bytes": routers.bytes,
        "requests": len(outcomes),
        "gaps": sum(peer.gaps + peer.lost + peer.mismatches for peer in peers),
        "took_s": time.process_time() - prepared,
        "prepared_s": prepared - started,
    }


def render(rows: Sequence[dict[str, Any]], command: str) -> str:
    """The report."""
    by = {(row["cell"].trace, row["cell"].routers, row["cell"].delay_s, row["cell"].seed): row for row in rows}
    traces = list(dict.fromkeys(row["cell"].trace for row in rows))
    seeds = sorted({row["cell"].seed for row in rows})
    lines = [
        "# Several routers against one",
        "",
        f"`{command}`: kv_aware on {INSTANCES} engines at load {LOAD:g}, the approximate index alone (no KV events), "
        f"each request by a router of chance; mean TTFT against one router, over {len(seeds)} seed(s). The exchange is "
        "the proxy's own code, each word so many milliseconds late; `none`: the routers tell each other nothing.",
        "",
        "| routers | late | " + " | ".join(traces) + " | mean | goal |",
        "|---|---|" + "---|" * (len(traces) + 2),
    ]
    for routers in ROUTERS:
        for delay_s in (*DELAYS_S, None):
            ratios = []
            for trace in traces:
                found = [
                    by[trace, routers, delay_s, seed]["ttft_mean_s"] / by[trace, 1, None, seed]["ttft_mean_s"]
                    for seed in seeds
                    if (trace, routers, delay_s, seed) in by and (trace, 1, None, seed) in by
                ]
                ratios.append(statistics.fmean(found) if found else float("nan"))
            late = "none" if delay_s is None else f"{1000 * delay_s:g} ms"
            goal = "" if delay_s is None else f"{GOALS[delay_s]:.2f}"
            shown = " | ".join(f"{one:.3f}" for one in ratios)
            lines.append(f"| {routers} | {late} | {shown} | {statistics.fmean(ratios):.3f} | {goal} |")
    lines += ["", "One router, for scale:", "", "| trace | requests | mean TTFT (s) | cached |", "|---|---|---|---|"]
    for trace in traces:
        one = by[trace, 1, None, seeds[0]]
        lines.append(f"| {trace} | {one['requests']} | {one['ttft_mean_s']:.3f} | {one['cached']:.1%} |")
    told = [row for row in rows if row["messages"]]
    if told:
        sent, requests = sum(row["messages"] for row in told), sum(row["requests"] for row in told)
        size = sum(row["bytes"] for row in told)
        lines += [
            "",
            f"Told without batching: {sent / requests:.1f} messages and {size / requests:,.0f} bytes a request; gaps, "
            f"losses and mismatches: {sum(row['gaps'] for row in told)}.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports" / "replicas.md")
    args = parser.parse_args()
    cells = [
        Cell(trace, routers, delay_s, args.requests, seed)
        for trace in args.traces.split(",")
        for seed in range(1, args.seeds + 1)
        for routers, delay_s in [(1, None), *((n, delay) for n in ROUTERS for delay in (*DELAYS_S, None))]
    ]
    rows = []
    command = f"python -m benchmarks.replicas --requests {args.requests} --seeds {args.seeds}"
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for row in pool.imap_unordered(run_cell, cells):
            rows.append(row)
            cell = row["cell"]
            print(
                f"{cell.trace} {cell.routers} {cell.delay_s} {cell.seed}: {row['ttft_mean_s']:.4f} s "
                f"cached {row['cached']:.3f} gaps {row['gaps']} took {row['took_s']:.1f}+{row['prepared_s']:.1f} s",
                flush=True,
            )
    text = render(rows, command)
    args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
