"""The proxy's own answer where no engine gave one names the engine, and nothing that a client must not learn."""

from __future__ import annotations

from tests.support.proxy import chat, running_proxy


async def test_it_names_the_engine_and_how_many_are_down() -> None:
    """Ids alone: no address, no credential."""
    endpoints = [{"id": name, "url": "http://127.0.0.1:1", "api_key": "s3cret"} for name in ("p1", "p2")]
    async with running_proxy(endpoints=endpoints, health={"active": False, "eject_after": 1}) as running:
        answer = await running.client.post("/v1/chat/completions", json=chat())
        error = answer.json()["error"]
        last = answer.headers["x-kvproxy-endpoint"]
        assert (answer.status_code, error["code"]) == (502, "connect_error")
        assert last in ("p1", "p2")
        assert error["message"] == f"No engine answered: {last} connection refused (1 of 2 down)."
        assert "127.0.0.1" not in answer.text
        assert "s3cret" not in answer.text
