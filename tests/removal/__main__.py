"""Delete features from a copy of the tree, one by one and all at once, and run the rest.

Each removable feature alone: every module imports, `kvproxy check` on config.yaml, a proxy that serves and pins. All of
them at once, and the one of the day: the core's tests as well. `python -m tests.removal NAME` tries one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from os import environ
from pathlib import Path

from kvproxy.features import SHIPPED

ROOT = Path(__file__).parents[2]

#: Folders of tests that name no feature.
CORE_TESTS = ("tests/base", "tests/cluster", "tests/cache", "tests/proxy")

SERVE = ROOT / "tests" / "removal" / "serve.py"
_NEEDED_BY_TESTS = ("tests", "docs", "samples", "benchmarks", "pyproject.toml")
_TOGETHER = 2


def check_without(names: Sequence[str], *, tests: bool) -> str:
    """Return what a tree without these features printed where it failed, "" if everything works."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("kvproxy", "config.yaml", *(_NEEDED_BY_TESTS if tests else ())):
            _link(ROOT / name, tree / name)
        _remove(tree, names)
        printed = _run(tree, str(SERVE))
        if tests and not printed:
            printed = _run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE_TESTS)
    return printed and f"without {', '.join(names)}:\n{printed}"


def _link(source: Path, target: Path) -> None:
    """Fill a folder with links to the files of another: none is copied, and none compiled again."""
    if not source.is_dir() or source.name == "__pycache__":
        target.symlink_to(source)
        return
    target.mkdir()
    for entry in source.iterdir():
        _link(entry, target / entry.name)


def _remove(tree: Path, names: Sequence[str]) -> None:
    listed = tree / "kvproxy" / "features" / "__init__.py"
    text = listed.read_text()
    for name in names:
        shutil.rmtree(tree / "kvproxy" / "features" / name)
        shutil.rmtree(tree / "tests" / "features" / name, ignore_errors=True)
        text, lines = re.subn(rf'^    "{name}",\n', "", text, flags=re.MULTILINE)
        assert lines == 1, f"{name}: not a line of the list"
    listed.unlink()
    listed.write_text(text)


def _run(tree: Path, *arguments: str) -> str:
    """Return the output of a Python that fails, "" of one that does not; the tree precedes the checkout on its path."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.stdout if ended.returncode else ""


def main(asked: Sequence[str]) -> int:
    """Try those asked for, or else all: each alone, then together; the number of failures."""
    names = asked or SHIPPED
    tested = [] if asked else [[names[date.today().toordinal() % len(names)]], list(names)]  # noqa: DTZ011
    sets = [[[name], False] for name in names if [name] not in tested] + [[some, True] for some in tested]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        failed = list(filter(None, pool.map(lambda one: check_without(one[0], tests=one[1]), reversed(sets))))
    sys.stderr.write("\n".join([*failed, f"{len(sets)} trees, {len(failed)} of them fail\n"]))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
