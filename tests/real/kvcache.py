"""A proxy with the kvcache filter, and conversations through it."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvproxy.clients.lmcache.controller import LMCacheControllerClient

_MATCHED = re.compile(r"(\w+):(\d+)/(\w+)")


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
    """A filter chain whose kvcache has these settings."""
    return ["inference_request", {"kvcache": settings} if settings else "kvcache", "router"]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Asked:
    """Sends a chat through the proxy and reads the decision beside the engine's own account."""
    answer = await client.post("/v1/chat/completions", json=body, headers={"x-kvproxy-debug": "1"}, timeout=60)
    assert answer.status_code == 200, answer.text
    endpoint = answer.headers["x-kvproxy-endpoint"]
    decision = dict(part.split("=", 1) for part in answer.headers["x-kvproxy-decision"].split("; "))
    matched = {name: (int(tokens), source) for name, tokens, source in _MATCHED.findall(decision.get("matched", ""))}
    predicted, source = matched.get(endpoint, (0, ""))
    document = answer.json()
    usage = document["usage"]
    return Asked(
        endpoint,
        decision["reason"],
        predicted,
        source,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        document["choices"][0]["message"]["content"],
    )


async def chat_tokens(server_url: str, body: dict[str, Any]) -> list[int]:
    """The prompt's tokens as the engine at `server_url` sees them."""
    async with httpx.AsyncClient() as http:
        asked = {name: body[name] for name in ("model", "messages")}
        tokens: list[int] = (await http.post(f"{server_url}/tokenize", json=asked)).json()["tokens"]
        return tokens


async def found(directory: LMCacheControllerClient, tokens: Sequence[int], wanted: dict[str, int]) -> None:
    """Returns once a lookup names exactly these instances with these tokens; engines report in batches of 10 ms."""
    seen: dict[str, int] = {}
    for _ in range(200):
        seen = {holder.instance_id: holder.matched_tokens for holder in await directory.lookup(array("I", tokens))}
        if seen == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"lookup says {seen}, not {wanted}")
