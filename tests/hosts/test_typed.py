"""Host apps with types, and the programs of the pages for Python, under `mypy --strict` and pyright."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(700)]
FOLDER = Path(__file__).parent / "typed"
ROOT = FOLDER.parents[2]
PAGES = {"README.md", "docs/python.md"}
CHECKERS = {
    "mypy": ["--strict", "--follow-imports=silent", "--config-file=", "--cache-dir=.mypy_cache/typed"],
    "pyright": ["--pythonpath", sys.executable],
}


def write_programs(folder: Path) -> list[Path]:
    """Write each program of the pages into a file, as a reader does."""
    programs = [block for block in blocks("python") if block.page in PAGES]
    assert {block.page for block in programs} == PAGES
    files = []
    for number, program in enumerate(programs):
        files.append(folder / f"program_{number}.py")
        files[-1].write_text(f"# {program.where}\n{program.text}")
    return files


@pytest.mark.parametrize("checker", CHECKERS)
def test_typed_host_apps_and_documented_programs_are_clean(checker: str, tmp_path: Path) -> None:
    pytest.importorskip(checker)
    files = [*sorted(FOLDER.glob("*.py")), *write_programs(tmp_path)]
    command = [sys.executable, "-m", checker, *CHECKERS[checker], *map(str, files)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
