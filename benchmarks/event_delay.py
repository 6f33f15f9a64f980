"""Delay of an engine's KV event until every process counts it: engines publish over ZMQ, processes follow them.

`python -m benchmarks.event_delay [--processes N ...] [--engines N] [--together N ...] [--rate N] [--seconds S]`. Each
process follows every engine by itself, as workers and replicas do, with the proxy's own subscriber and index. A message
has `--together` events of 4 blocks; the first token of each is its number, by which both ends note their time. Writes
event-delay.md."""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import random
import time
from array import array
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import zmq

from benchmarks.event_fleet import BLOCK_TOKENS, EVENT_BLOCKS, stored
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.cache.indexes.block_events import BlockStored, KvEvent
from kvproxy.cache.indexes.precise import PreciseIndex
from kvproxy.features.kv_events.status import StreamReason, StreamStatus
from kvproxy.features.kv_events.subscriber import KvEventSubscriber

#: At the start, while subscriptions come to be and caches are cold.
WARM_S = 2.0


class Shape(NamedTuple):
    """One run."""

    processes: int
    engines: int
    together: int
    rate: int  # events a second, of all engines together
    seconds: float

    @property
    def events(self) -> int:
        """Published in all."""
        messages = int(self.rate * (self.seconds + WARM_S)) // self.together
        return messages * self.together


class Counted:
    """An index that notes when each numbered event was in it."""

    def __init__(self, events: int, engines: int) -> None:
        self.at = array("d", bytes(8 * events))
        self.ready = asyncio.Event()  # all engines are followed
        self._engines = engines
        self._followed = set[EndpointId]()
        self._index = PreciseIndex()

    def apply(self, endpoint: EndpointId, dp_rank: int, events: Sequence[KvEvent]) -> None:
        """As of KvEventConsumer."""
        self._index.apply_events(endpoint, dp_rank, events)
        now = time.monotonic()
        for event in events:
            if isinstance(event, BlockStored):
                self.at[event.token_ids[0]] = now

    def cleared(self, endpoint: EndpointId, dp_rank: int) -> None:
        """As of KvEventConsumer."""

    def state_changed(self, endpoint: EndpointId, dp_rank: int, status: StreamStatus) -> None:
        """As of KvEventConsumer."""
        if status.reason is StreamReason.NO_REPLAY:  # the first words after the connection
            self._followed.add(endpoint)
            if len(self._followed) == self._engines:
                self.ready.set()


async def follow(ports: Sequence[int], shape: Shape, line: Connection) -> None:
    """Follow every engine until the other end sends a word; send back when each event was counted, and the CPU."""
    counted = Counted(shape.events, len(ports))
    async with AsyncExitStack() as stack:
        for number, port in enumerate(ports):
            subscriber = KvEventSubscriber(
                EndpointId(f"e{number}"),
                KvEventSource(0, f"tcp://127.0.0.1:{port}", None, "kv-events"),
                consumer=counted,
                metrics=Metrics(),
                clock=time.monotonic,
                wall_clock=time.monotonic,
            )
            await stack.enter_async_context(subscriber)
        await counted.ready.wait()
        line.send("ready")
        before_s = time.process_time()
        loop = asyncio.get_running_loop()
        word = asyncio.Event()
        loop.add_reader(line.fileno(), word.set)
        await word.wait()
        loop.remove_reader(line.fileno())
    line.send((counted.at.tobytes(), time.process_time() - before_s))


def run_process(ports: Sequence[int], shape: Shape, line: Connection) -> None:
    """One process of the proxy."""
    logging.disable()
    asyncio.run(follow(ports, shape, line))


