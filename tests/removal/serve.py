"""Import every module, check config.yaml, and serve a few turns that pin, if strategies are there; run within a tree
that lacks features."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import time
from contextlib import AsyncExitStack
from random import Random

import httpx

import kvproxy
from kvproxy.app import Proxy
from kvproxy.cli import main
from kvproxy.features import SHIPPED
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings, clone_engines
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server

_PINS = {"enable_pinning": True, "hot_content_threshold": 1, "pin_lease": "300s"}
_PINNING = "lmcache" in SHIPPED
_WITHIN_S = 30.0
#: Turns of a session at least.
_TURNS = 4


async def _serve() -> None:
    engine = VllmSettings(model="sim", engine=EngineSettings(1024, 16, token_outputs=True))
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(FleetSettings(clone_engines(engine, 2)), rng=Random(1)))
        urls = {
            name: (await stack.enter_async_context(Server(app, drain_s=1.0))).url for name, app in fleet.engines.items()
        }
        assert fleet.controller is not None
        controller = await stack.enter_async_context(Server(fleet.controller, drain_s=1.0))
        kvcache = {"lmcache_endpoint": controller.url, "cache_strategy": _PINS} if _PINNING else {}
        filters = {"kvcache": kvcache}
        config = load_config({"endpoints": urls, "policy": "kv_aware", "filters": filters})
        proxy = await stack.enter_async_context(Proxy(config))
        public = await stack.enter_async_context(Server(proxy, drain_s=1.0))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=public.url, timeout=30))
        await _ask(client, proxy)


async def _ask(client: httpx.AsyncClient, proxy: Proxy) -> None:
    """Send turns of one session until one of its prompts is pinned, if the strategies are there."""
    messages = [{"role": "user", "content": "a long beginning " * 200}]
    until = time.monotonic() + _WITHIN_S
    served: set[str] = set()
    turns = 0
    while turns < _TURNS or (_PINNING and not _has_pinned(proxy)):
        turns += 1
        answer = await client.post("/v1/chat/completions", json={"model": "sim", "messages": messages, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        served.add(answer.headers["x-kvproxy-endpoint"])
        assert time.monotonic() < until, "nothing was pinned"
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    assert len(served) == 1, "a session went to two endpoints"


def _has_pinned(proxy: Proxy) -> bool:
    labels = {"action": "pin", "result": "done"}
    return bool(proxy.metrics.registry.get_sample_value("kvproxy_kvcache_actions_total", labels))


def _import_all() -> None:
    for module in pkgutil.walk_packages(kvproxy.__path__, "kvproxy."):
        if not module.name.endswith(("__main__", ".ray", ".litellm")):  # of packages that are not there
            importlib.import_module(module.name)


if __name__ == "__main__":
    _import_all()
    assert main(["check", "config.yaml"]) == 0
    asyncio.run(_serve())
