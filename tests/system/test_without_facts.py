"""Requests of which nothing is known before the pick teach no speed and save no prefill, over sockets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve
from tests.support.proxy import chat, running_proxy


@pytest.mark.parametrize(("enabled", "learns"), [(True, True), (False, False)])
async def test_speeds_are_learned_from_known_prompts_alone(enabled: bool, learns: bool) -> None:
    """With the kvcache filter off a prompt would count as one without tokens that took seconds."""
    kvcache: dict[str, Any] = {"enabled": enabled, "engine_metrics_interval": 0}
    filters = ["inference_request", {"kvcache": kvcache}, "router"]
    async with (
        serve(FakeEngine("a")) as url,
        running_proxy({"a": url}, policy="kv_aware", filters=filters) as proxy,
    ):
        for number in range(3):
            answer = await proxy.client.post("/v1/chat/completions", json=chat(f"{number} hello " * 200, stream=True))
            assert answer.status_code == 200
        speeds = proxy.proxy.clusters["default"].speeds
        assert speeds is not None
        assert bool(speeds.estimates(proxy.proxy.clock()).samples) is learns
        assert speeds.learning is not learns
