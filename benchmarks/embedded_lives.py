"""Transports that start, end, change their event loop and are forked: what they leave behind in the process.

    python -m benchmarks.embedded_lives [--cycles N] [--loops N] [--forks N] > benchmarks/reports/embedded_lives.md

Open files, sockets, threads and tasks after the first and after the last of many; the stub engines have a process of
their own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil

import kvproxy
from benchmarks.embedded import PATH, body_of
from benchmarks.markdown import table
from benchmarks.processes import Process
from tests.support.ports import free_ports

Counts = tuple[int, int, int, int]
_URL = f"http://engines{PATH}"


def count(tasks: int = 0) -> Counts:
    """Open files, sockets, threads and tasks of this process."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), len(process.net_connections()), threading.active_count(), tasks


async def _ask(client: httpx.AsyncClient, session: int) -> None:
    answer = await client.post(_URL, content=body_of(500, stream=False, session=session))
    assert answer.status_code == 200, answer.text


async def measure_cycles(engines: Mapping[str, str], *, cycles: int) -> tuple[Counts, Counts]:
    """Start and end a new transport each time."""
    seen = []
    for number in range(cycles):
        async with httpx.AsyncClient(transport=kvproxy.AsyncTransport(endpoints=engines), timeout=60.0) as client:
            await _ask(client, number)
        if number in (0, cycles - 1):
            await asyncio.sleep(0.2)
            seen.append(count(len(asyncio.all_tasks())))
    return seen[0], seen[-1]


def measure_loops(engines: Mapping[str, str], *, loops: int) -> tuple[Counts, Counts]:
    """Use one transport in event loops in turn and never close it."""
    transport = kvproxy.AsyncTransport(endpoints=engines)

    async def ask(number: int) -> int:
        await _ask(httpx.AsyncClient(transport=transport, timeout=60.0), number)
        return len(asyncio.all_tasks())

    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of sockets that no client closed
        for number in range(loops):
            tasks = asyncio.run(ask(number))
            seen.append(count(tasks))
    return seen[0], seen[-1]


def measure_forks(engines: Mapping[str, str], *, forks: int) -> tuple[Counts, Counts]:
    """Fork while a synchronous client is open; each child sends a request by the same client."""
    seen = []
    client = httpx.Client(transport=kvproxy.Transport(endpoints=engines), timeout=30.0)
    for number in range(forks):
        assert client.post(_URL, content=body_of(500, stream=False, session=number)).status_code == 200
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if client.post(_URL, content=body_of(500, stream=False, session=0)).status_code == 200 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        if number in (0, forks - 1):
            seen.append(count())
    client.close()
    return seen[0], seen[-1]


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--loops", type=int, default=100)
    parser.add_argument("--forks", type=int, default=200)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        one, two = free_ports(2)
        stub = [sys.executable, "-m", "benchmarks.stub", str(one), str(two)]
        process = stack.enter_context(Process(stub, core="0-1", log=folder / "stub.log"))
        engines = {"a": f"http://127.0.0.1:{one}", "b": f"http://127.0.0.1:{two}"}
        if problem := process.wait_until_ready(one, body_of(100, stream=False, session=0), path=PATH):
            raise SystemExit(problem)
        rows = [
            ("starts and ends", args.cycles, *asyncio.run(measure_cycles(engines, cycles=args.cycles))),
            ("event loops in turn, never closed", args.loops, *measure_loops(engines, loops=args.loops)),
            ("forks with an open client", args.forks, *measure_forks(engines, forks=args.forks)),
        ]
    options = f"--cycles {args.cycles} --loops {args.loops} --forks {args.forks}"
    text = [
        "# Transports that start, end, change loops and are forked",
        "",
        f"`python -m benchmarks.embedded_lives {options}`. Open files, sockets, threads and tasks of the process.",
        "",
        *table(
            ["what", "how many", "after the first", "after the last"], [[str(cell) for cell in row] for row in rows]
        ),
        "",
    ]
    sys.stdout.write("\n".join(text))


if __name__ == "__main__":
    main()
