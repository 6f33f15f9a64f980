"""Checks of its settings."""

from __future__ import annotations

import pytest

from kvproxy.operate.config.load import check_config


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("discovery: {etcd: {urls: [x], prefix: /e/}}\n", "error: discovery.etcd.urls[0]: must start with http"),
    ],
)
def test_faults(text: str, problem: str) -> None:
    """Each with its place."""
    (found,) = check_config(f"endpoints: [http://127.0.0.1:1]\n{text}", env={})[1]
    assert f"{found.severity}: {found}".startswith(problem)
