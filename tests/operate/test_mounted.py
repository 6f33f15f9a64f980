"""The root of a mounted app is taken off its path, whatever of it the host has taken off already."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.operate.mounted import may_be_below, without_root


@pytest.mark.parametrize(
    ("scope", "path", "raw_path"),
    [
        # as ASGI has it
        ({"root_path": "/llm", "path": "/llm/v1/a", "raw_path": b"/llm/v1/a"}, "/v1/a", b"/v1/a"),
        ({"root_path": "/l m", "path": "/l m/v1/a b", "raw_path": b"/l%20m/v1/a%20b"}, "/v1/a b", b"/v1/a%20b"),
        ({"root_path": "/llm", "path": "/llm", "raw_path": b"/llm"}, "/", b"/"),
        ({"root_path": "/llm", "path": "/llm/", "raw_path": b"/llm/"}, "/", b"/"),
        ({"root_path": "/llm", "path": "/llm/v1/a/", "raw_path": b"/llm/v1/a/"}, "/v1/a/", b"/v1/a/"),
        # by a server that has no raw path, and one whose raw path has no root
        ({"root_path": "/llm", "path": "/llm/v1/a"}, "/v1/a", None),
        ({"root_path": "/llm", "path": "/llm/v1/a", "raw_path": b"/v1/a"}, "/v1/a", b"/v1/a"),
        # by Litestar
        ({"root_path": "", "path": "/v1/a/", "raw_path": b"/llm/v1/a"}, "/v1/a", b"/v1/a"),
        ({"root_path": "", "path": "/v1/a b/", "raw_path": b"/llm/v1/a%20b"}, "/v1/a b", b"/v1/a%20b"),
        ({"root_path": "/r", "path": "/v1/a/", "raw_path": b"/r/llm/v1/a"}, "/v1/a", b"/v1/a"),
        ({"root_path": "", "path": "/", "raw_path": b"/llm"}, "/", b"/"),
        # not mounted
        ({"path": "/v1/a b", "raw_path": b"/v1/a%20b"}, "/v1/a b", b"/v1/a%20b"),
        ({"path": "/v1/\u00ff", "raw_path": b"/v1/%ff"}, "/v1/\u00ff", b"/v1/%ff"),
    ],
)
def test_the_path_below_the_root(scope: dict[str, Any], path: str, raw_path: bytes | None) -> None:
    assert may_be_below(scope)
    below = without_root(scope)
    assert (below["path"], below.get("raw_path"), below["root_path"]) == (path, raw_path, "")


def test_a_request_to_an_app_of_its_own_is_not_looked_at() -> None:
    assert not may_be_below({"path": "/v1/a", "raw_path": b"/v1/a", "root_path": ""})
    assert not may_be_below({"path": "/v1/a"})
