"""A closed-loop load generator in a process of its own; wrk drives the cases it can, this one streams and fallbacks.

`python -m benchmarks.load PORT BODY_FILE CONNECTIONS SECONDS` prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

PATH = "/v1/chat/completions"
_EVENT_MARK = b'data: {"id"'


@dataclass(frozen=True)
class Load:
    """Result of a load: `latency_p50_ms` of whole responses, `events` of streams."""

    requests: int
    seconds: float
    events: int
    latency_p50_ms: float
    errors: int


class _Counter:
    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self.events = 0
        self.errors = 0


class _Client(asyncio.Protocol):
    """One connection that asks again as soon as it was answered."""

    def __init__(self, request: bytes, counter: _Counter) -> None:
        self._request = request
        self._counter = counter
        self._left: int | None = None  # body bytes to come; None: in the head; -1: chunked
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def _ask(self) -> None:
        self._left, self._head = None, b""
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._counter.events += data.count(_EVENT_MARK)
        if self._left is None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            if not head.startswith(b"http/1.1 200"):
                self._counter.errors += 1
            _, length, rest = head.partition(b"content-length:")
            self._left = int(rest.split(b"\r\n")[0]) if length else -1
        if self._left >= 0:
            self._left -= len(data)
            done = self._left <= 0
        else:
            done = data.endswith(b"0\r\n\r\n")
        if done:
            self._counter.latencies_s.append(time.perf_counter() - self._started)
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._counter.errors += exc is not None


async def drive(port: int, body: bytes, connections: int, seconds: float) -> Load:
    """Drive the load in this process."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    request = head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    counter = _Counter()
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    clients = [
        await loop.create_connection(lambda: _Client(request, counter), "127.0.0.1", port) for _ in range(connections)
    ]
    await asyncio.sleep(max(0.0, started + seconds - time.perf_counter()))
    elapsed = time.perf_counter() - started
    result = Load(
        len(counter.latencies_s), elapsed, counter.events, _median(counter.latencies_s) * 1000, counter.errors
    )
    for transport, _ in clients:
        transport.abort()
    return result


def run_program(port: int, program: str, *, connections: int, seconds: float, core: int, seed: int) -> Load:
    """One load of wrk by its own program, which gets `seed`, in a child process pinned to `core`."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "load.lua")
        script.write_text(program + _WRK_DONE)
        command = ["wrk", "-t1", f"-c{connections}", f"-d{math.ceil(seconds)}s", "-s", str(script)]
        target = f"http://127.0.0.1:{port}{PATH}"
        output = _output(["taskset", "-c", str(core), *command, target, "--", str(seed)])
        return Load(**json.loads(output.rstrip().splitlines()[-1]))


def run(port: int, body: bytes, *, connections: int, seconds: float, core: int, streams: bool) -> Load:
    """One load in a child process pinned to `core`: wrk where it is installed and the case needs no event count."""
    wrk = None if streams else shutil.which("wrk")
    with tempfile.TemporaryDirectory() as folder:
        if wrk is None:
            path = Path(folder, "body")
            path.write_bytes(body)
            command = [sys.executable, "-m", "benchmarks.load", str(port), str(path), str(connections), str(seconds)]
            line = _output(["taskset", "-c", str(core), *command])
            return Load(**json.loads(line))
        script = Path(folder, "post.lua")
        script.write_text(
            'wrk.method = "POST"\nwrk.headers["content-type"] = "application/json"\n'
            f"wrk.body = [==[{body.decode()}]==]\n" + _WRK_DONE
        )
        command = [wrk, "-t1", f"-c{connections}", f"-d{math.ceil(seconds)}s", "-s", str(script)]
        output = _output(["taskset", "-c", str(core), *command, f"http://127.0.0.1:{port}{PATH}"])
        return Load(**json.loads(output.rstrip().splitlines()[-1]))


_WRK_DONE = """
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('\\n{"requests": %d, "seconds": %f, "events": 0, "latency_p50_ms": %f, "errors": %d}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1000,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    outcome = uvloop.run(
        drive(int(arguments[0]), Path(arguments[1]).read_bytes(), int(arguments[2]), float(arguments[3]))
    )
    print(json.dumps(outcome.__dict__))
