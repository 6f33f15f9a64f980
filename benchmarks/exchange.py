"""Cost of several processes that decide as one, at 10,000 decisions a second: CPU, messages and lag, by the link.

    python -m benchmarks.exchange [--rates N,N...] [--seconds S]

One process decides (index, ledger, first token, end: no HTTP), a second one only listens; the same decisions without a
listener stand beside it, and so do bare datagrams: two more processes that only send one every 5 ms and receive it, at
the same time, which shows the machine's own pauses. Writes exchange.md of benchmarks/reports. Redis and NATS are left
out where they are not installed."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.routing_cells import ROOT
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cache.overlap.index_state import IndexState
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.features.exchange.metrics import SyncMetrics
from kvproxy.features.exchange.service import SyncService
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.lab.replay.replicas import RoutersCluster
from kvproxy.lab.replay.router import SimEndpoint
from kvproxy.operate.commands.garbage import GarbageCollections
from kvproxy.operate.companion import Siblings
from kvproxy.operate.config.load import load_config

ENDPOINTS, BLOCKS, SESSIONS = 8, 16, 2000


class Decider:
    """Decisions as fast as asked, each with its first token and its end a little later."""

    def __init__(self) -> None:
        self.endpoints = [
            SimEndpoint(EndpointId(f"e{number}"), number, None)  # type: ignore[arg-type]
            for number in range(ENDPOINTS)
        ]
        self.indexes = LocalIndexes(IndexState(endpoints=ENDPOINTS))
        self.cluster = RoutersCluster(self.indexes, KvAware(rng=Random(1)), None, self.endpoints)
        random = Random(2)
        self.prompts = [array("Q", (random.getrandbits(64) for _ in range(BLOCKS))) for _ in range(SESSIONS)]
        self._under_way: list[Any] = []
        self.decided = 0
        self.decided_at = array("d")

    def decide(self, count: int, now: float) -> None:
        for _ in range(count):
            number = self.decided
            endpoint = self.endpoints[number % ENDPOINTS]
            cursor = self.indexes.approximate.locate(self.prompts[number * 7 % SESSIONS])
            entry = self.indexes.route(endpoint.id, cursor)
            self._under_way.append((endpoint, entry, endpoint.load.reserve(1000, 200, now)))
            self.decided += 1
            self.decided_at.append(time.monotonic())
            if len(self._under_way) > 200:
                endpoint, entry, reservation = self._under_way.pop(0)
                endpoint.load.first_token(reservation, now)
                endpoint.load.release(reservation, now)
                self.indexes.settle_entry(entry, prefilled=True)


class Listening(SyncService):
    """Notes when it knew of how many decisions."""

    known: list[tuple[float, int]]

    def _heard(self, payload: bytes, *, store: bool) -> None:
        super()._heard(payload, store=store)
        told = sum(peer.heard.told for peer in self.peers.living)
        if not self.known or told > self.known[-1][1]:
            self.known.append((time.monotonic(), told))


def service_of(kind: str, number: int, where: str) -> Listening:
    raw: dict[str, Any] = {"endpoints": ["http://127.0.0.1:1"], "sync": {"replica": "m"}}
    siblings = None
    if kind == "datagrams":
        siblings = Siblings(Path(where), number, 2)
    else:
        raw["sync"] = {kind: where, "replica": f"m{number}"}
    service = Listening(
        load_config(raw), siblings=siblings, metrics=Metrics(), clock=time.monotonic, wall_clock=time.time
    )
    service.known = []
    return service


def as_the_proxy() -> GarbageCollections:
    """Its policy: by Python's own rule every object is looked at now and then, for half a second on a busy machine."""
    return GarbageCollections(is_quiet=lambda: False)


