"""The image's build stage as commands in a temporary root: it installs, and leaves no installer behind."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from kvproxy import __version__
from tests.deploy.test_dockerfile import instructions
from tests.packaging.support import ROOT, run

pytestmark = pytest.mark.packaging


def test_the_build_stage_installs_a_working_kvproxy_without_pip(tmp_path: Path) -> None:
    """COPY and RUN of the first stage, in order, with / moved elsewhere."""
    source, target = tmp_path / "src", tmp_path / "opt" / "kvproxy"
    source.mkdir()
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.defpath}"}
    env.pop("VIRTUAL_ENV", None)
    stage = instructions()
    stages = [index for index, (name, _) in enumerate(stage) if name == "FROM"]
    for name, rest in stage[stages[0] : stages[1]]:
        if name == "COPY":
            *sources, where = rest.split()
            for each in sources:
                _copy(ROOT / each, source / where / ("" if (ROOT / each).is_file() else "."))
        elif name == "RUN":
            run("sh", "-c", rest.replace("/opt/kvproxy", str(target)), cwd=source, env=env)
    kvproxy = target / "bin" / "kvproxy"
    assert run(kvproxy, "--version", cwd=tmp_path, env={"PATH": os.defpath}).strip() == f"kvproxy {__version__}"
    assert not list(target.rglob("pip"))
    run(target / "bin" / "python", "-c", "import opentelemetry.sdk, kvproxy.features.tracing.tracing", cwd=tmp_path)


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        shutil.copy(source, target)
    else:
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
