"""Whatever a file holds, checking it ends in problems, never in another exception."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvproxy.operate.config.load import check_config
from tests.operate.config.test_problems import PLANTED
from tests.support.examples import examples

NATIVE: dict[str, Any] = {
    "listen": {"host": "127.0.0.1", "port": 1, "tls": {"certificate": "c", "private_key": "k"}},
    "admin": "127.0.0.1:2",
    "clusters": {
        "a": {
            "policy": "random",
            "endpoints": [{"id": "x", "url": "http://h:1", "models": ["m"], "retry": {"attempts": 2}}, "y=http://h:2"],
            "health": {"interval": "1s"},
            "discovery": {"dns": {"host": "h", "port": 1}},
        },
        "b": {"endpoints": {"z": {"url": "http://h:3", "labels": {"k": "v"}}}},
    },
    "routes": [{"prefix": "/v1", "model": "m*", "cluster": "a"}, {"cluster": "b"}],
    "filters": [
        "access_log",
        {"auth": {"keys": [{"name": "n", "key": {"file": "/nowhere"}}]}},
        {"cors": {"allow_origins": ["*"]}},
        "inference_request",
        {"kvcache": {"lmcache_endpoint": "http://h:9", "cache_strategy": {"pin_instance_id": "x"}}},
        "router",
    ],
    "limits": {"body": "1MiB"},
    "log": {"level": "info"},
}

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["${X}", "$", "-1s"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below `tree`."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from places(value)


CHANGES = st.lists(st.tuples(st.integers(0, 10_000), junk), min_size=1, max_size=3)


@settings(max_examples=examples(100))
@given(CHANGES)
def test_junk_anywhere_is_a_problem_or_nothing(changes: list[tuple[int, Any]]) -> None:
    """A configuration is given exactly when no problem is an error, lenient or not."""
    check_changed(NATIVE, changes)


def check_changed(base: dict[str, Any], changes: list[tuple[int, Any]]) -> None:
    """Check the configuration with junk in some of its places."""
    raw = copy.deepcopy(base)
    for number, value in changes:
        found = list(places(raw))
        container, key = found[number % len(found)]
        container[key] = value
    for lenient in (False, True):
        config, problems = check_config(raw, env={}, lenient=lenient)
        assert (config is None) == any(problem.severity == "error" for problem in problems)


@settings(max_examples=examples(150))
@given(st.integers(0, len(PLANTED)), st.integers(0, 40), st.text(max_size=4))
def test_cut_or_torn_text(at: int, length: int, inserted: str) -> None:
    """An edit in the middle of a file never crashes the check."""
    config, problems = check_config(PLANTED[:at] + inserted + PLANTED[at + length :], env={})
    assert config is None
    assert problems
