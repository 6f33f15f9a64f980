"""Shell completion, asked of the shells themselves where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvproxy.cli import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of `kvproxy completion`."""
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="asks bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvproxy ", ["drain", "serve"]),
        ("kvproxy dr", ["drain"]),
        ("kvproxy serve --le", ["--lenient"]),
        ("kvproxy completion ", ["bash", "zsh", "fish"]),
        ("kvproxy check conf", ["config.yaml"]),
        ("kvproxy serve -c conf", ["config.yaml"]),
    ],
)
def test_bash_completes(line: str, offered: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Commands, options, choices and files."""
    (tmp_path / "config.yaml").touch()
    asked = f"COMP_LINE='{line}'; COMP_POINT={len(line)}; COMP_TYPE=9; _python_argcomplete kvproxy; "
    text = script("bash", capsys) + asked + "printf '%s\\n' \"${COMPREPLY[@]}\""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, cwd=tmp_path, check=True, env={**os.environ, "PATH": path}
    )
    assert [one for one in offered if one not in ended.stdout.split()] == []
    assert "worker" not in ended.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_sound(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The shell, where there is one, can read it."""
    text = script(shell, capsys)
    assert "kvproxy" in text
    if shutil.which(shell) is not None:
        flag = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([shell, flag], input=text, text=True, check=True)
