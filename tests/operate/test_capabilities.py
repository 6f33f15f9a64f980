"""Capabilities that are on, and why, in the check of a file, in the terminal and on the admin listener."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from kvproxy.operate.admin.app import build_admin_app
from kvproxy.operate.capabilities import SeenEngines, format_capabilities, list_capabilities, list_gains
from kvproxy.operate.commands.configuration import check_file
from kvproxy.operate.commands.status import render_page
from kvproxy.operate.config.load import load_config
from kvproxy.operate.runtime.history import History
from tests.operate.admin.support import admin_of, proxy_of

URLS = ["http://127.0.0.1:9", "http://127.0.0.1:10"]
SEEN = SeenEngines(4, ranks=2)
NO_RANKS = SeenEngines(4, ranks=0)


def kvcache(**settings: Any) -> dict[str, Any]:
    return {"filters": ["inference_request", {"kvcache": settings}, "router"]}


@pytest.mark.parametrize(
    ("config", "seen", "name", "state", "reason"),
    [
        ({}, None, "router queue", "on", "auto: with kv_aware"),
        ({"policy": "random"}, None, "router queue", "off", "auto: only with kv_aware, not random"),
        ({"queue": {}}, None, "router queue", "on", "`queue`"),
        ({"queue": {"enabled": False}}, None, "router queue", "off", "`queue.enabled: false`"),
        ({}, None, "data-parallel ranks", "on", "where an engine has several"),
        ({}, SEEN, "data-parallel ranks", "on", "2 of 4 endpoints are ranks"),
        ({}, NO_RANKS, "data-parallel ranks", "off", "no engine shows several"),
        ({"data_parallel": {"steer": False}}, SEEN, "data-parallel ranks", "off", "`data_parallel.steer: false`"),
        (kvcache(kv_events=False), None, "tokenizer", "off", "neither KV events nor LMCache"),
        (kvcache(enabled=False), None, "LMCache", "off", "the kvcache filter is not in use"),
        (kvcache(lmcache_endpoint="http://127.0.0.1:11"), None, "LMCache", "on", "`lmcache_endpoint`"),
    ],
)
def test_each_is_on_or_off_for_a_reason(
    config: dict[str, Any], seen: SeenEngines | None, name: str, state: str, reason: str
) -> None:
    """By the file alone, and by what a running proxy has found out."""
    rows = {one.name: one for one in list_capabilities(load_config({"endpoints": URLS, **config}), seen)}
    assert (rows[name].state, rows[name].reason) == (state, reason)


def test_several_clusters_have_a_queue_each() -> None:
    clusters = {
        name: {"endpoints": URLS[:1], "policy": policy} for name, policy in (("a", "kv_aware"), ("b", "random"))
    }
    routes = [{"model": name, "cluster": name} for name in clusters]
    rows = list_capabilities(load_config({"clusters": clusters, "routes": routes}))
    assert [(one.name, one.state) for one in rows[:2]] == [("a: router queue", "on"), ("b: router queue", "off")]


def test_lines_are_a_table() -> None:
    rows = [{"name": "queue", "state": "on", "reason": "why"}, {"name": "a", "state": "off", "reason": "not"}]
    assert format_capabilities(rows) == ["queue  on   why", "a      off  not"]


async def test_terminal_and_listener_show_the_same() -> None:
    """Counted of the running proxy: no engine was found to have ranks."""
    proxy = proxy_of(policy="kv_aware")
    proxy.admin = build_admin_app(proxy, History(proxy))
    async with admin_of(proxy) as client:
        live = (await client.get("/live")).json()
    (ranks,) = [one for one in live["capabilities"] if one["name"] == "data-parallel ranks"]
    assert (ranks["state"], ranks["reason"]) == ("off", "no engine shows several")
    assert set(format_capabilities(live["capabilities"])) <= set(render_page(live).splitlines())


def test_a_good_file_is_followed_by_what_is_on(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("endpoints: [http://127.0.0.1:9]\n")
    out = io.StringIO()
    assert check_file(str(file), lenient=False, out=out) == 0
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "router queue on auto: with kv_aware" in lines


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, ["engine priority", "snapshot", "resumed streams"]),
        ({"queue": {"enabled": False}}, ["router queue", "engine priority", "snapshot", "resumed streams"]),
        (
            {
                "engine_priority": "auto",
                "routes": [{"resume": "exact"}],
                "filters": {"kvcache": {"snapshot": {"path": "/tmp/x"}}},
            },
            [],
        ),
    ],
)
def test_helpful_features_that_are_off_are_named_with_their_setting(config: dict[str, Any], named: list[str]) -> None:
    """`kvproxy init` and `kvproxy doctor` print it; of what needs further software nothing is advised."""
    lines = list_gains(load_config({"endpoints": {"a": URLS[0]}, **config}))
    assert lines[:1] == (["not on, but would help:"] if named else [])
    assert {line.strip().partition(":")[0] for line in lines[1:]} == set(named)
