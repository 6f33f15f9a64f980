"""Cost of the Python under the proxy: kv_aware on several of them beside vllm-router's cache_aware, interleaved.

`python -m benchmarks.interpreters NAME=PYTHON ... [--rounds 7] [--seconds 2] [--out FOLDER]`. Each PYTHON has kvproxy's
requirements installed and runs this checkout, on core 0; load generator and engines are on core 1. Writes
interpreters.md."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks import load, peers, report
from benchmarks.data_plane import CASES, PROBE, Case, Target, measure, stub_engines
from benchmarks.processes import Process
from tests.support.ports import free_port

OURS = "kvproxy kv_aware"
THEIRS = "vllm-router cache_aware"
SHOWN = ("2 KB, 32", "64 KB, 32")
NOTES = Path(__file__).parent / "interpreters_notes.md"

#: CPU us per request, one a round, by proxy.
Costs = Mapping[str, Sequence[float]]


def candidates(pythons: Mapping[str, str]) -> list[peers.Peer]:
    """kvproxy on each Python, and the router beside it."""
    found = [_named(peers.KVPROXY.replace(sys.executable, python, 1), OURS, name) for name, python in pythons.items()]
    return [*found, _named(peers.KVPROXY, THEIRS, THEIRS)]


def _named(kvproxy: str, peer: str, name: str) -> peers.Peer:
    return next(replace(one, name=name) for one in peers.peers(kvproxy, policies=("kv_aware",)) if one.name == peer)


def run(targets: Sequence[Target], case: Case, *, rounds: int, seconds: float, core: int) -> dict[str, list[float]]:
    """Every target in turn, `rounds` times; every second round backwards."""
    costs: dict[str, list[float]] = {target.name: [] for target in targets}
    for number in range(rounds):
        for target in targets if number % 2 == 0 else reversed(targets):
            sample = measure(target, case, seconds=seconds, core=core)
            if sample.errors:
                raise SystemExit(f"{target.name}: {sample.errors} errors")
            costs[target.name].append(1e3 * sample.cpu_ms)
            print(f"{case.name}, round {number + 1}: {target.name} {1e3 * sample.cpu_ms:.0f} us", flush=True)
    return costs


def ratio(costs: Costs, name: str, to: str) -> float:
    """Return the median over the rounds, whose two sides had the same neighbours on the machine."""
    return statistics.median(ours / theirs for ours, theirs in zip(costs[name], costs[to], strict=True))


def lines(results: Mapping[str, Costs], about: Mapping[str, str], first: str) -> list[str]:
    """Return the lines of the report."""
    text = ["# The Python under the proxy", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    text += [
        f"CPU per request of `kv_aware`; medians over the rounds, ratios within each round; the first: {first}.",
        "",
    ]
    for case, costs in results.items():
        theirs = THEIRS in costs
        text += [f"## {case}", "", f"| | us/request | to the first | to {THEIRS} |", "|---|---|---|---|"]
        for name, own in costs.items():
            router = f"{ratio(costs, name, THEIRS):.2f}x" if theirs else "-"
            text.append(f"| {name} | {statistics.median(own):.0f} | {ratio(costs, name, first):.2f}x | {router} |")
        text.append("")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and write the report."""
    options = _options(arguments)
    pythons = dict(pair.split("=", 1) for pair in options.pythons) or {"kvproxy": sys.executable}
    cores = psutil.cpu_count() or 1
    core = 1 if cores > 1 else 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = stub_engines(stack, folder, core=core)
        engines = (f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
        targets: list[Target] = []
        for number, peer in enumerate(candidates(pythons)):
            if peer.missing:
                print(f"{peer.name}: skipped, {peer.missing}", flush=True)
                continue
            port = free_port()
            command = peer.command(port, engines, folder)
            process = stack.enter_context(Process(command, core=0, log=folder / f"{number}.log"))
            if problem := process.wait_until_ready(port, PROBE.body(), path=load.PATH):
                raise SystemExit(problem)
            targets.append(Target(peer.name, port, process))
        about = report.machine(
            cores, shlex.join(["python", "-m", "benchmarks.interpreters", *(arguments or sys.argv[1:])])
        )
        about |= {name: _version(python) for name, python in pythons.items()}
        results = {
            case.name: run(targets, case, rounds=options.rounds, seconds=options.seconds, core=core)
            for case in CASES
            if case.name in SHOWN
        }
    text = "\n".join(lines(results, about, next(iter(pythons))))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "interpreters.md").write_text(text + (NOTES.read_text() if NOTES.exists() else ""))
    print(text)


def _version(python: str) -> str:
    code = "import platform as p; print(p.python_version(), p.python_compiler())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.interpreters", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="NAME=PYTHON", help="without any: the one this runs on")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
