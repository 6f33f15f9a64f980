"""Files, classes, functions and calls that one warm request enters on the event loop's thread.

`python -m benchmarks.turn [--tree CHECKOUT]... [--case NAME]... [--diff] [--trace] [--out FOLDER]`

Each checkout's `kvproxy serve` runs with its own `.venv` in front of simulated engines in another process, and its main
thread is watched with `sys.setprofile` for the length of single requests from a third one. Counts do not depend on how
busy the machine is. Without `--tree` it is this checkout. With two, `--diff` lists the functions whose calls differ;
`--trace` prints the calls of a turn in their order. `--out` writes turn.md."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import Process
from tests.support.ports import free_ports

HERE = Path(__file__).resolve().parent.parent
WATCHER = Path(__file__).with_name("turn_watcher.py")
MODEL = "sim"
PATH = "/v1/chat/completions"
#: Requests before the counted ones; every prompt has the same first messages.
WARM = 8
#: Counted requests, and the most that are tried; the report shows the count seen most often.
COUNTED = 8
TRIED = 30

STREAM_TOKENS = 6
#: Scrapes of the engines go through these as requests do.
SOCKETS = ("kvproxy.base.upstream", "kvproxy.proxy.listener", "kvproxy.upstream", "kvproxy.listener")
#: That reach the client (head, tokens one by one, usage, end). A busy machine joins some, and such turns
#: are not counted.
STREAM_PIECES = 6

STRATEGIES = {"enable_pinning": True, "enable_compression": True, "enable_eviction": True}


@dataclass(frozen=True)
class Case:
    """A configuration of the proxy and the kind of request it gets."""

    name: str
    policy: str
    lmcache: bool = False
    everything: bool = False
    streamed: bool = True
    kv_events: bool = True
    """Whether the engines publish them."""

    def config(self, ports: Sequence[int], engines: Sequence[int], controller: int, folder: Path) -> dict[str, Any]:
        """As `kvproxy serve -c` reads it."""
        config: dict[str, Any] = {
            "listen": f"127.0.0.1:{ports[0]}",
            "admin": f"127.0.0.1:{ports[1]}",
            "policy": self.policy,
            "endpoints": {f"e{port}": f"http://127.0.0.1:{port}" for port in engines},
            "health": {"active": False},
        }
        if self.lmcache:
            kvcache: dict[str, Any] = {"lmcache_endpoint": f"http://127.0.0.1:{controller}"}
            if self.everything:
                kvcache["cache_strategy"] = STRATEGIES
            config["filters"] = ["request_id", "access_log", "inference_request", {"kvcache": kvcache}, "router"]
        if self.everything:
            config["queue"] = {}
            config["receipts"] = {"path": str(folder / "receipts.jsonl")}
        return config


CASES = (
    Case("stream, round_robin", "round_robin", kv_events=False),
    Case("stream, kv_aware", "kv_aware", kv_events=False),
    Case("stream, kv_aware, KV events", "kv_aware"),
    Case("stream, kv_aware + LMCache, tokenize", "kv_aware", lmcache=True),
    Case("stream, + queue, receipts, strategies", "kv_aware", lmcache=True, everything=True),
    Case("2 KB unary, round_robin", "round_robin", streamed=False, kv_events=False),
    Case("2 KB unary, kv_aware", "kv_aware", streamed=False, kv_events=False),
)


@dataclass(frozen=True)
class Call:
    """One Python call, or one time a coroutine goes on; `depth` 0 is what the event loop itself calls."""

    depth: int
    module: str
    owner: str
    function: str
    resumed: bool
    c_calls: int

    @property
    def name(self) -> str:
        return f"{self.module}:{self.function}"

    @property
    def is_own(self) -> bool:
        """Of the package itself."""
        return self.module.partition(".")[0] == "kvproxy"


@dataclass(frozen=True)
class Turn:
    """One counted request."""

    calls: Sequence[Call]
    lines: Mapping[str, int]

    def counts(self) -> Counter[str]:
        """Count the calls by function."""
        return Counter(call.name for call in self.calls)

    def row(self) -> list[int]:
        """Under COLUMNS."""
        own = [call for call in self.calls if call.is_own]
        modules = {call.module for call in own}
        return [
            len(modules),
            len({(call.module, call.owner) for call in own if call.owner}),
            len({call.name for call in own}),
            len(own),
            sum(call.resumed for call in own),
            sum(call.c_calls for call in own),
            len(self.calls),
            sum(call.c_calls for call in self.calls),
            sum(self.lines[module] for module in modules),
        ]


COLUMNS = (
    "files",
    "classes",
    "functions",
    "calls",
    "of them resumptions",
    "C calls",
    "calls with libraries",
    "C calls with libraries",
    "lines in the files",
)


def body(number: int, *, streamed: bool) -> bytes:
    """Return a chat of about 2 KB whose last message is new, as long as any other's."""
    words = "the cache holds what the engine has computed before and the proxy knows it "
    messages = [
        {"role": "system", "content": words * 12},
        {"role": "user", "content": words * 6},
        {"role": "assistant", "content": words * 6},
        {"role": "user", "content": f"question {number:08d}: what follows from it?"},
    ]
    raw: dict[str, Any] = {"model": MODEL, "max_tokens": STREAM_TOKENS, "messages": messages}
    if streamed:
        raw |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(raw).encode()


