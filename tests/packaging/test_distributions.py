"""Wheel and source distribution: what is in them, and that they install and work in an empty environment."""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvproxy import __version__
from tests.packaging.support import ROOT, run, virtual_environment

pytestmark = pytest.mark.packaging

#: What the tree has that belongs to no installation.
_LITTER = ("__pycache__", ".pyc")


@dataclass(frozen=True)
class Built:
    """The two files of `make dist`."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the wheel from the source distribution, as `python -m build` does: nothing may be missing there."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ".", cwd=ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


def package_files() -> set[str]:
    """Every file of the package in the tree."""
    found = (path.relative_to(ROOT) for path in (ROOT / "kvproxy").rglob("*") if path.is_file())
    return {str(path) for path in found if not str(path).endswith(_LITTER) and "__pycache__" not in path.parts}


def test_the_wheel_is_the_package_and_nothing_else(built: Built) -> None:
    """Modules, `py.typed`, the admin page's files; no tests."""
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(f"kvproxy-{__version__}.dist-info/METADATA").decode()
    assert names == package_files()
    assert "kvproxy/py.typed" in names
    assert f"Version: {__version__}\n" in metadata
    assert "Provides-Extra: otel\n" in metadata


def test_the_source_distribution_has_what_a_packager_needs(built: Built) -> None:
    """The package, the documentation, what is deployed, the licence; nothing of this machine."""
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= names
    assert {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "deploy/compose.yaml",
        "Dockerfile",
        "constraints.txt",
    } <= names
    assert not [name for name in names if name.startswith((".venv", ".git/", "dist", "build", "tests"))]


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_and_works_in_an_empty_environment(built: Built, tmp_path: Path, kind: str) -> None:
    """`pip install`, then the commands of the deployment page."""
    python = virtual_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", getattr(built, kind), cwd=tmp_path)
    kvproxy = python.with_name("kvproxy")
    env = {"PATH": os.defpath}
    assert run(kvproxy, "--version", cwd=tmp_path, env=env).strip() == f"kvproxy {__version__}"
    where = run(python, "-c", "import kvproxy; print(kvproxy.__file__)", cwd=tmp_path, env=env)
    assert where.startswith(str(tmp_path))
    out = run(kvproxy, "demo", "--engines", "2", "--sessions", "2", "--turns", "1", cwd=tmp_path, env=env)
    assert "kv_aware" in out
    (tmp_path / "c.yaml").write_text("endpoints: [http://127.0.0.1:9]\nfilters: {tracing: }\n")
    run(kvproxy, "check", "c.yaml", cwd=tmp_path, env=env)
    refused = f"{kvproxy} serve -c c.yaml 2>&1 | grep \"pip install 'kvproxy\\[otel\\]'\""
    run("sh", "-c", refused, cwd=tmp_path, env=env)
