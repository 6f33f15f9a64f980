"""The rooms of kvproxy: what each may import, and how large a function and a folder's number of ideas may be.

`python -m tests.test_architecture` writes the table of docs/architecture.md and takes what is gone off arrows_up.txt.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from kvproxy.features import SHIPPED

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvproxy"
PAGE = ROOT / "docs" / "architecture.md"

#: From top to bottom, each room with what is in it. A room imports from those below it, annotations included; the root
#: and the lab are both on top. One feature does not import another.
ROOMS: Mapping[str, str] = {
    "lab": "no request ever enters it: simulator, replay, planner, adviser, demo",
    "embed": "in other people's processes: transports for httpx",
    "features": "what can be left out, a module or a folder each",
    "operate": "run it: root of the settings, commands, admin listener, doctor, receipts, reload, catalogue of metrics",
    "proxy": "bytes in, bytes out: listener, request, filters, forward",
    "cache": "what is where: identity of prompts, indexes, overlap, feedback, uses of prefixes, clients of engines",
    "cluster": "where to: endpoints, health, discovery, policies and the cost, the router queue",
    "base": "what all stand on: errors, types, bounds, settings machinery, kinds of metric, connections, resilience",
}
HEIGHT = {room: height for height, room in enumerate(reversed(ROOMS))}
#: `app.py` is built by commands, and builds what operates.
HEIGHT |= {"": HEIGHT["lab"], "app": HEIGHT["operate"]}

#: Imports that still run up, or from one feature to another, or from the lab to the root. Nothing is added here.
ARROWS = Path(__file__).with_name("arrows_up.txt")

#: The simulated engines stand in for other programs: they share words with the proxy, not code.
SIMULATOR_MAY_IMPORT = ("kvproxy.lab.simulator", "kvproxy.cache.prefix", "kvproxy.base.types", "kvproxy.base.errors")

#: Names of features that are words of their own in every room.
ORDINARY = frozenset({"resume", "exchange", "ledger", "normalize", "priority", "published", "shield", "workers"})
#: `file name` where a room below names a feature. Nothing is added here.
NAMED = Path(__file__).with_name("features_named.txt")

HEADINGS = ("What it does", "Contracts", "How to add one")


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _files() -> Mapping[str, Path]:
    """By module."""
    return {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path) -> Iterator[str]:
    """Modules of kvproxy a file names, wherever in it: for annotations alone, and within functions, too."""
    files = _files()
    for node in _nodes(path):
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
    """`cache`, `features.leases`, `app`; "" of what else lies at the root."""
    parts = module.split(".")[1:3]
    if parts[:1] == ["features"]:
        return ".".join(parts)
    return parts[0] if parts and (parts[0] in ROOMS or parts[0] == "app") else ""


def _runs_up(module: str, target: str) -> bool:
    here, there = _room(module), _room(target)
    heights = [HEIGHT[room.partition(".")[0]] for room in (here, there)]
    if heights[0] != heights[1] or here == there:
        return heights[0] < heights[1]
    return here != "" and {here, there} != {"app", "operate"}  # another feature, or from the lab to the root


def arrows_up() -> list[str]:
    """Each as `importer -> imported`."""
    pairs = ((module, target) for module, targets in _graph().items() for target in targets)
    return sorted(f"{module} -> {target}" for module, target in pairs if _runs_up(module, target))


def features_named() -> list[str]:
    """Files of the rooms below the features with the feature that their code or text names."""
    names = set(SHIPPED) - ORDINARY
    found = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room in ROOMS and HEIGHT[room] < HEIGHT["features"]:
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", path.read_text())}
            found |= {f"{path.relative_to(PACKAGE)} {name}" for name in words & names}
    return sorted(found)


def test_rooms_name_no_feature() -> None:
    """No word of a feature beyond those known, and words that are gone are taken off the list."""
    assert features_named() == NAMED.read_text().splitlines()


def test_every_file_is_in_a_room() -> None:
    """A new room is placed on purpose; the root has the command line, the composition root, the
    package's face, and what hosts import by name."""
    assert {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()} == set(ROOMS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {
        "__init__",
        "__main__",
        "app",
        "cli",
        "litellm",
        "ray",
        "testing",
    }


def test_imports_point_down() -> None:
    """No arrow runs up that is not known, and those that are gone are taken off the list."""
    assert arrows_up() == ARROWS.read_text().splitlines()


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports for annotations alone count, as those within functions do: a circle of words is a circle."""
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
        if module.startswith("kvproxy.lab.simulator")
        for target in targets
        if not target.startswith(SIMULATOR_MAY_IMPORT)
    ]
    assert not wrong


def test_only_the_lab_uses_the_simulator() -> None:
    """The proxy itself never depends on simulated engines; `kvproxy.testing` hands them to tests of other projects."""
    users = {
        _room(module) or module
        for module, targets in _graph().items()
        if any(target.startswith("kvproxy.lab.simulator") for target in targets)
    }
    assert users <= {"lab", "kvproxy.testing"}


def test_functions_stay_short() -> None:
    """Nine of ten functions have at most 25 lines, and none has over 60 statements."""
    found = {
        f"{module}:{node.name}": node
        for module, path in _files().items()
        for node in _nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    lines = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in found.values()]
    assert statistics.quantiles(lines, n=10)[-1] <= 25
    assert not [name for name, node in found.items() if sum(isinstance(each, ast.stmt) for each in ast.walk(node)) > 60]


def test_functions_have_at_most_60_lines() -> None:
    """However many options a command has."""
    long = {
        f"{module}:{node.name}"
        for module, path in _files().items()
        for node in _nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > 60
    }
    assert not long


def test_classes_have_few_methods() -> None:
    """A public class has at most 15 public methods."""
    large = {
        node.name
        for path in _files().values()
        for node in _nodes(path)
        if isinstance(node, ast.ClassDef) and sum(_is_public_method(one) for one in node.body) > 15
    }
    assert not large


def _is_public_method(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")


def _is_packed(node: ast.AST) -> bool:
    """Whether two assignments that need not be one stand in one statement."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    targets = node.targets[0]
    if not isinstance(targets, ast.Tuple) or not all(isinstance(each, ast.Name) for each in targets.elts):
        return False
    assigned, used = (
        {each.id for each in ast.walk(part) if isinstance(each, ast.Name)} for part in (targets, node.value)
    )
    return not assigned & used


def test_a_line_has_one_statement() -> None:
    """Two values are assigned together only if one needs the other's old one; layout by hand is for tables."""
    packed = [
        f"{module}:{node.lineno}"
        for module, path in _files().items()
        for node in _nodes(path)
        if isinstance(node, ast.Assign) and _is_packed(node)
    ]
    assert not packed
    by_hand = {module for module, path in _files().items() if "fmt: skip" in path.read_text()}
    assert by_hand <= {"kvproxy.lab.planner.models", "kvproxy.lab.planner.options", "kvproxy.lab.replay.options"}


def test_every_room_says_what_it_is_for() -> None:
    """A README in each tells what the room does, what it promises, and how to add to it."""
    missing = {
        room
        for room in ROOMS
        if not (page := PACKAGE / room / "README.md").exists()
        or not all(f"# {heading}" in page.read_text() for heading in HEADINGS)
    }
    assert not missing


def table() -> str:
    """Return the rooms for docs/architecture.md, as in ROOMS."""
    rows = [
        f"| `{room}/` | {', '.join(f'`{name}`' for name in _parts(room))} | {text} |" for room, text in ROOMS.items()
    ]
    return "\n".join(["| room | folders | what is in it |", "|---|---|---|", *rows]) + "\n"


def _parts(room: str) -> list[str]:
    """Its folders, but for the features: a new one changes no page of another."""
    return [] if room == "features" else sorted(path.parent.name for path in (PACKAGE / room).glob("*/__init__.py"))


_BEGIN, _END = "<!-- rooms: python -m tests.test_architecture -->\n", "<!-- end of rooms -->\n"


def test_the_page_shows_these_rooms() -> None:
    """`python -m tests.test_architecture` was run after the last change of ROOMS."""
    assert PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0] == table()


def write_table() -> None:
    """Replace the table in docs/architecture.md."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(before + _BEGIN + table() + _END + rest.partition(_END)[2])


def shorten_list() -> None:
    """Take arrows and names that are gone off the lists; the first time they have all present ones."""
    known = set(ARROWS.read_text().splitlines()) if ARROWS.exists() else None
    left = [arrow for arrow in arrows_up() if known is None or arrow in known]
    ARROWS.write_text("".join(f"{arrow}\n" for arrow in left))
    named = set(NAMED.read_text().splitlines()) if NAMED.exists() else None
    NAMED.write_text("".join(f"{one}\n" for one in features_named() if named is None or one in named))


if __name__ == "__main__":
    write_table()
    shorten_list()
