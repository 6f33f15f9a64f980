"""`kvproxy doctor` as a person types it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproxy.cli import main


@pytest.fixture
def nobody() -> Iterator[str]:
    """Yield a URL where connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_an_engine_that_is_down(nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, the finding with its fix, and a word on what is sent."""
    assert main(["doctor", "--endpoint", f"a={nobody}"]) == 1
    shown = capsys.readouterr()
    assert "nothing listens on 127.0.0.1" in shown.out
    assert "fix: is it running" in shown.out
    assert "not on, but would help:" in shown.out
    assert "  engine priority: `engine_priority: auto`" in shown.out
    assert "max_tokens 1" in shown.err


def test_json(nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is one object; secrets of the file are not in it."""
    file = tmp_path / "kvproxy.yaml"
    file.write_text(f"endpoints:\n  - {{id: a, url: {nobody}, api_key: s3cr3t}}\n")
    assert main(["doctor", "-c", str(file), "--json", "--timeout", "2s"]) == 1
    out = capsys.readouterr().out
    assert json.loads(out)["problems"] == 1
    assert "s3cr3t" not in out


def test_a_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is visited, every problem of the file is a finding."""
    file = tmp_path / "kvproxy.yaml"
    file.write_text("endpoints:\n  - {id: a, url: 'http://127.0.0.1:1'}\n  - {id: a, url: 'http://127.0.0.1:2'}\n")
    assert main(["doctor", "-c", str(file)]) == 1
    shown = capsys.readouterr()
    assert "two endpoints have the id 'a'" in " ".join(shown.out.split())
    assert "visiting" not in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either -c FILE, or the engines"),
        (["-c", "x.yaml", "--endpoint", "a=http://127.0.0.1:1"], "give either -c FILE, or the engines"),
        (["--endpoint", "a=http://127.0.0.1:1", "--timeout", "soon"], "--timeout: expected a duration"),
        (["--endpoint", "a=http://127.0.0.1:1", "--timeout", "0s"], "must be longer than 0"),
    ],
)
def test_wrong_command_lines(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is visited."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVPROXY_CONFIG", raising=False)
    assert main(["doctor", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_a_wrong_endpoint_option(capsys: pytest.CaptureFixture[str]) -> None:
    """A problem of the configuration that the options stand for."""
    assert main(["doctor", "--endpoint", "a=ftp://x"]) == 1
    assert "the scheme must be" in capsys.readouterr().out


@pytest.mark.slow
def test_as_a_program(nobody: str) -> None:
    """In a process of its own the exit status reaches the shell."""
    command = [sys.executable, "-m", "kvproxy", "doctor", "--endpoint", f"a={nobody}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "problem" in ended.stdout
    assert "Traceback" not in ended.stderr
