"""Cost of forwarding a request: kvproxy beside nginx and the routers, on one core each, interleaved in one run.

`python -m benchmarks.data_plane [--rounds 3] [--seconds 3] [--only NAME...] [--out FOLDER]`. The proxy runs on core 0,
load generator and engines on core 1 (cores 0 and 0 where there is only one). Writes data-plane.md and
data-plane.json."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import before_after, load, peers, report
from benchmarks.processes import Process
from tests.support.ports import free_port


@dataclass(frozen=True)
class Case:
    """One load: body size, connections, streaming or not."""

    name: str
    connections: int
    body_bytes: int = 2048
    stream: str = ""  # "", burst, paced
    each_new: bool = False  # no prompt comes twice
    sessions: bool = False  # agents' turns, each with all messages of the ones before, of `body_bytes` on average

    def program(self) -> str:
        """Return wrk's program where not every request is the same; else ""."""
        if not (self.each_new or self.sessions):
            return ""
        return before_after.script(before_after.Case(self.name, self.body_bytes, sessions=self.sessions))

    def body(self) -> bytes:
        """Return a chat request of about that size."""
        request = {"model": "bench", "stream": bool(self.stream), "messages": [{"role": "user", "content": ""}]}
        text = json.dumps(request, separators=(",", ":"))
        # The engine reads the pace from the prompt: some routers write the body again and drop fields like `user`.
        filling = f"{self.stream} " + "lorem ipsum dolor " * (self.body_bytes // 18 + 1)
        return text.replace('"content":""', f'"content":"{filling[: max(0, self.body_bytes - len(text))]}"').encode()


CASES = (
    Case("2 KB, 1 connection", 1),
    Case("2 KB, 32", 32),
    Case("2 KB, 256", 256),
    Case("64 KB, 1 connection", 1, 65536),
    Case("64 KB, 32", 32, 65536),
    Case("64 KB, 256", 256, 65536),
    Case("2 KB, each new, 32", 32, each_new=True),
    Case("64 KB, each new, 32", 32, 65536, each_new=True),
    Case("256 KB, each new, 8", 8, 262_144, each_new=True),
    Case("1 MB, each new, 4", 4, 1_048_576, each_new=True),
    Case("agents, 35 to 180 KB, 8", 8, 109_000, sessions=True),
    Case("64 events at once, 32", 32, stream="burst"),
    Case("64 events 20 ms apart, 256", 256, stream="paced"),
)
PROBE = Case("probe", 1)
OPEN_STREAMS = 1000
GROWTH_REQUESTS = 100_000
GROWTH_LIMIT_S = 300.0


@dataclass(frozen=True)
class Sample:
    """One case, one proxy, one round. `cpu_ms` is per request, `cpu_us_event` per event of a stream."""

    rate: float
    p50_ms: float
    errors: int
    cpu_ms: float = 0.0
    cpu_us_event: float = 0.0


@dataclass(frozen=True)
class Target:
    """Where a load goes, and whose CPU time it costs (no proxy's when it goes straight to the engine)."""

    name: str
    port: int
    process: Process | None


def measure(target: Target, case: Case, *, seconds: float, core: int, seed: int = 0) -> Sample:
    """One load on one target."""
    seconds = max(seconds, 4.0) if case.stream == "paced" else seconds
    shape: dict[str, Any] = {"connections": case.connections, "seconds": seconds, "core": core}
    program = case.program()
    before_s = target.process.cpu_s() if target.process else 0.0
    if program:
        done = load.run_program(target.port, program, seed=seed, **shape)
    else:
        done = load.run(target.port, case.body(), streams=bool(case.stream), **shape)
    cpu_s = (target.process.cpu_s() if target.process else 0.0) - before_s
    return Sample(
        rate=done.requests / done.seconds,
        p50_ms=done.latency_p50_ms,
        errors=done.errors,
        cpu_ms=1e3 * cpu_s / max(done.requests, 1),
        cpu_us_event=1e6 * cpu_s / max(done.events, 1) if case.stream else 0.0,
    )


def memory(target: Target, *, core: int) -> dict[str, float]:
    """Resident MB at rest, with 1 000 open streams, and grown after 100 000 requests."""
    assert target.process is not None
    rest_mb = target.process.memory_mb()
    body = Case("", OPEN_STREAMS, stream="paced").body()
    streams_mb: list[float] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "body").write_bytes(body)
        command = [sys.executable, "-m", "benchmarks.load", str(target.port), str(folder / "body"), str(OPEN_STREAMS)]
        stack.enter_context(Process([*command, "6"], core=core, log=folder / "log"))
        for _ in range(25):
            time.sleep(0.2)
            streams_mb.append(target.process.memory_mb())
    warm = load.run(target.port, PROBE.body(), connections=32, seconds=5, core=core, streams=False)
    before_mb = target.process.memory_mb()
    requests, end = 0, time.monotonic() + GROWTH_LIMIT_S
    while requests < GROWTH_REQUESTS and time.monotonic() < end and warm.requests:
        requests += load.run(target.port, PROBE.body(), connections=32, seconds=5, core=core, streams=False).requests
    grown_mb = target.process.memory_mb() - before_mb
    return {
        "rest_mb": rest_mb,
        "open_streams_mb": max(streams_mb),
        "grown_mb": grown_mb,
        "grown_over_requests": float(requests),
    }


