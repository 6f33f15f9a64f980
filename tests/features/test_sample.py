"""The sample in samples/feature, installed as its distribution would be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SAMPLE = Path(__file__).parents[2] / "samples" / "feature"

PROGRAM = """
import asyncio
from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config
from tests.support.asgi import call, http_scope

proxy = Proxy(load_config({
    "endpoints": ["http://127.0.0.1:9"],
    "greeting": "good morning",
    "filters": {"greeting": {"header": "x-hello"}},
}))
reply = asyncio.run(call(proxy, http_scope("/health")))
print(dict(reply.headers)[b"x-hello"].decode(), proxy.metrics.registry.get_sample_value("kvproxy_greetings_total"))
"""


def add_distribution(folder: Path, name: str) -> None:
    """Add metadata of a distribution that has one feature."""
    info = folder / f"kvproxy_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvproxy-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvproxy.features]\n{name} = {name}.feature:FEATURE\n")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the sample and its metadata on the import path."""
    add_distribution(tmp_path, "greeting")
    root = SAMPLE.parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SAMPLE, tmp_path, root)))}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_its_setting_filter_and_metric_are_there(environment: dict[str, str]) -> None:
    """A field of the root, read by its filter, and a series that exists from the start."""
    done = run(environment, "-c", PROGRAM)
    assert (done.stdout, done.returncode) == ("good morning 1.0\n", 0), done.stderr


def test_its_faults_are_found_with_those_of_the_core(environment: dict[str, str], tmp_path: Path) -> None:
    """`kvproxy check` names line and column of what the feature refuses."""
    file = tmp_path / "config.yaml"
    file.write_text("endpoints: [http://127.0.0.1:9]\ngreeting: grüezi\n")
    done = run(environment, "-m", "kvproxy", "check", str(file))
    assert done.returncode == 1
    assert f"{file}:2:1: error: greeting: must be ASCII" in done.stdout + done.stderr


def test_its_command_runs_and_is_in_the_help(environment: dict[str, str]) -> None:
    """Under the heading that it names."""
    assert run(environment, "-m", "kvproxy", "greet", "Ada").stdout == "hello, Ada\n"
    assert "Samples\n    greet     print a greeting\n" in run(environment, "-m", "kvproxy", "--help").stdout


def test_a_command_with_the_name_of_another_is_left_out(environment: dict[str, str], tmp_path: Path) -> None:
    """Both of the core and of another distribution; a log line names it."""
    package = tmp_path / "second"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "options.py").write_text(
        "from greeting.options import COMMANDS as FIRST\n"
        "COMMANDS = [FIRST[0], *(FIRST[0]._replace(name=name) for name in ('check', 'welcome'))]\n"
    )
    add_distribution(tmp_path, "second")
    done = run(environment, "-m", "kvproxy", "--help")
    assert "welcome   print a greeting" in done.stdout
    assert "find every problem of a configuration" in done.stdout
    for name in ("greet", "check"):
        assert f"a feature's command {name} is left out: another command has its name" in done.stderr


def test_commands_that_cannot_be_loaded_are_left_out(environment: dict[str, str], tmp_path: Path) -> None:
    """Every other command works."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "options.py").write_text("import nothing_of_this_name\n")
    add_distribution(tmp_path, "broken")
    done = run(environment, "-m", "kvproxy", "greet", "Ada")
    assert (done.stdout, done.returncode) == ("hello, Ada\n", 0)
    assert "commands of broken are left out: ModuleNotFoundError" in done.stderr


def test_without_it_its_keys_are_unknown(tmp_path: Path) -> None:
    """The core has no list of features that could be installed."""
    file = tmp_path / "config.yaml"
    file.write_text("endpoints: [http://127.0.0.1:9]\ngreeting: hello\n")
    done = run(dict(os.environ), "-m", "kvproxy", "check", str(file))
    assert "greeting: unknown key" in done.stdout + done.stderr
