"""The lock: every requirement of pyproject.toml has one exact version, and what installs takes these versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def requirements() -> list[Requirement]:
    """Everything that pyproject.toml asks for, build backend, extras and groups included."""
    project = PROJECT["project"]
    listed = [PROJECT["build-system"]["requires"], project["dependencies"]]
    listed += [*project["optional-dependencies"].values(), *PROJECT["dependency-groups"].values()]
    return [Requirement(text) for each in listed for text in each]


def test_a_line_is_a_name_and_a_version() -> None:
    """No address of an index, no path of the machine that wrote it."""
    assert LINES
    assert [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)] == []


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_a_requirement_is_pinned_to_a_version_that_it_allows(requirement: Requirement) -> None:
    """`make lock` pins what was added to pyproject.toml, or raised there."""
    versions = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}
    name = canonicalize_name(requirement.name)
    assert name in versions, "run `make lock`"
    assert requirement.specifier.contains(versions[name], prereleases=True), "run `make lock`"


@pytest.mark.parametrize("file", ["Makefile", "Dockerfile"])
def test_installations_take_the_pinned_versions(file: str) -> None:
    """Only `make lock`, which looks for newer ones, does not; packages are built with pinned backends."""
    text = (ROOT / file).read_text().replace("\\\n", " ").replace("$(PIP)", "pip install --constraint constraints.txt")
    installs = [
        line for line in text.splitlines() if "pip" in line and " install " in line and "build/lock/" not in line
    ]
    assert installs
    assert [line for line in installs if "--constraint constraints.txt" not in line] == []
    builds = [line for line in installs if re.search(r"['\"]?\.\[", line)]
    assert builds
    assert [line for line in builds if "--build-constraint constraints.txt" not in line] == []
