"""docs/deployment.md: every command it shows names targets, files and arguments that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from kvproxy.cli import _parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deployment.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
#: What the page's own commands make before they use it.
MADE = {"dist/kvproxy", "./dist/kvproxy", "dist/*.whl"}


def words_of(program: str) -> list[list[str]]:
    """Arguments of every command of the page that runs a program."""
    found = [shlex.split(line) for line in COMMANDS]
    return [words[1:] for words in found if Path(words[0]).name == program]


def test_make_targets_exist() -> None:
    """`make dist` and the others."""
    used = {word for words in words_of("make") for word in words}
    assert used
    assert used <= TARGETS


@pytest.mark.parametrize("words", [w for w in words_of("kvproxy") if w != ["--version"]], ids=" ".join)
def test_command_lines_parse(words: list[str]) -> None:
    """Each names a command and arguments it has."""
    assert _parser().parse_args(words).run


def test_files_and_folders_exist() -> None:
    """Files that a command reads are in the repository, or made by a command above it."""
    named = {
        word
        for line in COMMANDS
        for word in shlex.split(line)
        if re.match(r"(\./)?((dist|deploy)/|config\.yaml)", word) and not word.startswith("/")
    }
    assert {"deploy/compose.yaml", "deploy/kubernetes", "deploy/systemd/kvproxy.service"} <= named
    assert [word for word in named - MADE if not (ROOT / word.partition(":")[0]).exists()] == []


def test_variables_are_set_before_they_are_needed() -> None:
    """Compose is told what it refuses to start without."""
    compose = (ROOT / "deploy" / "compose.yaml").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", compose))
    exported = {word.partition("=")[0] for words in words_of("export") for word in words}
    assert required <= exported
    optional = set(re.findall(r"\$\{(\w+):-", compose))
    assert set(re.findall(r"\$\{(\w+)", compose)) == required | optional


def test_the_secret_kubernetes_is_given_is_the_one_it_asks_for() -> None:
    """Name and key."""
    (secret,) = [words for words in words_of("kubectl") if words[0] == "create"]
    deployment = yaml.safe_load((ROOT / "deploy/kubernetes/deployment.yaml").read_text())
    (variable,) = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    wanted = variable["valueFrom"]["secretKeyRef"]
    assert wanted["name"] in secret
    assert any(word.startswith(f"--from-literal={wanted['key']}=") for word in secret)


def test_the_scrape_job_has_the_name_the_alerts_look_for() -> None:
    """`up{job="kvproxy"}`."""
    (text,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "scrape_configs" in block]
    assert [job["job_name"] for job in yaml.safe_load(text)["scrape_configs"]] == ["kvproxy"]
    assert 'up{job="kvproxy"}' in (ROOT / "deploy/prometheus/alerts.yaml").read_text()