@contextmanager
def engines(folder: Path, *, kv_events: bool) -> Iterator[tuple[list[int], int]]:
    """Ports of two simulated engines and of LMCache's controller, in one process of this checkout."""
    *ports, controller = free_ports(3)
    command = [
        sys.executable,
        "-m",
        "benchmarks.soak_engines",
        "--time-scale",
        "2",
        "--controller",
        str(controller),
        *map(str, ports),
    ]
    if not kv_events:
        command.append("--no-kv-events")
    with Process(command, core=_core(), log=folder / "engines.log", environment={"PYTHONPATH": str(HERE)}) as process:
        for port in ports:
            problem = process.wait_until_ready(port, body(0, streamed=False), path=PATH)
            if problem:
                raise SystemExit(f"engines: {problem}")
        yield list(ports), controller


def counted(tree: Path, case: Case) -> Turn:
    """Return the turn seen most often."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports, controller = stack.enter_context(engines(folder, kv_events=case.kv_events))
        places = free_ports(2)
        config = folder / "config.yaml"
        config.write_text(json.dumps(case.config(places, ports, controller, folder)))
        counts = folder / "counts.json"
        python = tree / ".venv" / "bin" / "python"
        command = [str(python), str(WATCHER), str(counts), "serve", "-c", str(config)]
        proxy = stack.enter_context(
            Process(command, core=_core(), log=folder / "proxy.log", environment={"PYTHONPATH": str(tree)})
        )
        problem = proxy.wait_until_ready(places[0], body(0, streamed=False), path=PATH)
        if problem:
            raise SystemExit(f"{tree}: {problem}")
        turns = _turns(proxy, places[0], counts, case)
    sizes = Counter(turn.row()[3] for turn in turns)
    if not sizes:
        raise SystemExit(f"{tree}, {case.name}: no stream came in {STREAM_PIECES} pieces")
    usual = max(sizes, key=lambda size: (sizes[size], -size))
    return next(turn for turn in turns if turn.row()[3] == usual)


def _turns(proxy: Process, port: int, counts: Path, case: Case) -> list[Turn]:
    """Without what the event loop calls while nothing is asked: timers, samplers."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for number in range(WARM):
        _send(client, body(number, streamed=case.streamed))
        time.sleep(0.05)
    time.sleep(1)
    with _watched(proxy, counts) as idle:
        time.sleep(6)
    timers = {call.name for call in idle[0].calls if call.depth == 0 and not call.module.startswith(SOCKETS)}
    turns = []
    for number in range(WARM, WARM + TRIED):
        with _watched(proxy, counts) as seen:
            pieces = _send(client, body(number, streamed=case.streamed))
            time.sleep(0.15)
        if not case.streamed or pieces == STREAM_PIECES:
            turns.append(Turn(list(_without(timers, seen[0].calls)), seen[0].lines))
        if len(turns) == COUNTED:
            break
    client.close()
    return turns


@contextmanager
def _watched(proxy: Process, counts: Path) -> Iterator[list[Turn]]:
    """Record the calls within the block, filled in at its end."""
    counts.unlink(missing_ok=True)
    seen: list[Turn] = []
    proxy.send_signal(signal.SIGUSR1)
    time.sleep(0.05)
    yield seen
    proxy.send_signal(signal.SIGUSR2)
    until = time.monotonic() + 30
    while not counts.exists() and time.monotonic() < until:
        time.sleep(0.01)
    raw = json.loads(counts.read_text())
    seen.append(Turn([Call(*call) for call in raw["calls"]], raw["lines"]))


def _without(timers: Set[str], calls: Iterable[Call]) -> Iterator[Call]:
    left_out = False
    for call in calls:
        if call.depth == 0:
            left_out = call.name in timers or call.module == "__main__"
        if not left_out:
            yield call


