"""Files, classes and functions that maintainers' pages name are there under these names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PACKAGE = ROOT / "kvproxy"
PAGES = [
    ROOT / "docs" / "architecture.md",
    *(page for page in [ROOT / "docs" / "glossary.md"] if page.exists()),
    *sorted(PACKAGE.rglob("README.md")),
]
#: `proxy/forward/relay.py`, or `proxy/forward/relay.py:Relay.run` for something in it.
_NAMED = re.compile(r"`([\w./-]+\.py)(?::([\w.]+))?`")


@cache
def _names(path: Path) -> frozenset[str]:
    """Classes, functions, methods and attributes a file defines: `name` or `Class.name`."""
    found: set[str] = set()

    def look(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(owner + node.name)
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{node.name}.")
                elif node.name == "__init__":
                    found.update(owner + name for name in _set_on_self(node))
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(owner + target.id for target in targets if isinstance(target, ast.Name))

    look(ast.parse(path.read_text()).body, "")
    return frozenset(found)


def _set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def _find(name: str, page: Path) -> Path | None:
    """Relative to the page, the package or the repository; or the one of the room or its tests that ends so."""
    for folder in (page.parent, PACKAGE, ROOT):
        if (folder / name).exists():
            return folder / name
    rooms = [PACKAGE] if page.parent == ROOT / "docs" else [page.parent, ROOT / "tests" / page.parent.name]
    ending = [path for room in rooms for path in room.rglob("*.py") if str(path).endswith(f"/{name}")]
    return ending[0] if len(ending) == 1 else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_on_a_page_exist(page: Path) -> None:
    """A reader that follows a page with an editor finds each name where it says."""
    wrong = []
    for name, inside in _NAMED.findall(page.read_text()):
        path = _find(name, page)
        if path is None or (inside and inside not in _names(path)):
            wrong.append(f"{name}:{inside}" if inside else name)
    assert not wrong