def publish(sockets: Sequence[zmq.Socket[bytes]], shape: Shape) -> array[float]:
    """Publish at an even pace, engine by engine; returns when each event went out."""
    rng = random.Random(3)
    sent = array("d")
    parents: list[int | None] = [None] * len(sockets)
    pace_s = shape.together / shape.rate
    began = time.monotonic()
    for message in range(shape.events // shape.together):
        due = began + message * pace_s
        if (early_s := due - time.monotonic()) > 0.0005:
            time.sleep(early_s)
        engine = message % len(sockets)
        made = []
        for one in range(shape.together):
            names = [rng.getrandbits(63) for _ in range(EVENT_BLOCKS)]
            tokens = [message * shape.together + one, *(range(engine, engine + EVENT_BLOCKS * BLOCK_TOKENS - 1))]
            made.append(stored(names, parents[engine], tokens))
            parents[engine] = None if message % (64 * len(sockets)) < len(sockets) else names[-1]
        payload = msgspec.msgpack.encode([0.0, made, 0])
        number = message // len(sockets)
        sent.extend([time.monotonic()] * shape.together)
        sockets[engine].send_multipart([b"kv-events", number.to_bytes(8, "big"), payload])
    return sent


def measure(shape: Shape) -> str:
    """Run once; return the row."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(shape.engines)]
    for one in sockets:
        one.setsockopt(zmq.SNDHWM, 100_000)
    ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in sockets]
    lines = []
    processes = []
    spawn = multiprocessing.get_context("spawn")
    for _ in range(shape.processes):
        here, there = spawn.Pipe()
        process = spawn.Process(target=run_process, args=(ports, shape, there))
        process.start()
        lines.append(here)
        processes.append(process)
    for line in lines:
        line.recv()
    time.sleep(0.5)  # for their subscriptions on the way
    sent = publish(sockets, shape)
    time.sleep(1.0)
    for line in lines:
        line.send("end")
    answers: list[tuple[bytes, float]] = [line.recv() for line in lines]
    for process in processes:
        process.join()
    context.destroy(linger=0)
    first = int(shape.rate * WARM_S)
    arrivals = [array("d", raw)[first:] for raw, _ in answers]
    missing = sum(at == 0.0 for column in arrivals for at in column)
    each = [at - was for column in arrivals for at, was in zip(column, sent[first:], strict=True) if at]
    last = [max(ats) - was for was, *ats in zip(sent[first:], *arrivals, strict=True) if all(ats)]
    rate = (len(sent) - 1) / (sent[-1] - sent[0])
    cpu = " and ".join(f"{cpu_s / (shape.seconds + WARM_S):.2f}" for _, cpu_s in answers)
    return (
        f"| {shape.processes} | {shape.together} | {rate:,.0f} | {_shown(each)} | {_shown(last)} | {cpu} | {missing} |"
    )


def _shown(delays_s: Sequence[float]) -> str:
    ordered = sorted(delays_s)
    at = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99, 1.0)]
    return " / ".join(f"{1e3 * one:.1f}" for one in at)


ABOUT = """\
# Delay of KV events

`{command}`, kvproxy {revision}. {engines} engines publish {rate:,} `BlockStored` a second in all, of {blocks} blocks
each; every process follows all of them by itself, as workers and replicas do. From the call that publishes a message
until its events are in the index: median / 99th percentile / longest, to each process and to the last one; wanted: 50
ms. `missing` had not come a second after the end. The machine had a load of {load:.1f} on {cores} cores.

| processes | events a message | events a second | to a process, ms | to the last one, ms | cores, each | missing |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rate", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--revision", default="", help="of this checkout, for the report")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"))
    options = parser.parse_args()
    text = ABOUT.format(
        command=f"python -m benchmarks.event_delay --rate {options.rate} --seconds {options.seconds:g}",
        revision=options.revision,
        engines=options.engines,
        rate=options.rate,
        blocks=EVENT_BLOCKS,
        load=psutil.getloadavg()[0],
        cores=psutil.cpu_count(),
    )
    for processes in options.processes:
        for together in options.together:
            text += measure(Shape(processes, options.engines, together, options.rate, options.seconds)) + "\n"
            print(text.splitlines()[-1], flush=True)
    (options.out / "event-delay.md").write_text(text)


if __name__ == "__main__":
    main()