def waited_s() -> float:
    """For a core, by this process so far, as Linux counts it."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


async def send(kind: str, where: str, rate: int, seconds: float) -> dict[str, Any]:
    decider, service = Decider(), None
    if kind != "nobody":
        service = service_of(kind, 0, where)
        service.share(SharedState({"c": decider.cluster}), None, {})
        await service.__aenter__()
        while not service.peers.living:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
    async with as_the_proxy():
        began, cpu, waited = time.monotonic(), time.process_time(), waited_s()
        while (elapsed := time.monotonic() - began) < seconds:
            due = int(elapsed * rate) - decider.decided
            decider.decide(min(due, 200), time.monotonic())
            await asyncio.sleep(0.001)
        cpu, waited, took = time.process_time() - cpu, waited_s() - waited, time.monotonic() - began
    sent = 0.0
    if service is not None:
        sent = service._metrics.group(SyncMetrics).messages.labels("sent").value
        await asyncio.sleep(0.5)
        await service.__aexit__(None, None, None)
    return {
        "decided": decider.decided,
        "at": decider.decided_at,
        "cpu": cpu,
        "took": took,
        "sent": sent,
        "waited": waited,
    }


async def listen(kind: str, where: str, wire: Connection) -> dict[str, Any]:
    decider, service = Decider(), service_of(kind, 1, where)
    service.share(SharedState({"c": decider.cluster}), None, {})
    async with service:
        while not service.peers.living:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        [peer] = service.peers.living
        async with as_the_proxy():
            cpu, told, late, waited = time.process_time(), peer.heard.told, array("d"), waited_s()
            while peer.alive and not wire.poll():
                due = time.monotonic() + 0.005
                await asyncio.sleep(0.005)
                late.append(time.monotonic() - due)
            cpu, waited = time.process_time() - cpu, waited_s() - waited
        ratio = service.peers.lives.consistency_ratio(time.monotonic())
        heard = {"told": peer.heard.told - told, "known": service.known, "ratio": ratio}
        return {**heard, "cpu": cpu, "late": late, "waited": waited}


def listener(kind: str, where: str, wire: Connection) -> None:
    wire.send(asyncio.run(listen(kind, where, wire)))


async def receive_bare(path: str, wire: Connection) -> array[float]:
    """How late each datagram is."""
    late, loop = array("d"), asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.setblocking(False)
        bound.bind(path)
        wire.send("there")
        loop.add_reader(bound, lambda: late.append(time.monotonic() - struct.unpack("d", bound.recv(8))[0]))
        while not wire.poll():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        loop.remove_reader(bound)
    return late


async def send_bare(path: str, wire: Connection) -> None:
    wire.send("there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        while not wire.poll():
            sender.sendto(struct.pack("d", time.monotonic()), path)
            await asyncio.sleep(0.005)


def bare_receiver(path: str, wire: Connection) -> None:
    wire.send(asyncio.run(receive_bare(path, wire)))


def bare_sender(path: str, wire: Connection) -> None:
    asyncio.run(send_bare(path, wire))


@contextmanager
def bare_datagrams() -> Iterator[list[float]]:
    """Meanwhile, by two processes; how late each was, afterwards."""
    context, late = multiprocessing.get_context("spawn"), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for main in (bare_receiver, bare_sender):
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(f"{folder}/bare", theirs))
            process.start()
            processes.append((process, ours))
            ours.recv()
        yield late
        for process, ours in reversed(processes):
            ours.send("over")
            late += ours.recv() if process is processes[0][0] else ()
            process.join(10)


def delays(decided_at: Sequence[float], known: Sequence[tuple[float, int]]) -> list[float]:
    """From each decision to when the other one knew of it, in order; both have one clock."""
    found, first = list[float](), 0
    for at, told in known:
        found += [at - decided for decided in decided_at[first:told]]
        first = told
    return found


def quantile(values: Iterable[float], share: float) -> float:
    """0 of none."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


def measure(kind: str, where: str, rate: int, seconds: float) -> dict[str, Any]:
    if kind == "nobody":
        return {"kind": kind, "sender": asyncio.run(send(kind, where, rate, seconds)), "listener": None}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=listener, args=(kind, where, theirs))
    process.start()
    with bare_datagrams() as bare:
        sender = asyncio.run(send(kind, where, rate, seconds))
        ours.send("over")
        heard = ours.recv() if ours.poll(20) else None
    process.join(10)
    return {"kind": kind, "sender": sender, "listener": heard, "bare": bare}


@contextmanager
def server(program: str) -> Iterator[str]:
    """Start a store of its own, without a password."""
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
        f"Load average of the two cores at the end: {os.getloadavg()[0]:.0f}. `known after`: from a decision, its wait "
        "for the batch included, until the other process has it in its index. `bare`: one datagram of 8 bytes every "
        "5 ms between two processes that do nothing else, at the same time. `late turn`: by how much a timer of the "
        "listener's event loop is late, which is waiting for a core and the work of its own batches. `waited`: the "
        "share of the time that the two were ready to run and had no core (nothing on an idle machine); a process that "
        "sleeps most of the time, as the bare ones do, is let in front of those that wait.",
        "",
        "| by | decisions/s | CPU | more than alone | listener's CPU | messages/s | known after p50 | p99 "
        "| within 10 ms | bare p50 | bare p99 | late turn p99 | waited | known |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base_us = 0.0
    for row in rows:
        sender, heard = row["sender"], row["listener"]
        us = 1e6 * sender["cpu"] / sender["decided"]
        base_us = us if row["kind"] == "nobody" else base_us
        first = f"| {row['kind']} | {sender['decided'] / sender['took']:,.0f} | {us:.1f} |"
        if heard is None:
            lines.append(f"{first} | | | | | | | | | | |")
            continue
        took = delays(sender["at"], heard["known"])
        figures = [quantile(took, 0.5), quantile(took, 0.99)]
        others = [quantile(row["bare"], 0.5), quantile(row["bare"], 0.99), quantile(heard["late"], 0.99)]
        lines.append(
            f"{first} {us - base_us:+.1f} | {1e6 * heard['cpu'] / max(1, heard['told']):.1f} | "
            f"{sender['sent'] / sender['took']:,.0f} | {_in_ms(figures)} | "
            f"{sum(one <= 0.01 for one in took) / max(1, len(took)):.2%} | {_in_ms(others)} | "
            f"{(sender['waited'] + heard['waited']) / sender['took']:.0%} | {heard['ratio']:.2%} |"
        )
    return "\n".join(lines) + "\n"


def _in_ms(values: Iterable[float]) -> str:
    return " | ".join(f"{1000 * one:.2f} ms" for one in values)


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
