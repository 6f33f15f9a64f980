"""Hosts that need older packages than the others, by their tests in an environment of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.hosts.install import PYTHON

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="python -m tests.hosts.install"),
]


@pytest.mark.parametrize(
    "tests",
    [
        ("test_sdks.py", "-k", "instructor or llama_index"),
        ("test_lm_eval.py",),
        ("test_samples.py", "-k", "litellms_proxy"),
    ],
    ids=lambda tests: tests[0],
)
def test_hosts_that_need_older_packages(tests: tuple[str, ...]) -> None:
    """None of their tests is skipped there."""
    file, *chosen = tests
    command = [PYTHON, "-m", "pytest", "-m", "hosts", "-p", "no:xdist", Path(__file__).with_name(file), *chosen]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    summary = ended.stdout.splitlines()[-1]
    assert (ended.returncode, "skipped" in summary) == (0, False), ended.stdout
