"""A proxy with the kvcache filter, and conversations through it."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvproxy.base.types import EndpointId
from kvproxy.cache.service import KvCache
from kvproxy.cache.store import Prefix
from kvproxy.features.lmcache.controller import LMCacheController
from tests.support.decision import decided, predicted_at
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until, until_says


@dataclass(frozen=True)
class Asked:
    """One answer: which engine served, why, what was predicted there, and what the engine says it reused."""

    endpoint: str
    reason: str
    predicted: int
    source: str
    prompt_tokens: int
    cached_tokens: int
    text: str


def with_kvcache(**settings: Any) -> list[Any]:
    """Return a filter chain whose kvcache has these settings."""
    return ["inference_request", {"kvcache": settings} if settings else "kvcache", "router"]


@contextlib.asynccontextmanager
async def following(url: str, *, events: bool) -> AsyncIterator[tuple[RunningProxy, KvCache]]:
    """Yield a proxy over the engine `a`, which it follows by its events or not; its metrics are read when a test says
    so."""
    settings = {"engine_metrics_interval": 0, "lookup_routing_timeout": "5s"}  # two busy cores do not keep 50 ms
    chain = ["request_id", *with_kvcache(kv_events=events, **settings)]
    async with running_proxy({"a": url}, policy="kv_aware", filters=chain) as proxy:
        service = proxy.proxy.kvcache
        assert service is not None
        if events:
            await until(lambda: set(service.overlap.indexes["default"].exact) == {EndpointId("a")}, within_s=20)
        yield proxy, service


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Asked:
    """Send a chat or a prompt through the proxy and read the decision beside the engine's own account."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    answer = await client.post(path, json=body, headers={"x-kvproxy-debug": "1"}, timeout=60)
    assert answer.status_code == 200, answer.text
    predicted, source = predicted_at(answer.headers)
    document = answer.json()
    usage, [choice] = document["usage"], document["choices"]
    return Asked(
        answer.headers["x-kvproxy-endpoint"],
        decided(answer.headers)["reason"],
        predicted,
        source,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        choice["message"]["content"] if "message" in choice else choice["text"],
    )


async def chat_tokens(server_url: str, body: dict[str, Any]) -> list[int]:
    """Return the prompt's tokens as the engine at `server_url` sees them."""
    async with httpx.AsyncClient() as http:
        asked = {name: body[name] for name in ("model", "messages")}
        tokens: list[int] = (await http.post(f"{server_url}/tokenize", json=asked)).json()["tokens"]
        return tokens


async def found(directory: LMCacheController, tokens: Sequence[int], wanted: dict[str, int]) -> None:
    """Return once a lookup names exactly these instances with these tokens; engines report in batches of 10 ms."""

    async def ask() -> dict[str, int]:
        return {holder.instance_id: holder.tokens for holder in await directory.lookup(Prefix(array("I", tokens), ""))}

    await until_says(wanted, ask)
