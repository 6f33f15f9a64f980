"""An open-loop load in a process of its own: requests at a steady rate, whether or not earlier ones were answered.

`python -m benchmarks.steady PORT BODY_FILE RATE SECONDS` prints one JSON line. Latency is counted from the moment a
request was due, so that a proxy that stands still is charged for all that waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.load import PATH

CONNECTIONS = 64
TICK_S = 0.0005


@dataclass(frozen=True)
class Steady:
    """Results; latencies of whole responses in ms."""

    rate: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    worst_ms: float
    errors: int


class _Client(asyncio.Protocol):
    """One connection; free while nothing is asked on it."""

    def __init__(self, load: SteadyLoad) -> None:
        self._load = load
        self._due = 0.0
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, due: float) -> None:
        """Send the request that was due then."""
        self._due, self._got = due, b""
        self.transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if found and len(body) >= int(length):
            self._load.answered(self, self._due, ok=head.startswith(b"HTTP/1.1 200"))


class SteadyLoad:
    """Requests that are due, connections that are free, latencies of those answered."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.latencies_s: list[float] = []
        self.errors = 0
        self.free: deque[_Client] = deque()
        self._due: deque[float] = deque()
        self._waited_for = 0
        self._enough = asyncio.Event()

    def due(self, at: float) -> None:
        """Send one now, or as soon as a connection is free."""
        if self.free:
            self.free.popleft().ask(at)
        else:
            self._due.append(at)

    def answered(self, client: _Client, due: float, *, ok: bool) -> None:
        """Count it, and ask for the next that waits."""
        self.latencies_s.append(time.perf_counter() - due)
        self.errors += not ok
        if len(self.latencies_s) == self._waited_for:
            self._enough.set()
        if self._due:
            client.ask(self._due.popleft())
        else:
            self.free.append(client)

    async def wait(self, answers: int, limit_s: float) -> None:
        """Until that many answers came in all, or too much time went by."""
        self._waited_for = answers
        if len(self.latencies_s) < answers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._enough.wait(), limit_s)


async def drive(port: int, body: bytes, rate: float, seconds: float) -> Steady:
    """Drive the load in this process."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    load = SteadyLoad(head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    loop = asyncio.get_running_loop()
    for _ in range(CONNECTIONS):
        _, client = await loop.create_connection(lambda: _Client(load), "127.0.0.1", port)
        load.free.append(client)
    started = time.perf_counter()
    sent, total = 0, int(rate * seconds)
    while sent < total:
        while sent < total and (at := started + sent / rate) <= time.perf_counter():
            load.due(at)
            sent += 1
        await asyncio.sleep(TICK_S)
    await load.wait(total, limit_s=5.0)
    elapsed_s = max(seconds, time.perf_counter() - started)
    ordered = sorted(load.latencies_s)

    def at_rank(share: float) -> float:
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    missing = total - len(ordered)
    return Steady(
        len(ordered) / elapsed_s, at_rank(0.5), at_rank(0.99), at_rank(0.999), at_rank(1.0), load.errors + missing
    )


if __name__ == "__main__":
    arguments = sys.argv[1:]
    outcome = uvloop.run(
        drive(int(arguments[0]), Path(arguments[1]).read_bytes(), float(arguments[2]), float(arguments[3]))
    )
    print(json.dumps(asdict(outcome)))