def _send(client: http.client.HTTPConnection, request: bytes) -> int:
    """Pieces the answer came in."""
    client.request("POST", PATH, request, {"content-type": "application/json"})
    response = client.getresponse()
    if response.status != 200:
        raise SystemExit(f"answered {response.status}")
    pieces = 0
    while response.read1():
        pieces += 1
    response.read()
    return pieces


def _core() -> int:
    return max(os.sched_getaffinity(0))


def differences(before: Turn, after: Turn) -> list[tuple[int, int, str]]:
    """Return calls before and after by function, for those that differ; one that moved or changed its class is one
    line."""
    old, new = before.counts(), after.counts()
    for part in (":", "."):
        old = _renamed(old, new, part)
    rows = [(old[name], new[name], name) for name in {*old, *new}]
    return sorted((row for row in rows if row[0] != row[1]), key=lambda row: (row[1] - row[0], row[2]))


def _renamed(old: Counter[str], new: Counter[str], part: str) -> Counter[str]:
    """Return the old counts under the new names, where the part after the last `part` names one function on either
    side."""
    gone, come = Counter[str](), Counter[str]()
    for name in (name for name in old if name not in new):
        gone[name.rpartition(part)[2]] += 1
    for name in (name for name in new if name not in old):
        come[name.rpartition(part)[2]] += 1
    there = {name.rpartition(part)[2]: name for name in new if name not in old}
    renamed = Counter[str]()
    for name, count in old.items():
        short = name.rpartition(part)[2]
        sure = name not in new and gone[short] == come[short] == 1
        renamed[there[short] if sure else name] += count
    return renamed


def table(trees: Sequence[Path], results: Mapping[tuple[Path, str], Turn], cases: Sequence[Case]) -> list[str]:
    """Markdown: a row for each case and checkout."""
    lines = [f"| case | commit | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for case in cases:
        for tree in trees:
            cells = " | ".join(f"{value:,}" for value in results[tree, case.name].row())
            lines.append(f"| {case.name} | {_commit(tree)} | {cells} |")
    return lines


def _commit(tree: Path) -> str:
    done = subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or tree.name


TEXT = """# One warm turn

`python -m benchmarks.turn{trees} --out benchmarks/reports`. Counted with `sys.setprofile` in the thread of the event
loop, on Python {python}, from before a request of about 2 KB until after it: simulated engines and the client are other
processes, {tokens} tokens come one by one, and of {counted} requests the count seen most often stands. Files, classes,
functions, calls and C calls are those of the package; a coroutine that goes on after an await counts as a call.

{table}
"""


def main() -> None:
    """Count, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="a checkout with a .venv; repeatable")
    parser.add_argument("--case", action="append", default=[], help="(part of) a case's name; repeatable")
    parser.add_argument("--diff", action="store_true", help="functions whose calls differ between two checkouts")
    parser.add_argument("--trace", action="store_true", help="the calls in their order, indented")
    parser.add_argument("--all", action="store_true", help="with --diff and --trace: libraries too")
    parser.add_argument("--out", type=Path, help="folder for turn.md")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree] or [HERE]
    cases = [case for case in CASES if not options.case or any(part in case.name for part in options.case)]
    results: dict[tuple[Path, str], Turn] = {}
    for case in cases:
        for tree in trees:
            results[tree, case.name] = counted(tree, case)
    print("\n".join(table(trees, results, cases)))
    for case in cases:
        turns = [results[tree, case.name] for tree in trees]
        if options.diff and len(turns) == 2:
            print(f"\n== {case.name}: calls before, after, function")
            for old, new, name in differences(*turns):
                if options.all or name.startswith("kvproxy."):
                    print(f"{old:5} {new:5} {new - old:+5}  {name}")
        if options.trace:
            print(f"\n== {case.name}: {trees[-1]}")
            for call in turns[-1].calls:
                if options.all or call.is_own:
                    print(f"{'  ' * call.depth}{call.name}{' (goes on)' * call.resumed}")
    if options.out is not None:
        named = "".join(f" --tree {_commit(tree)}" for tree in trees) if options.tree else ""
        text = TEXT.format(
            trees=named, python=".".join(map(str, sys.version_info[:3])), tokens=STREAM_TOKENS, counted=COUNTED,
            table="\n".join(table(trees, results, cases)),
        )  # fmt: skip
        (options.out / "turn.md").write_text(text)


if __name__ == "__main__":
    main()
