"""Longest turns of the event loop with 2,000 endpoints, by what goes on meanwhile.

`python -m benchmarks.loop_turns [--endpoints N] [--out FOLDER]`: a whole proxy in this process, its endpoints from a
file, all of them one stub engine. A turn is one callback of the loop, in CPU time of its thread, so that other load on
the machine counts little; of each phase the longest turns stand, with what ran. Writes loop-turns.md."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import tempfile
import time
from asyncio import events
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.data_plane import PROBE, stub_engines
from kvproxy.app import Proxy
from kvproxy.operate.commands.garbage import GarbageCollections
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server

LIMIT_MS = 5.0
PHASE_S = 6.0
REPEATS = 5

ABOUT = """\
# Longest turns of the event loop

`{command}`, kvproxy {revision}: {endpoints:,} endpoints from a file, all of them one stub engine, kv_aware, probes and
readings of metrics on, a request every 50 ms throughout, garbage collected as by `kvproxy serve`. A turn is one
callback of asyncio's loop, in CPU time of its thread; wanted: none above {limit:.0f} ms. Beside it stands what ran,
with the longest turn of each; `ask_for` is the admin listener's own work or the reload, `measure` the making of the
proxy. Garbage that is collected during a turn counts by itself.

| meanwhile | longest turn, ms | turns above {limit:.0f} ms | by, ms |
|---|---|---|---|
"""

GARBAGE = "collecting garbage"


class Turns:
    """Watches every callback of the loop while it is on; the garbage collected in one counts by itself."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, str]] = []
        self._run = events.Handle._run
        self._collecting_since = 0.0
        self._collected_s = 0.0  # in all

    def __enter__(self) -> Turns:
        run = self._run
        taken = self.taken

        def timed(handle: events.Handle) -> None:
            collected = self._collected_s
            began = time.thread_time()
            run(handle)
            took = 1e3 * (time.thread_time() - began)
            garbage = 1e3 * (self._collected_s - collected)
            taken.extend((ms, by) for ms, by in ((took - garbage, name_of(handle)), (garbage, GARBAGE)) if ms > 1.0)

        events.Handle._run = timed  # type: ignore[assignment, method-assign]
        gc.callbacks.append(self._count_garbage)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._count_garbage)
        events.Handle._run = self._run  # type: ignore[method-assign]

    def _count_garbage(self, phase: str, _: object) -> None:
        if phase == "start":
            self._collecting_since = time.thread_time()
        else:
            self._collected_s += time.thread_time() - self._collecting_since

    def take(self) -> list[tuple[float, str]]:
        """Return the long turns since the last call, the longest first."""
        found = sorted(self.taken, reverse=True)
        self.taken.clear()
        return found


def name_of(handle: events.Handle) -> str:
    """Return the task or function behind a callback."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        return str(getattr(coroutine, "__qualname__", coroutine))
    return str(getattr(callback, "__qualname__", callback))


def listed(port: int, count: int, *, weight: float = 1.0) -> str:
    """Return the file of endpoints."""
    return json.dumps([{"id": f"e{n}", "url": f"http://127.0.0.1:{port}/e{n}", "weight": weight} for n in range(count)])


@contextlib.asynccontextmanager
async def asked(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Send a request every 50 ms meanwhile."""

    async def ask() -> None:
        while True:
            await client.post(
                "/v1/chat/completions", content=PROBE.body(), headers={"content-type": "application/json"}
            )
            await asyncio.sleep(0.05)

    task = asyncio.create_task(ask(), name="client")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def ask_for(do: Callable[[], Awaitable[object]]) -> None:
    """Do what a phase is about; the admin listener's answers are made in here."""
    await do()


async def measure(port: int, count: int, folder: Path) -> list[str]:
    """Return the rows of the table."""
    file = folder / "endpoints.json"
    file.write_text(listed(port, count))
    raw = {"policy": "kv_aware", "discovery": {"file": {"path": str(file), "interval": 1}}}
    rows: list[str] = []

    def row(phase: str) -> None:
        found = [one for one in turns.take() if not one[1].startswith("asked.")]
        longest: dict[str, float] = {}
        for took, by in found:
            longest.setdefault(by, took)
        names = ", ".join(f"{by} {took:.0f}" for by, took in longest.items() if took > LIMIT_MS) or "-"
        above = sum(took > LIMIT_MS for took, _ in found)
        rows.append(f"| {phase} | {found[0][0] if found else 0.0:.1f} | {above} | {names} |")
        print(rows[-1], flush=True)

    with Turns() as turns:
        async with (
            Proxy(load_config(raw)) as proxy,
            Server(proxy) as server,
            GarbageCollections(
                is_quiet=lambda: not proxy.generations.current.running, replaced=lambda: proxy.generations.ended
            ),
        ):
            await asyncio.sleep(0)  # so that the turn of the start is over
            row("start")
            admin = httpx.AsyncClient(transport=httpx.ASGITransport(app=proxy.admin), base_url="http://127.0.0.1:8889")
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client, admin, asked(client):
                await asyncio.sleep(0)
                turns.take()  # the client's own start

                async def get(path: str) -> None:
                    (await admin.get(path)).raise_for_status()

                async def change() -> None:
                    file.write_text(listed(port, count, weight=2.0))
                    await asyncio.sleep(2)
                    file.write_text(listed(port, count // 2))
                    await asyncio.sleep(2)
                    file.write_text(listed(port, count))
                    await asyncio.sleep(4)

                phases: dict[str, Callable[[], Awaitable[object]]] = {
                    "probes, readings, requests": lambda: asyncio.sleep(PHASE_S),
                    "`/metrics`": lambda: get("/metrics"),
                    "`/live`": lambda: get("/live"),
                    "`/endpoints`": lambda: get("/endpoints"),
                    "`/cache/status`": lambda: get("/cache/status"),
                    "the file changes: weights, half leave, half come": change,
                    "reload": lambda: proxy.reload(load_config({**raw, "retry": {"attempts": 2}})),
                    "after the reload": lambda: asyncio.sleep(PHASE_S),
                }
                for phase, do in phases.items():
                    for _ in range(REPEATS if phase.startswith("`") else 1):
                        await asyncio.create_task(ask_for(do))
                    row(phase)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", type=int, default=2000)
    parser.add_argument("--revision", default="", help="of this checkout, for the report")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, _ = stub_engines(stack, folder, core=1)
        rows = asyncio.run(measure(port, options.endpoints, folder))
    command = f"python -m benchmarks.loop_turns --endpoints {options.endpoints}"
    about = ABOUT.format(command=command, revision=options.revision, endpoints=options.endpoints, limit=LIMIT_MS)
    text = about + "\n".join(rows) + "\n"
    (options.out / "loop-turns.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
