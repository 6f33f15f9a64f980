"""Host apps with types, under `mypy --strict` and pyright."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hosts
FOLDER = Path(__file__).parent / "typed"
ROOT = FOLDER.parents[2]
CHECKERS = {
    "mypy": ["--strict", "--follow-imports=silent", "--config-file=", "--cache-dir=.mypy_cache/typed"],
    "pyright": ["--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_typed_host_apps_are_clean(checker: str) -> None:
    pytest.importorskip(checker)
    command = [sys.executable, "-m", checker, *CHECKERS[checker], *map(str, sorted(FOLDER.glob("*.py")))]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
