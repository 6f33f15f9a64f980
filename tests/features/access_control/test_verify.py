"""Settings of auth, cors and rate_limit that are fine piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.operate.config.load import check_config

E = "endpoints: ['http://127.0.0.1:8000']\n"
CHAIN = "filters: [{}, inference_request, kvcache, router]\n"


def problems_of(text: str) -> list[str]:
    """Return the problems of a chain that begins with this filter."""
    _, problems = check_config(E + CHAIN.format(text), env={})
    return [f"{problem.severity}: {problem}" for problem in problems]


def test_all_of_them_in_the_right_order() -> None:
    """No problem."""
    cors = "cors: {allow_origins: ['https://a.example']}"
    auth = "auth: {keys: [{name: t, key: k1}, {name: u, key: k2}]}"
    assert problems_of(f"{cors}, {auth}, rate_limit: {{requests_per_minute: 5}}") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("auth", "error: filters[0].keys: auth has neither keys nor a file"),
        ("auth: {file: /nowhere}", "error: filters[0].auth.file: no such file"),
        (
            "auth: {keys: [{name: a, key: k}, {name: b, key: k}]}",
            "error: filters[0].auth.keys[1].key: the same key is given twice",
        ),
        (
            "auth: {keys: [{name: a, key: k}], exempt_paths: [health]}",
            "error: filters[0].auth.exempt_paths[0]: must start with /",
        ),
        ("cors", "error: filters[0].allow_origins: cors allows no origin"),
        (
            "cors: {allow_origins: ['*'], allow_credentials: true}",
            "error: filters[0].cors.allow_credentials: with the origin * any page",
        ),
        ("cors: {allow_origin_regex: '('}", "error: filters[0].cors.allow_origin_regex: not a regular"),
        ("rate_limit", "warning: filters[0].requests_per_minute: rate_limit has no limit"),
    ],
)
def test_contradictory_settings(text: str, problem: str) -> None:
    """One problem each, at its place."""
    shown = problems_of(text)
    assert len([line for line in shown if line.startswith(problem)]) == 1, shown


def test_a_file_that_exists(tmp_path: Path) -> None:
    """It is read when the filter is built."""
    file = tmp_path / "keys"
    file.write_text("x")
    assert problems_of(f"auth: {{file: {file}}}") == []
