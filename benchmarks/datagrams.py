"""Senders that flood the sockets of two workers: `python -m benchmarks.datagrams [--seconds 4]`.

Local processes of the same user send as many datagrams as the kernel takes to the sockets by which workers exchange
what they know, while a client sends chats. The kernel keeps ten datagrams a socket and holds senders back beyond that,
so the rate is the one at which the workers read. Nothing else is in these datagrams than bytes that are no message.
The CPU time of a datagram at the workers is theirs in excess of that of as many chats without a flood. Every half
second the admin listener is asked whether the workers still follow each other (`/sync`), and then until they do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import psutil
import uvloop

from kvproxy.features.exchange import wire
from kvproxy.features.exchange.datagrams import DatagramLink
from kvproxy.operate.companion import Siblings
from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import FakeEngine
from tests.support.ports import free_ports
from tests.support.process import kvproxy_serve

SENDERS = (0, 1, 4, 16)
#: Sends to both sockets in turn for so many seconds, and prints how many datagrams were taken.
_SENDER = """
import socket, sys, time
paths, seconds, sent = sys.argv[2:], float(sys.argv[1]), 0
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for path in paths:
            out.sendto(b"x" * 100, path)
            sent += 1
print(sent, time.process_time())
"""


@dataclass
class Result:
    """One flood."""

    senders: int
    datagrams: float = 0.0  # a second
    answers: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    rss_mb: tuple[float, float] = (0.0, 0.0)  # of all processes, before and behind it
    sent: int = 0
    senders_s: float = 0.0  # of CPU
    workers_s: float = 0.0  # likewise
    synced: Counter[bool] = field(default_factory=Counter)  # readings of the workers during the flood
    again_s: float = 0.0  # until they follow each other, after it


async def ask(client: httpx.AsyncClient, result: Result, over: asyncio.Event) -> None:
    """Send chats one after the other."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    while not over.is_set():
        began = time.monotonic()
        try:
            answer = await client.post("/v1/chat/completions", json=body)
            result.answers[str(answer.status_code)] += 1
        except httpx.TransportError as error:
            result.answers[type(error).__name__] += 1
        result.took_s.append(time.monotonic() - began)


def rss_mb(pid: int) -> float:
    """Return the memory of a process and its children."""
    root = psutil.Process(pid)
    memory: float = sum(one.memory_info().rss for one in (root, *root.children(recursive=True))) / 1e6
    return memory


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    root = psutil.Process(pid)
    times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


async def is_synced(admin: str) -> bool:
    """Return whether the workers follow each other."""
    with suppress(httpx.TransportError, ValueError, KeyError):
        async with httpx.AsyncClient(timeout=10) as client:
            return bool((await client.get(f"{admin}/sync")).json()["status"] == "synced")
    return False


async def watch(admin: str, result: Result, over: asyncio.Event) -> None:
    """Ask whether the workers follow each other, again and again."""
    while not over.is_set():
        result.synced[await is_synced(admin)] += 1
        await asyncio.sleep(0.5)


async def flood(url: str, admin: str, pid: int, paths: list[str], *, senders: int, seconds: float) -> Result:
    """Return how requests fare beside so many senders."""
    result, over = Result(senders), asyncio.Event()
    before, began_s = rss_mb(pid), cpu_s(pid)
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", _SENDER, str(seconds), *paths)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(ask(client, result, over))
        group.create_task(watch(admin, result, over))
        running = [await asyncio.create_subprocess_exec(*command, stdout=pipe) for _ in range(senders)]
        if not running:
            await asyncio.sleep(seconds)
        said = [(await one.communicate())[0].split() for one in running]
        over.set()
    ended = time.monotonic()
    while not await is_synced(admin) and time.monotonic() - ended < 60:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    result.again_s = time.monotonic() - ended
    result.sent = sum(int(sent) for sent, _ in said)
    result.senders_s = sum(float(took_s) for _, took_s in said)
    result.workers_s = cpu_s(pid) - began_s
    result.datagrams = result.sent / seconds
    result.rss_mb = (before, rss_mb(pid))
    return result


async def link_alone(seconds: float) -> float:
    """Return how many datagrams a second one sender gets to a link in a process that does nothing else."""
    seen = 0

    def count(payload: bytes) -> None:
        nonlocal seen
        with suppress(msgspec.DecodeError):
            wire.decode(payload)
        seen += 1

    with tempfile.TemporaryDirectory() as name:
        async with DatagramLink(Siblings(Path(name), 0, 2), on_message=count):
            command = (sys.executable, "-c", _SENDER, str(seconds), f"{name}/sync-0.sock")
            sender = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            await sender.communicate()
    return seen / seconds


async def sockets(folder: Path) -> list[str]:
    """Return the sockets of both workers once they are there."""
    while len(found := sorted(map(str, folder.rglob("sync-*.sock")))) < 2:  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.1)
    return found


async def run(seconds: float) -> list[Result]:
    port, admin = free_ports(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TMPDIR"] = name
        config = folder / "config.json"
        async with serve(FakeEngine("a")) as engine:
            settings = {"listen": f"127.0.0.1:{port}", "workers": 2, "admin": {"port": admin}}
            config.write_text(json.dumps({**settings, "endpoints": {"a": engine}}))
            async with kvproxy_serve("--config", str(config)) as proxy:
                paths = await sockets(folder)
                where = (proxy.url, f"http://127.0.0.1:{admin}", proxy.process.pid, paths)
                return [await flood(*where, senders=count, seconds=seconds) for count in SENDERS]


def report(results: list[Result], seconds: float) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Datagrams",
        "",
        (__doc__ or "").split("\n\n", 1)[1].strip(),
        "",
        f"Command: `python -m benchmarks.datagrams --seconds {seconds:g}`, load {os.getloadavg()[0]:.0f} on"
        f" {os.cpu_count()} cores.",
        "",
        "| senders | datagrams/s | CPU us of one at its sender, at the worker | chats | median ms | longest ms"
        " | RSS MB before, behind | workers synced during it | after s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    chat_s = results[0].workers_s / max(1, results[0].answers.total())
    for one in results:
        took_ms = sorted(1e3 * took for took in one.took_s)
        answers = ", ".join(f"{count} x {kind}" for kind, count in sorted(one.answers.items()))
        worker_s = one.workers_s - chat_s * one.answers.total()
        each = f"{1e6 * one.senders_s / one.sent:.1f}, {1e6 * worker_s / one.sent:.1f}" if one.sent else ""
        lines.append(
            f"| {one.senders} | {one.datagrams:,.0f} | {each} | {answers} | {took_ms[len(took_ms) // 2]:.1f}"
            f" | {took_ms[-1]:.1f} | {one.rss_mb[0]:.0f}, {one.rss_mb[1]:.0f}"
            f" | {one.synced[True]} of {one.synced.total()} | {one.again_s:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    alone = uvloop.run(link_alone(options.seconds))
    sys.stdout.write(report(asyncio.run(run(options.seconds)), options.seconds))
    sys.stdout.write(f"\nOne sender to one link in a process that does nothing else: {alone:,.0f} a second.\n")


if __name__ == "__main__":
    main()
