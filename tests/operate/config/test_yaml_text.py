"""YAML as it is read: scalars, bounds, duplicate keys; and placeholders in values."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.settings.paths import dotted_path
from kvproxy.operate.config import yaml_text
from kvproxy.operate.config.yaml_text import Substituted, parse_yaml, retype_scalars, substitute_variables


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("a: no\nb: on\nc: true\nd: False", {"a": "no", "b": "on", "c": True, "d": False}),
        (
            "a: 22:22\nb: 2026-01-02\nc: 010\nd: 0x10\ne: 0o10",
            {"a": "22:22", "b": "2026-01-02", "c": 10, "d": 16, "e": 8},
        ),
        ("a: 1.5\nb: 1e3\nc: .5\nd: -2\ne: 1_000", {"a": 1.5, "b": 1000.0, "c": 0.5, "d": -2, "e": "1_000"}),
        ("a: ~\nb:\nc: null\nd: ''", {"a": None, "b": None, "c": None, "d": ""}),
        ("a: '1'\nb: \"true\"\nc: |\n  5", {"a": "1", "b": "true", "c": "5"}),
        ("1: x\ntrue: y", {"1": "x", "true": "y"}),
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        (f"a: {'9' * 5000}", {"a": float("inf")}),
        ("", None),
    ],
)
def test_scalars(text: str, data: Any) -> None:
    """YAML 1.2's scalars; keys are always text."""
    assert parse_yaml(text) == (data, [])


def test_anchors_and_merges() -> None:
    """Own keys win over merged ones, earlier merges over later ones, and none of them is a duplicate."""
    text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz:\n  <<: [*x, *y]\n  a: 3\n"
    data, problems = parse_yaml(text)
    assert data["z"] == {"a": 3, "b": 1, "c": 2}
    assert problems == []


def test_every_duplicate_key_is_named_with_its_place() -> None:
    """One problem each, even when an alias repeats the mapping."""
    data, problems = parse_yaml("a: 1\na: 2\nb: &b {c: 1, c: 2}\nd: *b\n")
    assert [str(problem) for problem in problems] == [
        "line 2, column 1: duplicate key 'a'",
        "line 3, column 14: duplicate key 'c'",
    ]
    assert data["a"] == 2


def test_text_is_read_no_further_than_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values in all, and of entries in one place; what is behind them is not looked at."""
    monkeypatch.setattr(yaml_text, "_MAX_NODES", 20)
    assert parse_yaml("[" + "1, " * 18 + "1]") == ([1] * 19, [])
    data, problems = parse_yaml("[" + "1, " * 20 + "{ not YAML")
    assert (data, [one.message for one in problems]) == (None, ["YAML syntax: more than 20 values"])
    assert parse_yaml("a: [1, 2, 3]", max_entries=3) == ({"a": [1, 2, 3]}, [])
    _, problems = parse_yaml("{a: 1, b: 2, c: 3, d: 4, { not YAML", max_entries=3)
    assert [one.message for one in problems] == ["YAML syntax: more than 3 entries"]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("a: [1,\n b: 2", "line 2", "expected ',' or ']'"),
        ("a: 1\n\tb: 2", "line 2, column 1", "cannot start any token"),
        ("a: 1\nb: c: d", "line 2, column 5", "not allowed here"),
        ("a: *nobody", "line 1, column 4", "undefined alias"),
        ("a: 1\n--- \nb: 2", "line 2", "another document"),
        ("a: \x01", "line 1, column 4", "#x01 is not allowed"),
        ("a: !!python/object/apply:os.system [x]\nb: !secret y", "line 2, column 4", "tags"),
        ("? [a]\n: 1", "line 1, column 3", "plain text"),
        ("<<: 5", "line 1, column 1", "merges mappings"),
        ("[" * 70 + "]" * 70, "line 1", "64 levels"),
        ("a: &a [*a]", "line 1", "64 levels"),
        ("[" * 5000, "(file)", "levels deep"),
    ],
)
def test_faults_have_a_place(text: str, place: str, message: str) -> None:
    """Line and column of each."""
    _, problems = parse_yaml(text)
    assert problems
    assert str(problems[0]).startswith(place)
    assert message in str(problems[0])


def test_aliases_cannot_explode() -> None:
    """A few lines that stand for millions of values are refused."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    data, problems = parse_yaml("\n".join(lines))
    assert data is None
    assert "200000 values" in str(problems[0])


def test_a_placeholder_in_braces_gets_a_hint() -> None:
    """The likeliest cause of that syntax error is missing quotes."""
    _, problems = parse_yaml("a: {b: ${C}}")
    assert "in quotes" in problems[0].hint


def test_messages_never_quote_values() -> None:
    """A syntax error beside a key does not print the key."""
    for text in ("key: 'sk-topsecret", "key: {a: sk-topsecret", "key: sk-topsecret: x", "key: [sk-topsecret"):
        _, problems = parse_yaml(text)
        assert problems
        assert "topsecret" not in str(problems[0])


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
