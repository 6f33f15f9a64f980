"""The configuration's bounds on clients are the listener's."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.operate.config.load import check_config, load_config
from kvproxy.proxy.listener.parser import ListenerLimits

ENDPOINTS = ["http://127.0.0.1:9"]


def test_every_bound_is_taken_over() -> None:
    """Each by its own setting."""
    limits = {
        "connections": 5, "head": "8KiB", "head_timeout": "3s", "keep_alive": "4s", "stall_timeout": 0,
    }  # fmt: skip
    config = load_config({"endpoints": ENDPOINTS, "limits": limits})
    assert ListenerLimits.from_config(config.limits) == ListenerLimits(5, 8192, 256, 3.0, 4.0, 0.0)


def test_the_defaults_are_the_same() -> None:
    """A listener made without a configuration is bounded as one with an empty one."""
    assert ListenerLimits.from_config(load_config({"endpoints": ENDPOINTS}).limits) == ListenerLimits()


@pytest.mark.parametrize(
    ("name", "value"),
    [("head", "1KiB"), ("head", "2MiB"), ("head_timeout", "2h"),
     ("keep_alive", "25h"), ("stall_timeout", "25h"), ("stall_timeout", -1),
     ("body_timeout", 0), ("bodies", "31MiB")],
)  # fmt: skip
def test_limits_outside_their_range_are_refused(name: str, value: Any) -> None:
    """With its place in the file."""
    config, problems = check_config({"endpoints": ENDPOINTS, "limits": {name: value}})
    assert config is None
    assert [problem.path for problem in problems] == [f"limits.{name}"]
