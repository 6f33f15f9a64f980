"""Endpoints that sources name, in a whole proxy."""

from __future__ import annotations

from pathlib import Path

import httpx

from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config


async def test_the_proxys_own_address_is_left_out_and_shown(tmp_path: Path) -> None:
    """Its requests would come back to it; the live page names it."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("a: http://127.0.0.1:1\nself: http://127.0.0.1:8123\nadmin: http://localhost:8124\n")
    config = load_config(
        {
            "clusters": {"default": {"discovery": {"file": {"path": str(file)}}, "health": {"active": False}}},
            "listen": ":8123",
            "admin": "127.0.0.1:8124",
        }
    )
    async with Proxy(config) as proxy:
        cluster = proxy.clusters["default"]
        assert [one.id for one in cluster.endpoints] == ["a"]
        assert [one.name for one in cluster.poller.left_out["file"]] == ["self", "admin"]
        transport = httpx.ASGITransport(proxy.admin)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as admin:
            state = (await admin.get("/live")).text
        assert "the file discovery names 2 that cannot be an endpoint: self: this is the proxy's own address" in state
