"""CPU per request of two checkouts in the same minutes: paired runs, their order turned from pair to pair.

`python -m benchmarks.before_after --before CHECKOUT [--after CHECKOUT] [--pairs N] [--seconds S] [--out FOLDER]`

Each checkout's `kvproxy serve` runs with its own `.venv`, or both with `--python`, on one core; stub engines and wrk
share another. Every prompt differs from every other in its last characters. The ratios are of pairs: how busy the
machine is falls out of them, where it changes more slowly than a pair lasts. About six minutes; needs wrk and two
cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Process
from benchmarks.report import machine
from tests.support.ports import free_port, free_ports

HERE = Path(__file__).resolve().parent.parent
PATH = "/v1/chat/completions"
POLICIES = ("kv_aware", "round_robin")


@dataclass(frozen=True)
class Case:
    """Load of wrk and its number of connections."""

    name: str
    size: int
    connections: int = 32
    streamed: bool = False
    policies: Sequence[str] = POLICIES
    sessions: bool = False
    """Agents' turns, each with all messages of the ones before; `size` is their average."""


CASES = (
    Case("2 KB", 2_048),
    Case("64 KB", 65_536),
    Case("stream of 64 events at once", 2_048, streamed=True),
    Case("2 KB, 1 connection", 2_048, connections=1, policies=("kv_aware",)),
    Case("256 KB", 262_144, connections=8),
    Case("1 MB", 1_048_576, connections=4),
    Case("agents, 35 to 180 KB", 109_000, connections=8, streamed=True, sessions=True),
)


@dataclass(frozen=True)
class Sample:
    """One run of wrk."""

    cpu_us: float
    p50_us: float
    errors: int


@dataclass(frozen=True)
class Server:
    """A running proxy of one checkout."""

    process: Process
    port: int


#: `request` gives each body its own end, so that no prompt comes twice and most of each came before.
_SCRIPT = """
local head, tail, count = [==[%s]==], [==[%s]==], 0
local headers = {["content-type"] = "application/json"}
local function nonce() return string.format("%%08d%%08d", math.random(0, 99999999), count) end
function request()
  count = count + 1
  return wrk.format("POST", "%s", headers, head .. nonce() .. tail)
end
%s
function init(args) math.randomseed(tonumber(args[1])) end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %%d %%d %%d\\n", summary.requests, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50)))
end
"""


#: Sessions take turns; each goes on until its last turn, and then another one begins.
_SESSIONS, _TURNS = 16, 24
_GROWING = """
local turn, rest, bodies = [==[%s]==], [==[%s]==], {}
function request()
  local session, number = count %% %d, math.floor(count / %d) %% %d
  count = count + 1
  local before = number > 0 and bodies[session] or head .. nonce() .. tail
  bodies[session] = before .. string.gsub(turn, "@NONCE@", nonce())
  return wrk.format("POST", "%s", headers, bodies[session] .. rest)
end
"""


def _agents(mark: str) -> tuple[dict[str, object], str]:
    """Return the first body of an agent's session, and the messages of a turn: code, with quotes and line breaks."""
    code = 'if path == "/tmp/x":\n    return {"name": value, "lines": [1, 2]}\n'
    tools = [
        {"type": "function", "function": {"name": f"tool{number}", "description": code * 11, "parameters": {}}}
        for number in range(16)
    ]
    call = {"name": "tool1", "arguments": json.dumps({"path": mark, "text": code * 8})}
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": mark, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": mark, "content": mark + code * 66},
    ]
    messages = [{"role": "system", "content": code * 250}, {"role": "user", "content": mark}]
    written = "".join("," + json.dumps(message, separators=(",", ":")) for message in turn)
    return {"model": "bench", "messages": messages, "tools": tools, "stream": True}, written


