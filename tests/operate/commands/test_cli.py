"""The command line as a person types it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvproxy import __version__
from kvproxy.base.errors import Problem
from kvproxy.cli import main
from kvproxy.operate.commands.configuration import format_problem

GOOD = "endpoints:\n  a: http://127.0.0.1:8000\n"
BAD = """
listen: 127.0.0.1:99999
polcy: round_robin
endpoints:
  - {id: a, url: "ftp://x"}
  - {id: a, url: "http://127.0.0.1:8000", wieght: 2}
timeouts: {connect: fast}
"""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvproxy --version` is what the package says."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvproxy {__version__}\n"


def test_check_of_a_good_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0 and one line."""
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    assert main(["check", str(file)]) == 0
    assert "good (1 cluster(s), 1 static endpoint(s))" in capsys.readouterr().out


def test_check_names_every_planted_error_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Path, problem and nearest key of each; exit 1."""
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)
    assert main(["check", str(file)]) == 1
    out = capsys.readouterr().out
    for planted in ("listen", "polcy", "policy", "endpoints[0].url", "wieght", "weight", "timeouts.connect"):
        assert planted in out, planted


def test_check_says_where_as_compilers_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FILE:LINE:COLUMN first, which editors and terminals make a link of; no colour into a pipe; file order."""
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)
    assert main(["check", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{file}:3:1: error: polcy: unknown key (did you mean 'policy'?)"
    assert [int(line.split(":")[1]) for line in lines[:-1]] == [2, 3, 5, 6, 6, 7]
    assert lines[-1] == f"{file}: 6 errors"


def test_colour_is_for_terminals() -> None:
    """The severity alone, and the text is the same."""
    problem = Problem("polcy", "unknown key", file="c.yaml", line=3, column=1)
    assert format_problem(problem, colour=True) == "c.yaml:3:1: \x1b[31merror\x1b[0m: polcy: unknown key"
    assert format_problem(problem) == "c.yaml:3:1: error: polcy: unknown key"


def test_serve_shows_the_place_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be served is refused in the words of check."""
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)
    assert main(["serve", "-c", str(file)]) == 1
    assert f"{file}:3:1: error: polcy: unknown key (did you mean 'policy'?)" in capsys.readouterr().err


def test_the_usual_file(elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """./config.yaml when none is named, KVPROXY_CONFIG before it; which one is said, beside the output."""
    (elsewhere / "config.yaml").write_text(GOOD)
    assert main(["check"]) == 0
    assert capsys.readouterr().err == "using ./config.yaml\n"
    (elsewhere / "other.yaml").write_text(BAD)
    monkeypatch.setenv("KVPROXY_CONFIG", "other.yaml")
    assert main(["check"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "using other.yaml (from KVPROXY_CONFIG)\n"
    assert shown.out.startswith("other.yaml:2:1: error: listen")
    assert main(["serve"]) == 1
    assert "other.yaml:3:1: error: polcy" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pipe_that_is_closed_is_no_error() -> None:
    """`kvproxy check --schema | head -1`: no traceback, no complaint of the interpreter."""
    command = f"set -o pipefail; {sys.executable} -m kvproxy check --schema | head -c 1 >/dev/null"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode in (0, 141)
    assert ended.stderr == ""


@pytest.mark.parametrize("arguments", [["--turns", "-1"], ["--sessions", "0"], ["--engines", "many"]])
def test_the_demo_refuses_impossible_numbers(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line, not a traceback."""
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    assert ended.value.code == 2
    assert "must be a whole number from 1 to 1000" in capsys.readouterr().err


def test_check_of_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that names the file, not a traceback."""
    assert main(["check", str(tmp_path / "nowhere.yaml")]) == 1
    said = capsys.readouterr().out
    assert said.startswith("error: cannot read ")
    assert "nowhere.yaml" in said


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder without a configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVPROXY_CONFIG", raising=False)
    return tmp_path


@pytest.mark.usefixtures("elsewhere")
def test_check_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line is exit 2."""
    assert main(["check"]) == 2
    assert "FILE" in capsys.readouterr().err


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Ready for an editor."""
    assert main(["check", "--schema"]) == 0
    assert "endpoints" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to serve"),
        (["-c", "x.yaml", "--endpoint", "a=http://h:1"], "not both"),
        (["--endpoint", "a=ftp://h"], "engine a: the scheme must be http or https"),
        (["a=http://h:1", "a=http://h:2"], "another engine has the id 'a'"),
        (["=http://h:1"], "an engine without an id"),
        (["--endpoint", "a=http://h:1", "--policy", "round_robbin"], "round_robin"),
        (["-c", "/nonexistent/x.yaml"], "/nonexistent/x.yaml"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_serve_refuses_what_it_cannot_serve(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is bound."""
    assert main(["serve", *arguments]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_port_that_is_taken_names_its_holder() -> None:
    """One line: the address, the process, what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvproxy", "serve", "--endpoint", "a=http://127.0.0.1:1", "--no-admin"]
        ended = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    said = [line for line in ended.stderr.splitlines() if str(port) in line]
    assert len(said) == 1, said
    assert f"cannot listen on 127.0.0.1:{port}: the port is taken by " in said[0]
    assert f"(pid {os.getpid()})" in said[0]
    assert said[0].endswith("end that, or listen on another one")


def test_the_demo_answers_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Every endpoint takes part, streamed and not, and the table counts all requests."""
    assert main(["demo", "--engines", "2", "--sessions", "4", "--turns", "2"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:3] for line in out.splitlines() if "sim-0:" in line}
    assert set(rows) == {"round_robin", "kv_aware"}
    for counts in rows.values():
        served = {name: int(count) for name, _, count in (one.partition(":") for one in counts)}
        # On a machine that stands still a late probe may keep one of them out for a turn.
        assert sum(served.values()) == 8
        assert set(served) == {"sim-0", "sim-1"}
        assert 0 not in served.values()
    assert "TTFT mean" in out


@pytest.mark.parametrize(("wrong", "meant"), [("chek", "check"), ("stauts", "status"), ("zzz", "")])
def test_a_misspelt_command_is_answered_with_the_nearest(
    wrong: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As keys of the configuration are."""
    with pytest.raises(SystemExit) as ended:
        main([wrong])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"did you mean '{meant}'?" in said if meant else "did you mean" not in said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["serve", "http://a", "--prot", "3"], "kvproxy serve: error: unknown: --prot 3: did you mean --port?"),
        (["replay", "--polcy=x"], "kvproxy replay: error: unknown: --polcy=x: did you mean --policy?"),
        (["check", "a", "b"], "kvproxy check: error: unknown: b"),
    ],
)
def test_an_unknown_option_is_answered_by_its_command(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With that command's usage, and the nearest option."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"usage: kvproxy {words[0]} ")
    assert printed.endswith(f"{error}\n")


def test_a_file_that_cannot_be_read_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which one and why; no number of the operating system's."""
    for command in (["status", "--token-file", f"{tmp_path}/none"], ["replay", f"{tmp_path}/none"]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert f"{tmp_path}/none: No such file or directory" in said
        assert "Errno" not in said


def test_check_takes_its_file_as_other_commands_do(tmp_path: Path) -> None:
    """`-c FILE` and `FILE` are the same."""
    file = tmp_path / "config.yaml"
    file.write_text("endpoints: [http://127.0.0.1:8000]\n")
    assert main(["check", "-c", str(file)]) == 0


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_a_file_in_the_place_of_engines_is_no_engine(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option is named, and nothing is visited or served."""
    file = tmp_path / "config.yaml"
    file.write_text("endpoints: [http://127.0.0.1:8000]\n")
    assert main([command, str(file)]) != 0
    shown = "".join(capsys.readouterr())
    assert "is a file, not an engine" in shown
    assert "-c" in shown
