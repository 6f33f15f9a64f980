"""Environments of other people's tests below tests/real's root, and runs of pytest and Node in them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.real.engines.place import Environment, root

PLACE = root() / "compat"
INSIDE = Path(__file__).with_name("inside")
_LIMIT_S = 1800
#: Nothing here asks the internet.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def install(name: str, packages: Sequence[str], *, on: Environment | None = None) -> Path:
    """Return the Python of an environment with these packages, laid on the environment of an engine."""
    folder = PLACE / name
    python = folder / "bin" / "python"
    stamp = folder / ".kvproxy-installed"
    wanted = "\n".join(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([on.python if on else sys.executable, "-m", "venv", "--clear", folder], check=True)
        for site in (folder / "lib").glob("python*/site-packages"):
            below = [str(each.folder / site.relative_to(folder)) for each in _with_bases(on)]
            (site / "base.pth").write_text("\n".join([*below, ""]))
        subprocess.run([python, "-m", "pip", "-qq", "install", *packages], check=True)
        stamp.write_text(wanted)
    return python


def _with_bases(environment: Environment | None) -> list[Environment]:
    return [environment, *_with_bases(environment.base)] if environment else []


def run_pytest(
    python: Path, tests: Sequence[str | Path], url: str, *, folder: Path, environment: Mapping[str, str]
) -> str:
    """Return the JUnit report of these tests, which find the server in KVPROXY_COMPAT_URL."""
    log = PLACE / "pytest.log"
    given = {**os.environ, **_OFFLINE, "KVPROXY_COMPAT_URL": url, **environment}
    with tempfile.NamedTemporaryFile() as report, log.open("ab") as output:
        own = ["-q", "-p", "no:cacheprovider", "--timeout=120", f"--junitxml={report.name}", "-o", "asyncio_mode=auto"]
        own += ["-c", os.devnull, f"--rootdir={folder}", f"--confcutdir={folder}"]  # without the project's own
        subprocess.run(
            [python, "-m", "pytest", *own, *tests],
            cwd=folder,
            env=given,
            stdout=output,
            stderr=output,
            timeout=_LIMIT_S,
            check=False,
        )
        text = Path(report.name).read_text()
    if "<testcase" not in text:
        sys.exit(f"the suite did not run; see {log}")
    return text
