"""Placeholders in values."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.config.environment import Substituted, retype_scalars, substitute_variables
from kvproxy.config.paths import dotted_path

ENV = {"HOST": "h", "PORT": "8000", "EMPTY": "", "ON": "true", "EVIL": "x\nadmin: false", "MONEY": "${HOST}"}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${HOST}:${PORT}", "h:8000"),
        ("${NOPE:-d}", "d"), ("${EMPTY:-d}", "d"), ("${HOST:-d}", "h"), ("${NOPE:-}", ""), ("${EMPTY}", ""),
        ("$$", "$"), ("$${HOST}", "${HOST}"), ("$HOST", "$HOST"), ("a$b", "a$b"), ("100$", "100$"),
        ("${EVIL}", "x\nadmin: false"), ("${MONEY}", "${HOST}"), ("${NOPE:-http://a:1/b?c=-d}", "http://a:1/b?c=-d"),
        (5, 5), (None, None), (True, True),
    ],
)  # fmt: skip
def test_replacement(written: Any, value: Any) -> None:
    """Values are taken once and literally: they are neither parsed as YAML nor expanded again."""
    assert substitute_variables({"a": [written]}, ENV, dotted_path) == ({"a": [value]}, [])


def test_keys_are_left_alone() -> None:
    """Only values are replaced."""
    assert substitute_variables({"${HOST}": 1}, ENV, dotted_path) == ({"${HOST}": 1}, [])


def test_every_missing_variable_is_named() -> None:
    """With the path it is needed at; its value is empty meanwhile."""
    tree, problems = substitute_variables({"a": {"b": ["${X}", "${Y}${X}"]}, "c": "${1}"}, ENV, dotted_path)
    assert tree == {"a": {"b": ["", ""]}, "c": "1}"}
    assert [str(problem) for problem in problems] == [
        "a.b[0]: environment variable X is not set",
        "a.b[1]: environment variable Y is not set",
        "a.b[1]: environment variable X is not set",
        "c: a placeholder is written ${NAME} or ${NAME:-default}; write $$ for a dollar sign",
    ]


def test_substituted_values_do_not_show_in_messages() -> None:
    """Messages quote with repr."""
    tree, _ = substitute_variables("${PORT}", ENV, dotted_path)
    assert isinstance(tree, Substituted)
    assert f"{tree!r}" == "(a value from the environment)"
    assert tree == "8000"


def test_untyped_settings_get_scalars() -> None:
    """Where no schema says what a value is, it is read as YAML would read it; quoted text stays text."""
    tree, _ = substitute_variables({"a": "${PORT}", "b": ["${ON}", "8000"], "c": "x${PORT}"}, ENV, dotted_path)
    assert retype_scalars(tree) == {"a": 8000, "b": [True, "8000"], "c": "x8000"}
