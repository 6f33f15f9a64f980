"""The effective configuration without its secrets, and the log level."""

from __future__ import annotations

import logging

import pytest

from kvproxy.operate.admin.app import build_admin_app
from kvproxy.operate.admin.process import REDACTED, redact_secrets
from kvproxy.operate.runtime.history import History
from tests.operate.admin.support import admin_of, audited, problems_of, proxy_of


async def test_the_configuration_is_shown_without_secrets() -> None:
    """Defaults included; tokens and keys never, wherever they stand."""
    proxy = proxy_of(
        endpoints=[{"id": "a", "url": "http://127.0.0.1:9", "api_key": "sesame1"}],
        admin={"token": "sesame2"},
        filters={"auth": {"keys": [{"name": "alice", "key": "sesame3"}]}},
    )
    async with admin_of(proxy, authorization="Bearer sesame2") as client:
        answer = await client.get("/config")
    assert "sesame" not in answer.text
    config = answer.json()
    assert config["clusters"]["default"]["endpoints"][0]["api_key"] == REDACTED
    assert config["filters"][2]["settings"]["keys"][0]["name"] == "alice"
    assert config["limits"]["body_timeout"] == 60.0


def test_plain_settings_are_redacted_by_name() -> None:
    """Settings of other people's filters have no types; what is called like a secret is one, counts are none."""
    data = {"api_key": "x", "nested": [{"Password": "y", "max_keys": 3}], "tokens": ["z", 1], "token": "", "url": "u"}
    assert redact_secrets(data) == {
        "api_key": REDACTED,
        "nested": [{"Password": REDACTED, "max_keys": 3}],
        "tokens": [REDACTED, 1],
        "token": "",
        "url": "u",
    }


async def test_the_log_level_is_changed() -> None:
    """Python's level is set, and the change is written down."""
    proxy = proxy_of()
    levels: list[str] = []
    proxy.admin = build_admin_app(proxy, History(proxy), set_level=levels.append)
    with audited() as lines:
        async with admin_of(proxy) as client:
            assert (await client.get("/log")).json()["level"] in ("debug", "info", "warning", "error")
            assert (await client.patch("/log", json={"level": "debug"})).status_code == 200
    assert levels == ["DEBUG"]
    assert (lines[0]["action"], lines[0]["after"]) == ("log.level", "debug")


async def test_the_process_really_follows() -> None:
    """The root logger, which everything logs through."""
    root = logging.getLogger()
    before = root.level
    try:
        async with admin_of(proxy_of()) as client:
            assert (await client.patch("/log", json={"level": "error"})).json() == {"level": "error"}
        assert root.level == logging.ERROR
        assert logging.getLogger("kvproxy.audit").isEnabledFor(logging.INFO)  # changes are written down all the same
    finally:
        root.setLevel(before)


@pytest.mark.parametrize("level", ["loud", "DEBUG", 10, None])
async def test_only_levels_there_are(level: object) -> None:
    """With the list of them."""
    async with admin_of(proxy_of()) as client:
        answer = await client.patch("/log", json={"level": level, "levle": 1})
    assert answer.status_code == 422
    assert problems_of(answer)["level"][1] == "allowed: debug, info, warning, error"
    assert problems_of(answer)["levle"][1] == "did you mean 'level'?"
