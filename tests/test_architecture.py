"""The rooms of kvproxy: what each may import, and how large a file, a function and a folder's number of ideas may be.

`python -m tests.test_architecture` writes the table of docs/architecture.md.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvproxy"
PAGE = ROOT / "docs" / "architecture.md"

#: From top to bottom, each room with what is in it. A room imports from the rows below it, annotations included; rooms
#: on one row do not know each other.
ROWS: tuple[dict[str, str], ...] = (
    {"__main__": "`python -m kvproxy`"},
    {"cli": "argument parsing"},
    {"commands": "what each command of `kvproxy` does"},
    {"workers": "processes behind one listening socket, under one supervisor with one admin listener"},
    {"app": "the one composition root: a configuration becomes a running proxy"},
    {"runtime": "what a configuration is built into, and what outlives a reload"},
    {
        "advise": "which settings would help the traffic that was recorded",
        "planner": "how much KV a model keeps, what fits where, and what that is worth on a trace",
    },
    {
        "admin": "the operator's listener: status, the live page, `/pick`, reload",
        "replay": "policies on recorded requests, in virtual time",
        "listener": "sockets towards clients",
        "doctor": "what is wrong with a setup, and the fix",
    },
    {"picker": "places requests that other programs carry; Envoy's endpoint picker"},
    {
        "receipts": "what was known and decided, request by request, on disk",
        "sync": "several processes decide as one: what they tell each other, and by which way",
    },
    {"filters": "one filter of the chain a file, the chain, and the ASGI middleware"},
    {"forward": "carries one request to an engine and its answer back"},
    {"kvcache": "what each endpoint holds of a prompt, how true that was, and what is done about it"},
    {"request": "the words that filters and forwarding share: exchange, observers, parsing, usage"},
    {
        "cluster": "endpoints with their health and load; the one decision and the router queue",
        "simulator": "simulated vLLM and SGLang engines and LMCache controllers, on code of their own",
    },
    {"routing": "pure: one policy a file, load, learned speeds, fair queueing"},
    {"prefix": "pure: block hashes, the approximate and the precise index, token memory"},
    {"clients": "one upstream API each: LMCache, vLLM, KV events"},
    {"upstream": "the pool of connections to engines, and HTTP on them"},
    {"resilience": "breaker, retry budget, background retries"},
    {"config": "typed settings, read from YAML in two dialects"},
    {"metrics": "the one catalogue, counters and histograms, the exposition"},
    {
        "types": "identifiers, clocks, the parsed request",
        "errors": "the one exception tree",
        "background_task": "a thing with one task",
        "bounded": "the one mapping with a bound",
        "json_scan": "members of a JSON object, found in steps",
        "log_lines": "what a line of the log looks like",
        "socket_writes": "several buffers written to a transport at once",
    },
)
ROW_OF = {room: index for index, rooms in enumerate(ROWS) for room in rooms}

#: The simulated engines stand in for other programs: they share words with the proxy, not code.
SIMULATOR_MAY_IMPORT = {"simulator", "prefix", "types", "errors"}

HEADINGS = ("What it does", "Contracts", "How to add one")
#: Rooms whose README.md is still to be written. Nothing is added here.
WITHOUT_README = frozenset[str]()


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _files() -> Mapping[str, Path]:
    """By module."""
    return {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path) -> Iterator[str]:
    """Modules of kvproxy a file names, wherever in it: for annotations alone, and within functions, too."""
    files = _files()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                if node.module == "kvproxy" and alias.name == "__version__":
                    continue  # the number alone: no code of the package
                if (name := f"{node.module}.{alias.name}") in files:
                    yield name
                elif node.module in files:
                    yield node.module


@cache
def _graph() -> Mapping[str, frozenset[str]]:
    return {module: frozenset(_imports(path)) - {module} for module, path in _files().items()}


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_room_has_its_row() -> None:
    """A new room is placed on purpose, and one that is gone leaves its row."""
    assert {_room(module) for module in _files()} - {""} == set(ROW_OF)


def test_imports_point_down() -> None:
    """No arrow runs up, and rooms on one row do not know each other."""
    wrong = [
        f"{module} imports {target}"
        for module, targets in _graph().items()
        for target in targets
        if _room(module) and _room(target) != _room(module) and (ROW_OF.get(_room(target), 0) <= ROW_OF[_room(module)])
    ]
    assert not wrong


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports for annotations alone count: a circle of words is a circle."""
    graph = {module: set(targets) for module, targets in _graph().items()}
    while leaves := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for module in leaves:
            del graph[module]
    while unused := graph.keys() - {target for targets in graph.values() for target in targets}:
        for module in unused:
            del graph[module]
    assert not graph, "circles among: " + ", ".join(sorted(graph))


def test_the_simulator_shares_no_code_with_the_proxy() -> None:
    """A stand-in that shared the proxy's code would share its mistakes."""
    wrong = [
        f"{module} imports {target}"
        for module, targets in _graph().items()
        if _room(module) == "simulator"
        for target in targets
        if _room(target) not in SIMULATOR_MAY_IMPORT
    ]
    assert not wrong


def test_only_the_command_line_and_replay_use_the_simulator() -> None:
    """The proxy itself never depends on simulated engines."""
    users = {
        _room(module) for module, targets in _graph().items() if any(_room(target) == "simulator" for target in targets)
    }
    assert users <= {"simulator", "cli", "commands", "replay", "advise", "planner"}


def test_functions_stay_short() -> None:
    """Nine of ten functions have at most 25 lines, and none has over 60."""
    lines = {
        f"{module}:{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for module, path in _files().items()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert statistics.quantiles(lines.values(), n=10)[-1] <= 25
    assert not [name for name, count in lines.items() if count > 60]


def test_every_room_says_what_it_is_for() -> None:
    """A README in each folder tells what the room does, what it promises, and how to add to it."""
    missing = {
        room.name
        for room in PACKAGE.iterdir()
        if (room / "__init__.py").exists()
        and not (
            (room / "README.md").exists()
            and all(f"# {heading}" in (room / "README.md").read_text() for heading in HEADINGS)
        )
    }
    assert missing <= WITHOUT_README


def table() -> str:
    """The rooms for docs/architecture.md, as in ROWS."""
    lines = ["| row | room | what is in it |", "|---|---|---|"]
    lines += [
        f"| {number if not place else ''} | `{room}` | {text} |"
        for number, rooms in enumerate(ROWS, 1)
        for place, (room, text) in enumerate(rooms.items())
    ]
    return "\n".join(lines) + "\n"


_BEGIN, _END = "<!-- rooms: python -m tests.test_architecture -->\n", "<!-- end of rooms -->\n"


def test_the_page_shows_these_rooms() -> None:
    """`python -m tests.test_architecture` was run after the last change of ROWS."""
    assert PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0] == table()


def write_table() -> None:
    """Replaces the table in docs/architecture.md."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(before + _BEGIN + table() + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    write_table()
