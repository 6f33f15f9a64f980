"""Copies the tree, deletes features and their lines, and runs what is left.

Each converted feature alone: every module imports, `kvproxy check` on config.yaml, a proxy that serves and pins. All of
them at once and the one of the day: the core's tests as well. `python -m tests.removal NAME` does one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from os import environ
from pathlib import Path

from kvproxy.features import SHIPPED

ROOT = Path(__file__).parents[2]

#: Features that other code still imports, or that are not on the list yet. Nothing is added here.
NOT_YET = frozenset({"priority", "transfers"})

#: Folders of tests that name no feature.
CORE_TESTS = (
    "tests/base/upstream",
    "tests/proxy/listener",
    "tests/proxy/request",
    "tests/base/resilience",
    "tests/cluster/routing",
    "tests/proxy/filters",
)

_IMPORTS = """
import importlib, pkgutil, kvproxy
for module in pkgutil.walk_packages(kvproxy.__path__, "kvproxy."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def removable() -> Sequence[str]:
    """Features whose folder may go."""
    return [name for name in SHIPPED if name not in NOT_YET]


def check_without(names: Sequence[str], *, tests: bool) -> None:
    """Raises CalledProcessError where something does not work without them."""
    sys.stderr.write(f"without {', '.join(names)}\n")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        _copy(tree)
        _remove(tree, names)
        _run(tree, "-c", _IMPORTS)
        _run(tree, "-m", "kvproxy", "check", "config.yaml")
        _run(tree, "-m", "tests.removal.serve")
        if tests:
            _run(tree, "-m", "pytest", "-q", "-x", *CORE_TESTS)


def _copy(tree: Path) -> None:
    for name in ("kvproxy", "tests", "docs", "config.yaml", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)


def _remove(tree: Path, names: Sequence[str]) -> None:
    listed = tree / "kvproxy" / "features" / "__init__.py"
    for name in names:
        shutil.rmtree(tree / "kvproxy" / "features" / name)
        shutil.rmtree(tree / "tests" / "features" / name, ignore_errors=True)
        text, lines = re.subn(rf'^    "{name}",\n', "", listed.read_text(), flags=re.MULTILINE)
        assert lines == 1, f"{name}: not a line of the list"
        listed.write_text(text)


def _run(tree: Path, *arguments: str) -> None:
    """The tree comes before the checkout on the path."""
    subprocess.run(
        [sys.executable, *arguments], cwd=tree, env={**environ, "PYTHONPATH": str(tree)}, check=True, timeout=600
    )


def main(asked: Sequence[str]) -> None:
    """Those asked for, else all: each alone, then together."""
    names = asked or removable()
    for name in names:
        of_the_day = not asked and name == names[date.today().toordinal() % len(names)]  # noqa: DTZ011
        check_without([name], tests=of_the_day)
    if not asked:
        check_without(names, tests=True)


if __name__ == "__main__":
    main(sys.argv[1:])