def script(case: Case) -> str:
    """wrk's program for a case."""
    mark = "@NONCE@"
    if case.sessions:
        body, turn = _agents(mark)
        head, _, rest = json.dumps(body, separators=(",", ":")).partition(mark)
        tail, bracket, rest = rest.partition("]")
        growing = _GROWING % (turn, bracket + rest, _SESSIONS, _SESSIONS, _TURNS, PATH)
        return _SCRIPT % (head, tail, PATH, growing)
    content = ("lorem ipsum dolor " * (case.size // 18))[: case.size] + mark
    body = {"model": "bench", "messages": [{"role": "user", "content": content}]}
    head, _, tail = json.dumps(body | {"stream": True} if case.streamed else body).partition(mark)
    return _SCRIPT % (head, tail, PATH, "")


class Bench:
    """Two checkouts under one load."""

    def __init__(self, trees: Mapping[str, Path], python: str, seconds: int, folder: Path) -> None:
        self._trees = trees
        self._python = python
        self._seconds = seconds
        self._folder = folder
        self._runs = 0

    def servers(self, stack: ExitStack, policy: str) -> dict[str, Server]:
        """Start a proxy of each checkout in front of the same stub engines."""
        engines = free_ports(2)
        stub = [sys.executable, "-m", "benchmarks.stub", *map(str, engines)]
        log = self._folder / f"engines-{policy}.log"
        stack.enter_context(Process(stub, core=_cores()[1], log=log, environment={"PYTHONPATH": str(HERE)}))
        ready = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "hi"}]}).encode()
        servers = {}
        for name, tree in self._trees.items():
            port = free_port()
            python = self._python or str(tree / ".venv" / "bin" / "python")
            command = [python, "-m", "kvproxy", "serve", "--port", str(port), "--policy", policy, "--no-admin"]
            command += [f"--endpoint=e{engine}=http://127.0.0.1:{engine}" for engine in engines]
            log = self._folder / f"{name}-{policy}.log"
            process = Process(command, core=_cores()[0], log=log, environment={"PYTHONPATH": str(tree)}, folder=tree)
            servers[name] = Server(stack.enter_context(process), port)
            problem = servers[name].process.wait_until_ready(port, ready, path=PATH)
            if problem:
                raise SystemExit(f"{name}: {problem}")
        return servers

    def pairs(self, case: Case, servers: Mapping[str, Server], count: int) -> Iterator[dict[str, Sample]]:
        """Yield samples by checkout, after one second of each that is thrown away."""
        program = self._folder / "load.lua"
        program.write_text(script(case))
        for server in servers.values():
            self._sample(case, server, program, 1)
        for number in range(count):
            order = list(servers) if number % 2 else list(servers)[::-1]
            yield {name: self._sample(case, servers[name], program, self._seconds) for name in order}

    def _sample(self, case: Case, server: Server, program: Path, seconds: int) -> Sample:
        self._runs += 1
        load = ["wrk", "-t1", f"-c{case.connections}", f"-d{seconds}s", "-s", str(program)]
        target = f"http://127.0.0.1:{server.port}{PATH}"
        command = ["taskset", "-c", str(_cores()[1]), *load, target, "--", str(self._runs)]
        before = server.process.cpu_s()
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = server.process.cpu_s() - before
        result = re.search(r"RESULT (\d+) (\d+) (\d+)", output)
        if result is None or not int(result[1]):
            raise SystemExit(f"wrk: {output}")
        requests, errors, p50 = map(int, result.groups())
        return Sample(used / requests * 1e6, float(p50), errors)


def _cores() -> tuple[int, int]:
    """Return the proxies' core, and that of engines and load."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


def row(policy: str, case: Case, pairs: Sequence[Mapping[str, Sample]]) -> str:
    """One line of the table."""
    before, after = ([pair[name].cpu_us for pair in pairs] for name in ("before", "after"))
    cells = [f"{min(before):.0f}", f"{min(after):.0f}", _ratio(after, before)]
    cells.append(_ratio([p["after"].p50_us for p in pairs], [p["before"].p50_us for p in pairs]))
    cells.append(str(sum(sample.errors for pair in pairs for sample in pair.values())))
    return f"| {policy} | {case.name} | {' | '.join(cells)} |"


def _ratio(after: Sequence[float], before: Sequence[float]) -> str:
    """Median and quartiles of the pairs' ratios."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(after, before, strict=True)], n=4)
    return f"**{middle:.2f}** ({low:.2f}-{high:.2f})"


TEXT = """# Before and after

{about}

{before} before, {after} after; {pairs} pairs of {seconds} s each. CPU time of the proxy's process per request, the
least seen in us; ratios are medians of pairs (with quartiles), below 1 where the later one is cheaper.

| policy | load | us before | us after | CPU ratio | p50 ratio | errors |
|---|---|---|---|---|---|---|
{rows}
"""


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout with a .venv")
    parser.add_argument("--after", type=Path, default=HERE)
    parser.add_argument("--python", default="", help="runs both, instead of each one's own")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--seconds", type=int, default=2, help="of each run (whole ones: wrk)")
    parser.add_argument("--case", action="append", default=[], help="(part of) a load's name; repeatable")
    parser.add_argument("--out", type=Path, help="folder for before-after.md")
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    facts = machine(len(os.sched_getaffinity(0)), "python -m benchmarks.before_after")
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(trees, options.python, options.seconds, folder)
        for policy in POLICIES:
            servers = bench.servers(stack, policy)
            for case in CASES:
                chosen = not options.case or any(part in case.name for part in options.case)
                if policy in case.policies and chosen:
                    rows.append(row(policy, case, list(bench.pairs(case, servers, options.pairs))))
                    print(rows[-1], flush=True)
    commits = {name: _commit(tree) for name, tree in trees.items()}
    text = TEXT.format(
        about="\n".join(f"- {name}: {value}" for name, value in facts.items()),
        pairs=options.pairs,
        seconds=options.seconds,
        rows="\n".join(rows),
        **commits,
    )
    if options.out is not None:
        (options.out / "before-after.md").write_text(text)


def _commit(tree: Path) -> str:
    done = subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or tree.name


if __name__ == "__main__":
    main()