def run(targets: Sequence[Target], *, rounds: int, seconds: float, core: int) -> dict[str, dict[str, Sample]]:
    """Every case on every target in turn, `rounds` times; medians."""
    samples: dict[tuple[str, str], list[Sample]] = {}
    for number in range(rounds):
        for case in CASES:
            for target in targets:
                sample = measure(target, case, seconds=seconds, core=core, seed=len(samples) + number)
                samples.setdefault((target.name, case.name), []).append(sample)
                print(f"round {number + 1}: {target.name}, {case.name}: {sample.rate:.0f}/s", flush=True)
    return {target.name: {case.name: _median(samples[target.name, case.name]) for case in CASES} for target in targets}


def _median(samples: Sequence[Sample]) -> Sample:
    rows = [asdict(sample) for sample in samples]
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "errors"}
    return Sample(errors=sum(sample.errors for sample in samples), **middle)


def stub_engines(stack: contextlib.ExitStack, folder: Path, *, core: int) -> tuple[int, int]:
    """Ports of two engines that answer at once, running until the stack ends."""
    ports = free_port(), free_port()
    for port in ports:
        stub = [sys.executable, "-m", "benchmarks.stub", str(port)]
        engine = stack.enter_context(Process(stub, core=core, log=folder / f"stub-{port}.log"))
        if problem := engine.wait_until_ready(port, PROBE.body(), path=load.PATH):
            raise SystemExit(f"the stub engine: {problem}")
    return ports


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and write the report."""
    options = _options(arguments)
    cores = psutil.cpu_count() or 1
    load_core = 1 if cores > 1 else 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = stub_engines(stack, folder, core=load_core)
        engines = (f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
        targets = [Target("direct", ports[0], None)]
        skipped: dict[str, str] = {}
        for peer in peers.peers(options.kvproxy, policies=tuple(options.policies)):
            if options.only and not any(peer.name.startswith(name) for name in options.only):
                continue
            target, problem = _start(peer, engines, folder, stack)
            if target is None:
                skipped[peer.name] = problem
                print(f"{peer.name}: skipped, {problem}", flush=True)
            else:
                targets.append(target)
        results = run(targets, rounds=options.rounds, seconds=options.seconds, core=load_core)
        held: dict[str, dict[str, float]] = {}
        about = report.about(cores, " ".join(["python -m benchmarks.data_plane", *(arguments or sys.argv[1:])]))
        report.write(options.out, results, memory=held, skipped=skipped, about=about)
        for target in targets if options.memory else ():
            if target.process is not None and target.name.endswith("round_robin"):
                held[target.name] = memory(target, core=load_core)
                report.write(options.out, results, memory=held, skipped=skipped, about=about)
    print((options.out / "data-plane.md").read_text())


def _start(
    peer: peers.Peer, engines: tuple[str, str], folder: Path, stack: contextlib.ExitStack
) -> tuple[Target | None, str]:
    if peer.missing:
        return None, peer.missing
    own = folder / peer.name.replace(" ", "-")
    own.mkdir()
    port = free_port()
    process = stack.enter_context(
        Process(peer.command(port, engines, own), core=0, log=own / "log", environment=peer.environment)
    )
    problem = process.wait_until_ready(port, PROBE.body(), path=load.PATH)
    return (None, problem) if problem else (Target(peer.name, port, process), "")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.data_plane", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--only", nargs="*", default=[], help="proxies whose names start with one of these")
    parser.add_argument("--policies", nargs="*", default=["round_robin", "kv_aware"], help="of kvproxy")
    parser.add_argument("--kvproxy", default=peers.KVPROXY, help="its command line ({port}, {a}, {b}, {policy})")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="minutes more")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
