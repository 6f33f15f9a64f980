"""LMCache dies while requests come in. Nothing here uses its services afterwards."""

from __future__ import annotations

import time

import pytest

from tests.real.conftest import Saw
from tests.real.controller.conftest import Lmcache
from tests.real.kvcache import ask, with_kvcache
from tests.real.pair import Pair
from tests.real.prompts import chat, text
from tests.support.proxy import running_proxy

pytestmark = pytest.mark.real


async def test_requests_go_on_when_the_controller_dies(pair: Pair, lmcache_services: Lmcache, saw: Saw) -> None:
    """kill -9 of the controller: every request is answered, and once the breaker is open none waits for it."""
    settings = {
        "lmcache_endpoint": lmcache_services.url,
        "lookup_routing_timeout": "1s",
        "circuit_breaker": {"failure_threshold": 3, "recovery_timeout": "60s"},
    }
    bodies = [chat(pair.model.name, text(300, seed=f"lmcache dies {n}")) for n in range(12)]
    async with running_proxy(pair.urls, filters=with_kvcache(**settings)) as proxy:
        for body in bodies[:3]:
            await ask(proxy.client, body)
        before = proxy.metric("kvproxy_kvcache_lookups_total", outcome="miss")
        lmcache_services.controller.program.kill()
        for body in bodies[3:9]:
            await ask(proxy.client, body)
        errors = proxy.metric("kvproxy_kvcache_lookups_total", outcome="error")
        started = time.monotonic()
        for body in bodies[9:]:
            await ask(proxy.client, body)
        took_s = time.monotonic() - started
        unasked = proxy.metric("kvproxy_kvcache_lookups_total", outcome="breaker_open")
    assert before > 0
    assert errors == 3
    assert unasked == 6
    saw(f"controller killed: 3 lookups failed, then the breaker was open for 6; 3 requests took {took_s * 1000:.0f} ms")
