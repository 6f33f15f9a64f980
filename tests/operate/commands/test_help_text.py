"""Help that shows commands in groups, examples that parse, and the usual options first."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

import pytest

from kvproxy.cli import _parser, list_feature_commands, main
from kvproxy.operate.commands.help_text import EXAMPLES, GROUPS, USUAL

SHOWN = [*EXAMPLES.values(), *(one.examples for one in list_feature_commands())]


def commands() -> dict[str, argparse.ArgumentParser]:
    """All of them, but for the one that `serve --workers` starts itself."""
    [action] = [one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return {name: parser for name, parser in action.choices.items() if name != "worker"}


def test_every_command_is_in_one_group_and_has_examples() -> None:
    """A new command is found at first sight."""
    added = {one.name: one for one in list_feature_commands()}
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(commands().keys() - added.keys())
    assert EXAMPLES.keys() == set(grouped)
    assert all(one.group in GROUPS and one.examples for one in added.values())


@pytest.mark.parametrize(
    "line",
    [line for lines in (*EXAMPLES.values(), *(one.examples for one in list_feature_commands())) for line in lines],
)
def test_examples_parse(line: str) -> None:
    """As they stand."""
    line = line.removeprefix('eval "$(').removesuffix(')"').partition(" > ")[0]
    program, *words = shlex.split(line)
    assert program == "kvproxy"
    assert _parser().parse_args(words).run


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_options_first(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` begins with examples and is short; `--help-all` has everything, and nothing that is shown is gone."""
    texts = {}
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([name, option])
        texts[option] = capsys.readouterr().out
    short, whole = texts["--help"], texts["--help-all"]
    assert short.index("examples:") < short.index("options:")
    assert len(short.splitlines()) < 65
    assert len(whole.splitlines()) > len(short.splitlines())
    dests = {action.dest for action in commands()[name]._actions}
    assert dests >= USUAL[name]
    missing = [
        action for action in commands()[name]._actions if action.help is None or action.help == argparse.SUPPRESS
    ]
    assert not missing


def test_the_groups_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of a first day."""
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    places = [said.index(f"\n  {title}\n") for title in GROUPS]
    assert places == sorted(places)


_LOADED = """
import sys
from kvproxy.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
assert "kvproxy.lab" not in sys.modules
assert "pydantic" not in sys.modules
"""


def test_help_loads_no_configuration_and_no_lab() -> None:
    """In a process of its own: `kvproxy --help`, `drain` and `status` start in a fraction of a second."""
    subprocess.run([sys.executable, "-c", _LOADED, "--help"], check=True, capture_output=True, timeout=60)
