"""Cost of a scrape of `/metrics` in the proxy: throughput, latency, and how long it holds the event loop.

`python -m benchmarks.scrape [--rounds 7] [--seconds 5] [--out FOLDER]`. The proxy with its default chain runs on core
0; stub engines, load and scraper share core 1. Rounds with and without a scrape a second alternate. Writes scrape.md
and scrape.json."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import yaml

from benchmarks import load, scrape_report
from benchmarks.processes import Process
from benchmarks.scrape_page import MODELS, configuration, page
from benchmarks.scrape_report import Measured, Round
from tests.support.ports import free_ports

ENDPOINTS = (2, 64)
STEADY_RATE = 1000.0
INTERVAL_S = 1.0
CONNECTIONS = 32


def body(model: str, number: int) -> bytes:
    """Return a chat request of about 2 KB; each number another prompt."""
    content = f"{number} " + "lorem ipsum dolor " * 105
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()


def scrape(port: int) -> bytes:
    """One page over HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()


@contextlib.contextmanager
def scraping(port: int, interval_s: float) -> Iterator[list[int]]:
    """Scrapes beside what the block does; the list holds the sizes of the pages."""
    ended, sizes = threading.Event(), list[int]()

    def run() -> None:
        while not ended.wait(interval_s if sizes else interval_s / 2):
            sizes.append(len(scrape(port)))

    thread = threading.Thread(target=run, name="scraper")
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()


class Bench:
    """A proxy process under load."""

    def __init__(self, proxy: Process, *, port: int, admin: int, core: int, folder: Path) -> None:
        self._proxy = proxy
        self._port = port
        self._admin = admin
        self._core = core
        self._body = folder / "body"
        self._body.write_bytes(body(MODELS[0], 0))

    def warm(self, endpoints: int) -> int:
        """Send requests until every endpoint has answered for every model; returns the page's bytes then."""
        wanted = {f'endpoint="engine-{e}",model="{model}"' for e in range(endpoints) for model in MODELS}
        for number in range(200):
            for model in MODELS:
                for index in range(endpoints // 2 + 1):
                    self._ask(body(model, number * 1000 + index))
            text = scrape(self._admin).decode()
            wanted = {labels for labels in wanted if labels not in text}
            if not wanted:
                return len(text)
        raise SystemExit(f"never answered: {sorted(wanted)[:5]}")

    def saturated(self, seconds: float) -> tuple[float, float, float, float, int]:
        """Return rate, p50, p99, p99.9 (ms; 0 if the load does not report it) and errors at saturation."""
        done = load.run(
            self._port,
            self._body.read_bytes(),
            connections=CONNECTIONS,
            seconds=seconds,
            core=self._core,
            streams=False,
        )
        return done.requests / done.seconds, done.latency_p50_ms, 0.0, 0.0, done.errors

    def steady(self, seconds: float) -> tuple[float, float, float, float, int]:
        """Return the same at a steady rate."""
        command = [sys.executable, "-m", "benchmarks.steady", str(self._port), str(self._body)]
        pinned = ["taskset", "-c", str(self._core), *command, str(STEADY_RATE), str(seconds)]
        line = subprocess.run(pinned, check=True, capture_output=True, text=True).stdout
        done = json.loads(line)
        return done["rate"], done["p50_ms"], done["p99_ms"], done["p999_ms"], done["errors"]

    def round(self, kind: str, *, seconds: float, scraped: bool) -> Round:
        """One load; `kind` is saturated or steady."""
        with scraping(self._admin, INTERVAL_S) if scraped else contextlib.nullcontext(list[int]()) as sizes:
            before_s = self._proxy.cpu_s()
            began = time.perf_counter()
            rate, p50, p99, p999, errors = self.saturated(seconds) if kind == "saturated" else self.steady(seconds)
            cpu_s = self._proxy.cpu_s() - before_s
            requests = rate * min(seconds, time.perf_counter() - began)
        return Round(rate, 1e3 * cpu_s / max(requests, 1.0), p50, p99, p999, errors, len(sizes))

    def cpu_ms_a_scrape(self, scrapes: int = 100) -> float:
        """CPU time of the proxy for one scrape, beyond what it uses at rest."""
        began, before_s = time.perf_counter(), self._proxy.cpu_s()
        time.sleep(3.0)
        at_rest = (self._proxy.cpu_s() - before_s) / (time.perf_counter() - began)
        began, before_s = time.perf_counter(), self._proxy.cpu_s()
        for _ in range(scrapes):
            scrape(self._admin)
        used_s = self._proxy.cpu_s() - before_s - at_rest * (time.perf_counter() - began)
        return 1e3 * used_s / scrapes

    def _ask(self, content: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        with contextlib.closing(connection):
            connection.request("POST", load.PATH, content, {"content-type": "application/json"})
            assert connection.getresponse().status == 200


def measure(endpoints: int, *, rounds: int, seconds: float, core: int) -> Measured:
    """Measure a proxy over that many engines, with and without a scraper in turn."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        *ports, listen, admin = free_ports(endpoints + 2)
        stub = [sys.executable, "-m", "benchmarks.stub", *map(str, ports)]
        engines = stack.enter_context(Process(stub, core=core, log=folder / "stub.log"))
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(configuration(ports, listen=listen, admin=admin)))
        probe = body(MODELS[0], 0)
        if problem := engines.wait_until_ready(ports[-1], probe, path=load.PATH):
            raise SystemExit(f"the stub engines: {problem}")
        serve = [sys.executable, "-m", "kvproxy", "serve", "-c", str(config)]
        proxy = stack.enter_context(Process(serve, core=0, log=folder / "log"))
        if problem := proxy.wait_until_ready(listen, probe, path=load.PATH):
            raise SystemExit(f"kvproxy: {problem}")
        bench = Bench(proxy, port=listen, admin=admin, core=core, folder=folder)
        page_bytes = bench.warm(endpoints)
        found: dict[str, list[tuple[Round, Round]]] = {"saturated": [], "steady": []}
        for number in range(rounds):
            for kind, pairs in found.items():
                order = (False, True) if number % 2 else (True, False)
                pair = {scraped: bench.round(kind, seconds=seconds, scraped=scraped) for scraped in order}
                pairs.append((pair[False], pair[True]))
                print(f"{endpoints} endpoints, {kind}: {pair[False].rate:.0f}/s, {pair[True].rate:.0f}/s", flush=True)
        return Measured(endpoints, page_bytes, bench.cpu_ms_a_scrape(), found["saturated"], found["steady"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(prog="benchmarks.scrape", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    options = parser.parse_args(arguments)
    cores = psutil.cpu_count() or 1
    core = 1 if cores > 1 else 0
    os.sched_setaffinity(0, {core})
    logging.disable(logging.WARNING)
    pages = [asyncio.run(page(endpoints)) for endpoints in ENDPOINTS]
    measured = [
        measure(endpoints, rounds=options.rounds, seconds=options.seconds, core=core) for endpoints in ENDPOINTS
    ]
    command = " ".join(["python -m benchmarks.scrape", *(arguments or sys.argv[1:])])
    scrape_report.write(options.out, pages, measured, about=scrape_report.about(cores, command))
    print((options.out / "scrape.md").read_text())


if __name__ == "__main__":
    main()
