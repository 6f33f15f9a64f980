"""Every command the documentation shows works, or is on a short list that says which test runs it instead."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproxy.cli import _parser
from tests.docs.blocks import ROOT, Block, blocks, inline
from tests.docs.forked import write_program
from tests.docs.shell import Shell, commands
from tests.docs.world import world

#: Beginnings of commands that are not run here, and what runs them.
NOT_HERE = {
    "make test": "is this test suite; make test-real runs against real engines",
    "make demo": "tests/lab/demo/test_demo.py; `kvproxy demo` is run below",
    "make dist": "make test-packaging",
    "make binary": "make test-packaging",
    "./dist/kvproxy serve": "make test-packaging",
    "pip install": "make test-packaging",
    "docker": "tests/deploy and make test-packaging look at the image and the Compose file",
    "export MODEL=": "tests/deploy: Compose is told what it needs",
    "helm": "make test-packaging renders the chart, with such values too",
    "kubectl": "tests/deploy and make test-packaging check the manifests",
    "install -": "tests/deploy: the files exist, the unit is sound",
    "systemctl": "tests/deploy: the unit is sound",
    "kvproxy simulate": "tests/lab/test_simulate.py: the ports of the pages are taken here",
    "RAY_ADDRESS=local serve run": "make test-ray",
    "python samples/litellm/app.py": "make test-hosts",
    "export LITELLM_MASTER_KEY=": "make test-hosts, where LiteLLM's proxy is installed",
    "litellm --config": "the same",
    "curl -s http://127.0.0.1:4000": "the same",
    "vllm serve": "make test-real",
    "python -m sglang": "has no build that runs here; the flags are from its sources",
}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


#: Commands that change nothing. A page that shows one again need not run it again.
LOOKING = ("kvproxy check", "kvproxy doctor", "kvproxy status")


def _run_here() -> Iterator[tuple[Block, list[str]]]:
    """Blocks with the commands of theirs that are run."""
    looked: set[str] = set()
    for block in blocks("sh"):
        shown = [command for command in commands(block.text) if not command.startswith(tuple(NOT_HERE))]
        if run := [command for command in shown if command not in looked]:
            yield block, run
        looked.update(command for command in shown if command.startswith(LOOKING))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a `kvproxy` that was loaded once for all commands."""
    folder = tmp_path_factory.mktemp("programs")
    write_program(folder / "kvproxy", folder / "socket")
    command = [sys.executable, "-m", "tests.docs.forked", str(folder / "socket")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            yield folder
        finally:
            server.terminate()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="pages talk to the proxy by curl")
@pytest.mark.parametrize(("block", "run"), [pytest.param(*one, id=one[0].where) for one in _run_here()])
async def test_commands_work(block: Block, run: list[str], tmp_path: Path, programs: Path) -> None:
    """In order, in front of simulated engines, each with the exit status of success."""
    of_sample = block.page.startswith("samples/")  # those are started from a clone
    async with (
        world(tmp_path, own_gateway=of_sample, programs=programs) as place,
        Shell(ROOT if of_sample else tmp_path, place.environment) as shell,
    ):
        for command in run:
            await shell.run(place.told(command))


def test_blocks_that_are_not_run_are_shown_elsewhere() -> None:
    """The list names nothing that is gone."""
    shown = [command for block in blocks("sh") for command in commands(block.text)]
    assert [begin for begin in NOT_HERE if not any(command.startswith(begin) for command in shown)] == []


def test_make_targets_exist() -> None:
    """In blocks and in sentences."""
    shown = [command for block in blocks("sh") for command in commands(block.text) if command.startswith("make ")]
    shown += [text for _, text in inline("make")]
    used = {word for text in shown for word in shlex.split(text)[1:] if "=" not in word and not word.startswith("-")}
    assert {"demo", "test", "bench"} <= used
    assert used <= TARGETS


@pytest.mark.parametrize(("page", "text"), inline("kvproxy"))
def test_command_lines_in_sentences_parse(page: str, text: str) -> None:
    """Each names a command and options it has; the last value may be left out."""
    if text == "kvproxy greet":
        return  # tests/features/test_sample.py: the command of another distribution
    words = shlex.split(text)[1:]
    assert words == ["--version"] or parses(words) or parses([*words, "VALUE"]), f"{page}: {text}"


def parses(words: list[str]) -> bool:
    """Whether the command line is one."""
    try:
        return bool(_parser().parse_args(words).run)
    except SystemExit:
        return False


@pytest.mark.parametrize(("page", "text"), inline("python"))
def test_modules_and_scripts_in_sentences_exist(page: str, text: str) -> None:
    """`python -m NAME` and `python FILE`."""
    words = shlex.split(text)
    found = importlib.util.find_spec(words[2]) if words[1] == "-m" else (ROOT / words[1]).exists()
    assert found, f"{page}: {text}"
