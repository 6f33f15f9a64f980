"""What a reload changed, in names and never in values."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.config.changes import summarise_changes
from kvproxy.config.load import load_config
from kvproxy.config.schema import Config

BASE: dict[str, Any] = {"endpoints": {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"}}


def config(**fields: Any) -> Config:
    return load_config({**BASE, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "nothing changed"),
        ({"policy": "round_robin"}, "clusters.default.policy"),
        (
            {"endpoints": {"a": "http://127.0.0.1:3", "c": "http://127.0.0.1:2"}},
            "clusters.default.endpoints (+c, -b), clusters.default.endpoints.a.url",
        ),
        ({"endpoints": dict(reversed(BASE["endpoints"].items()))}, "clusters.default.endpoints (order)"),
        ({"log": {"level": "debug"}, "retry": {"attempts": 5}}, "log.level"),
        ({"admin": {"token": "new-secret"}}, "admin.token"),
    ],
)
def test_what_changed_is_named(fields: dict[str, Any], said: str) -> None:
    """By the paths of the configuration; endpoints by their ids."""
    text = summarise_changes(config(), config(**fields))
    assert said in text
    assert "secret" not in text


def test_many_changes_are_counted() -> None:
    """A log line stays a line."""
    after = config(
        policy="round_robin", listen=":8801", admin={"port": 8802}, log={"level": "debug", "format": "json"},
        retry={"attempts": 5, "budget": 0.3}, timeouts={"connect": "9s", "idle": "9s"}, limits={"connections": 7},
        health={"interval": "9s"},
    )  # fmt: skip
    text = summarise_changes(config(), after)
    assert text.count(", ") == 7
    assert text.endswith(" and 4 more")  # of twelve: the address to listen at is two
