"""The command line as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvproxy import __version__
from kvproxy.cli import main

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


def test_check_of_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that names the file, not a traceback."""
    assert main(["check", str(tmp_path / "nowhere.yaml")]) == 1
    assert "nowhere.yaml" in capsys.readouterr().out


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
        (["--endpoint", "a=nonsense"], "url"),
        (["--endpoint", "a=http://h:1", "--policy", "round_robbin"], "round_robin"),
        (["-c", "/nonexistent/x.yaml"], "/nonexistent/x.yaml"),
    ],
)
def test_serve_refuses_what_it_cannot_serve(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is bound."""
    assert main(["serve", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_the_demo_answers_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Every endpoint takes part, streamed and not, and the table says so."""
    assert main(["demo", "--engines", "2", "--sessions", "4", "--turns", "2"]) == 0
    out = capsys.readouterr().out
    assert "8/8" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("round_robin  ")]
    assert rows[0][1:3] == ["sim-0:4", "sim-1:4"]
    assert "TTFT mean" in out
