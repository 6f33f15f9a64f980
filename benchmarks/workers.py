"""Gain of several workers, loss with a killed one, and delay of its decisions at the others.

`python -m benchmarks.workers [--workers 2] [--rounds 5] [--seconds 5] [--out FOLDER]`. Stub engines, load and proxy
share all cores, so that the rate is this machine's and CPU per request predicts that of another. Rounds of one process
and of several workers alternate. Writes workers.md and workers.json."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import load
from benchmarks.processes import Process
from benchmarks.report import machine
from benchmarks.workers_report import render
from tests.support.ports import free_ports

CONNECTIONS = 64
STREAMS = 100
_SERVES = re.compile(r"worker (\d+) serves \(pid (\d+)\)")
#: Every request another of 500 conversations, of about 2 KB.
_WRK = """
local n = 0
local rest = string.rep("lorem ipsum dolor ", 105)
function request()
  n = n + 1
  local body = string.format('{"model": "bench", "messages": [{"role": "user", "content": "%d %s"}]}', n % 500, rest)
  return wrk.format("POST", "/v1/chat/completions", {["content-type"] = "application/json"}, body)
end
"""


@dataclass(frozen=True)
class Rate:
    """One load. `shares`: of the clients' connections, by worker."""

    rate: float
    cpu_us: float  # of all processes of the proxy, per request
    p50_ms: float
    errors: int
    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class Killed:
    """One worker killed with streams under way."""

    streams: int
    its_own: int  # connections it had
    broken: int
    refused: int  # new requests while it was away that got no answer
    asked: int  # of so many
    back_s: float


class Served:
    """A proxy with so many workers before stub engines."""

    def __init__(self, process: Process, *, port: int, admin: int, folder: Path) -> None:
        self.port = port
        self._process = process
        self._admin = admin
        self._folder = folder

    def load(self, seconds: float) -> Rate:
        """As much as it takes."""
        script = self._folder / "post.lua"
        script.write_text(_WRK + load._WRK_DONE)
        url = f"http://127.0.0.1:{self.port}"
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:.0f}s", "-s", str(script), url]
        before_s = self._process.cpu_s()
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(seconds / 2)
        shares = tuple(len(self.client_ports(pid)) for pid in self.workers().values())
        output, _ = running.communicate()
        cpu_s = self._process.cpu_s() - before_s
        done = json.loads(output.rstrip().splitlines()[-1])
        rate = done["requests"] / done["seconds"]
        return Rate(rate, 1e6 * cpu_s / done["requests"], done["latency_p50_ms"], done["errors"], shares)

    def workers(self) -> dict[int, int]:
        """Return the latest pid of each."""
        text = (self._folder / "log").read_text(errors="replace")
        return {int(index): int(pid) for index, pid in _SERVES.findall(text)}

    def client_ports(self, pid: int) -> set[int]:
        """Of connections it has accepted."""
        found = psutil.Process(pid).net_connections("tcp4")
        return {one.raddr.port for one in found if one.status == "ESTABLISHED" and one.laddr.port == self.port}

    def lags(self) -> list[dict[str, Any]]:
        """Return the workers' reports of each other."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin}/sync", timeout=5) as answer:
            peers: list[dict[str, Any]] = json.load(answer)["peers"]
        return peers


@contextlib.contextmanager
def served(workers: int, engines: Sequence[int]) -> Iterator[Served]:
    """Ready, with the default chain and kv_aware."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, admin = free_ports(2)
        endpoints = {f"engine-{number}": f"http://127.0.0.1:{at}" for number, at in enumerate(engines)}
        text = {"endpoints": endpoints, "policy": "kv_aware", "workers": workers, "log": {"level": "info"},
                "listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin}",
                "filters": ["request_id", "inference_request", "kvcache", "router"]}  # fmt: skip
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(text))
        command = [sys.executable, "-m", "kvproxy", "serve", "-c", str(config)]
        process = stack.enter_context(Process(command, core=cores(), log=folder / "log"))
        one = Served(process, port=port, admin=admin, folder=folder)
        body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "hello"}]}).encode()
        if problem := process.wait_until_ready(port, body, path=load.PATH):
            raise SystemExit(f"kvproxy: {problem}")
        while workers > 1 and len(one.workers()) < workers:
            time.sleep(0.1)
        yield one


def cores() -> str:
    """All there are."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


async def kill_one(proxy: Served) -> Killed:
    """With streams at both: which end whole, and what happens to requests that come meanwhile."""
    streams: dict[int, asyncio.Task[bool]] = {}
    for _ in range(STREAMS):
        port, task = await _begin_stream(proxy.port)
        streams[port] = task
    pid = next(iter(proxy.workers().values()))
    its_own = proxy.client_ports(pid) & streams.keys()
    before, killed_at = proxy.workers(), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    asked = refused = 0
    while proxy.workers() == before and time.monotonic() - killed_at < 60:
        asked += 1
        refused += not await _ask(proxy.port)
    back_s = time.monotonic() - killed_at
    whole = {port: await task for port, task in streams.items()}
    broken = {port for port, is_whole in whole.items() if not is_whole}
    assert broken <= its_own, "a stream of another worker broke"
    return Killed(len(streams), len(its_own), len(broken), refused, asked, back_s)


async def _begin_stream(port: int) -> tuple[int, asyncio.Task[bool]]:
    body = b'{"model": "bench", "stream": true, "user": "paced", "messages": [{"role": "user", "content": "hi"}]}'
    reader, writer = await _send(port, body)
    await reader.readuntil(b"\n\n")
    local: int = writer.get_extra_info("sockname")[1]

    async def rest() -> bool:
        try:
            return (await reader.read()).endswith(b"0\r\n\r\n")
        except OSError:
            return False
        finally:
            writer.close()

    return local, asyncio.create_task(rest())


async def _ask(port: int) -> bool:
    try:
        reader, writer = await _send(port, b'{"model": "bench", "messages": [{"role": "user", "content": "hello"}]}')
        answer = await reader.read()
    except OSError:
        return False
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")


async def _send(port: int, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {load.PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    return reader, writer


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(prog="benchmarks.workers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    options = parser.parse_args(arguments)
    rates: dict[int, list[Rate]] = {1: [], options.workers: []}
    with contextlib.ExitStack() as stack:
        engines = free_ports(4)
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "stub"
        stub = [sys.executable, "-m", "benchmarks.stub", *map(str, engines)]
        stack.enter_context(Process(stub, core=cores(), log=log))
        proxies = {count: stack.enter_context(served(count, engines)) for count in rates}
        for number in range(options.rounds):
            for count in sorted(rates, reverse=bool(number % 2)):
                rates[count].append(proxies[count].load(options.seconds))
                print(count, "workers:", rates[count][-1], flush=True)
        lags = proxies[options.workers].lags()
        killed = asyncio.run(kill_one(proxies[options.workers]))
        print(killed, lags, flush=True)
    command = " ".join(["python -m benchmarks.workers", *(arguments or sys.argv[1:])])
    about = machine(len(os.sched_getaffinity(0)), command)
    options.out.mkdir(parents=True, exist_ok=True)
    raw = {"about": about, "rates": {count: [asdict(one) for one in each] for count, each in rates.items()},
           "killed": asdict(killed), "lags": lags}  # fmt: skip
    (options.out / "workers.json").write_text(json.dumps(raw, indent=1) + "\n")
    (options.out / "workers.md").write_text(render(raw))
    print((options.out / "workers.md").read_text())


if __name__ == "__main__":
    main()
