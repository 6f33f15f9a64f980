"""Shell completion, asked of the shells themselves where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvproxy.cli import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of `kvproxy completion`."""
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="asks bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
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
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _kvproxy; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    text = script("bash", capsys)
    ended = subprocess.run(["bash", "-c", f"{text}\n{asked}"], capture_output=True, text=True, cwd=tmp_path, check=True)
    found = ended.stdout.split()
    assert [one for one in offered if one not in found] == []
    assert all(one.startswith(words[-1]) for one in found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_sound(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each names every command; the shell, where there is one, can read it."""
    text = script(shell, capsys)
    for command in ("init", "serve", "check", "doctor", "status", "explain", "drain", "undrain", "reload", "replay"):
        assert command in text
    if shutil.which(shell) is not None:
        flag = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([shell, flag], input=text, text=True, check=True)
