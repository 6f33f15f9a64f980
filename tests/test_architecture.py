"""The rooms of kvproxy import only from rooms below them."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "kvproxy"

#: From top to bottom. A room imports from the rows below it; rooms on one row do not know each other.
ROWS: tuple[frozenset[str], ...] = (
    frozenset({"__main__"}),
    frozenset({"cli"}),
    frozenset({"commands"}),
    frozenset({"app"}),
    frozenset({"runtime"}),
    frozenset({"admin", "replay", "listener", "doctor"}),
    frozenset({"receipts"}),
    frozenset({"filters"}),
    frozenset({"forward"}),
    frozenset({"kvcache"}),
    frozenset({"request"}),
    frozenset({"simulator", "cluster"}),
    frozenset({"routing"}),
    frozenset({"prefix"}),
    frozenset({"clients"}),
    frozenset({"upstream"}),
    frozenset({"resilience"}),
    frozenset({"config"}),
    frozenset({"metrics"}),
    frozenset({"types", "errors", "bounded", "background_task", "json_scan", "log_lines"}),
)
ROW_OF = {room: index for index, rooms in enumerate(ROWS) for room in rooms}

#: The simulated engines stand in for other programs: they share words with the proxy, not code.
SIMULATOR_MAY_IMPORT = {"simulator", "prefix", "types", "errors"}


def _imports(path: Path) -> Iterator[str]:
    """Rooms of kvproxy a file imports when it runs (imports for annotations alone do not count)."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [f"{module}.{a.name}" for a in node.names] if module == "kvproxy" else [module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "kvproxy" and len(parts) > 1 and not parts[1].startswith("__version"):
                yield parts[1]


def _files() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "__init__.py"
    ]


def test_every_room_has_its_row() -> None:
    """A new room is placed on purpose."""
    assert {room for room, _ in _files()} <= set(ROW_OF)


def test_imports_point_down() -> None:
    """No arrow runs up, and rooms on one row do not know each other."""
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {target}"
        for room, path in _files()
        for target in _imports(path)
        if target != room and ROW_OF[target] <= ROW_OF[room]
    ]
    assert not wrong


def test_the_simulator_shares_no_code_with_the_proxy() -> None:
    """A stand-in that shared the proxy's code would share its mistakes."""
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {target}"
        for room, path in _files()
        if room == "simulator"
        for target in _imports(path)
        if target not in SIMULATOR_MAY_IMPORT
    ]
    assert not wrong


def test_only_the_command_line_and_replay_use_the_simulator() -> None:
    """The proxy itself never depends on simulated engines."""
    users = {room for room, path in _files() if "simulator" in set(_imports(path))}
    assert users <= {"simulator", "cli", "commands", "replay"}


def test_files_stay_readable() -> None:
    """A file is one idea: nine of ten have at most 250 lines, and none has over 450."""
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for _, path in _files()}
    assert statistics.quantiles(lines.values(), n=10)[-1] <= 250
    assert not [name for name, count in lines.items() if count > 450]


def test_functions_stay_short() -> None:
    """Nine of ten functions have at most 25 lines, and none has over 60."""
    lines = {
        f"{path.relative_to(PACKAGE)}:{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for _, path in _files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert statistics.quantiles(lines.values(), n=10)[-1] <= 25
    assert not [name for name, count in lines.items() if count > 60]
