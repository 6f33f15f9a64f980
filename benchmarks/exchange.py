"""What it costs that several processes decide as one, at 10,000 decisions a second: CPU, messages and lag, by what
carries them.

    python -m benchmarks.exchange [--rates N,N...] [--seconds S]

One process decides (index, ledger, first token, end: no HTTP), a second one only listens; the same decisions with
nobody to tell stand beside it. Writes exchange.md of benchmarks/reports. Redis and NATS are left out where they are
not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.routing_cells import ROOT
from kvproxy.config.load import load_config
from kvproxy.kvcache.overlap.indexes import IndexState, LocalIndexes
from kvproxy.metrics.catalog import Metrics
from kvproxy.replay.replicas import RoutersCluster
from kvproxy.replay.router import SimEndpoint
from kvproxy.routing.kv_aware import KvAware
from kvproxy.sync.datagrams import Siblings
from kvproxy.sync.service import SyncService
from kvproxy.sync.world import World
from kvproxy.types import EndpointId

ENDPOINTS, BLOCKS, SESSIONS = 8, 16, 2000


class Decider:
    """Decisions as fast as asked, each with its first token and its end a little later."""

    def __init__(self) -> None:
        self.endpoints = [
            SimEndpoint(EndpointId(f"e{number}"), number, None)  # type: ignore[arg-type]
            for number in range(ENDPOINTS)
        ]
        self.indexes = LocalIndexes(IndexState(endpoints=ENDPOINTS), follows_events=False)
        self.cluster = RoutersCluster(self.indexes, KvAware(rng=Random(1)), self.endpoints)
        random = Random(2)
        self.prompts = [array("Q", (random.getrandbits(64) for _ in range(BLOCKS))) for _ in range(SESSIONS)]
        self._under_way: list[Any] = []
        self.decided = 0

    def decide(self, count: int, now: float) -> None:
        for _ in range(count):
            number = self.decided
            endpoint = self.endpoints[number % ENDPOINTS]
            cursor = self.indexes.approximate.locate(self.prompts[number * 7 % SESSIONS])
            entry = self.indexes.route(endpoint.id, cursor)
            self._under_way.append((endpoint, entry, endpoint.load.reserve(1000, 200, now)))
            self.decided += 1
            if len(self._under_way) > 200:
                endpoint, entry, reservation = self._under_way.pop(0)
                endpoint.load.first_token(reservation, now)
                endpoint.load.release(reservation, now)
                self.indexes.settle_entry(entry, prefilled=True)


def service_of(kind: str, number: int, where: str) -> SyncService:
    raw: dict[str, Any] = {"endpoints": ["http://127.0.0.1:1"], "sync": {"replica": "m"}}
    siblings = None
    if kind == "datagrams":
        siblings = Siblings(Path(where), number, 2)
    else:
        raw["sync"] = {kind: where, "replica": f"m{number}"}
    return SyncService(
        load_config(raw), siblings=siblings, metrics=Metrics(), clock=time.monotonic, wall_clock=time.time
    )


async def send(kind: str, where: str, rate: int, seconds: float) -> dict[str, float]:
    decider, service = Decider(), None
    if kind != "nobody":
        service = service_of(kind, 0, where)
        service.follow(World({"c": decider.cluster}), None, {})
        await service.__aenter__()
        while not service.peers.living:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
    began, cpu = time.monotonic(), time.process_time()
    while (elapsed := time.monotonic() - began) < seconds:
        due = int(elapsed * rate) - decider.decided
        decider.decide(min(due, 200), time.monotonic())
        await asyncio.sleep(0.001)
    cpu = time.process_time() - cpu
    took = time.monotonic() - began
    sent = 0.0
    if service is not None:
        sent = service._metrics.sync.messages.labels("sent").value
        await asyncio.sleep(0.5)
        await service.__aexit__(None, None, None)
    return {"decided": decider.decided, "cpu": cpu, "took": took, "sent": sent}


async def listen(kind: str, where: str, wire: Connection) -> dict[str, float]:
    decider, service = Decider(), service_of(kind, 1, where)
    service.follow(World({"c": decider.cluster}), None, {})
    async with service:
        while not service.peers.living:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        [peer] = service.peers.living
        await asyncio.sleep(1.0)
        cpu, told = time.process_time(), peer.heard.told
        lags: list[float] = []
        late: list[float] = []
        while peer.alive and not wire.poll():
            lags += peer.lag.seconds
            peer.lag.seconds.clear()
            due = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            late.append(time.monotonic() - due)
        lags.sort()
        late.sort()
        ratio = service.peers.consistency_ratio(time.monotonic())
        return {
            "told": peer.heard.told - told,
            "cpu": time.process_time() - cpu,
            "p50": lags[len(lags) // 2],
            "p99": lags[int(0.99 * len(lags))],
            "turn_p99": late[int(0.99 * len(late))],
            "ratio": ratio,
        }


def listener(kind: str, where: str, wire: Connection) -> None:
    wire.send(asyncio.run(listen(kind, where, wire)))


def measure(kind: str, where: str, rate: int, seconds: float) -> dict[str, Any]:
    if kind == "nobody":
        return {"kind": kind, "sender": asyncio.run(send(kind, where, rate, seconds)), "listener": None}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=listener, args=(kind, where, theirs))
    process.start()
    sender = asyncio.run(send(kind, where, rate, seconds))
    ours.send("over")
    heard = ours.recv() if ours.poll(20) else None
    process.join(10)
    return {"kind": kind, "sender": sender, "listener": heard}


@contextmanager
def server(program: str) -> Iterator[str]:
    """A store of its own, without a password."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        given = {
            "redis-server": ["--bind", "127.0.0.1", "--port", str(port), "--save", ""],
            "nats-server": ["-a", "127.0.0.1", "-p", str(port)],
        }
        quiet = subprocess.DEVNULL
        process = subprocess.Popen([program, *given[program]], cwd=folder, stdout=quiet, stderr=quiet)
        try:
            time.sleep(1.0)
            yield f"{program.removesuffix('-server')}://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def render(rows: list[dict[str, Any]], command: str) -> str:
    lines = [
        "# What it costs to decide as one",
        "",
        f"`{command}`: prompts of {BLOCKS} blocks, {ENDPOINTS} endpoints, one process that decides and one that "
        "listens, batches after 5 ms. CPU in microseconds a decision (index, ledger, first token and end; no HTTP). "
        f"Load average of the two cores at the end: {os.getloadavg()[0]:.0f}. `late turn`: by how much a timer of the "
        "listener's event loop is late, which is waiting for a core and the work of its own batches. The lag counts "
        "from when a batch is sent; a decision waits at most 5 ms for its batch before.",
        "",
        "| by | decisions/s | CPU | more than alone | listener's CPU | messages/s | lag p50 | p99 "
        "| late turn p99 | known |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sender, heard = row["sender"], row["listener"]
        if row["kind"] == "nobody":
            base_us = 1e6 * sender["cpu"] / sender["decided"]
        us = 1e6 * sender["cpu"] / sender["decided"]
        first = f"| {row['kind']} | {sender['decided'] / sender['took']:,.0f} | {us:.1f} |"
        if heard is None:
            lines.append(f"{first} | | | | | | |")
            continue
        lines.append(
            f"{first} {us - base_us:+.1f} | {1e6 * heard['cpu'] / max(1, heard['told']):.1f} | "
            f"{sender['sent'] / sender['took']:,.0f} | {1000 * heard['p50']:.2f} ms | {1000 * heard['p99']:.2f} ms | "
            f"{1000 * heard['turn_p99']:.2f} ms | "
            f"{heard['ratio']:.2%} |"
        )
    return "\n".join(lines) + "\n"


def measure_all(rate: int, seconds: float) -> Iterator[dict[str, Any]]:
    """By each way there is."""
    yield measure("nobody", "", rate, seconds)
    with tempfile.TemporaryDirectory() as folder:
        yield measure("datagrams", folder, rate, seconds)
    for program in ("redis-server", "nats-server"):
        if shutil.which(program) is not None:
            with server(program) as url:
                yield measure(url.partition(":")[0], url, rate, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1000,3000,10000")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports" / "exchange.md")
    args = parser.parse_args()
    rows = [row for rate in args.rates.split(",") for row in measure_all(int(rate), args.seconds)]
    text = render(rows, f"python -m benchmarks.exchange --rates {args.rates} --seconds {args.seconds:g}")
    args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
