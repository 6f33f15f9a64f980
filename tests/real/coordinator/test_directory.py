"""LMCache's coordinator: exact holders of every chunk, and requests that follow them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from kvproxy.cache.store import ActionKind, Prefix
from kvproxy.features.lmcache.coordinator import LMCacheCoordinator
from tests.real.conftest import Saw
from tests.real.engines.lmcache import Coordinator
from tests.real.engines.place import TINY
from tests.real.kvcache import ask, chat_tokens, with_kvcache
from tests.real.pair import Pair
from tests.real.prompts import chat, text
from tests.support.proxy import running_proxy
from tests.support.until import until_says

pytestmark = pytest.mark.real

#: The directory knows vLLM's `--model`, not the name it serves it under.
MODEL = str(TINY.folder)
CHUNK_TOKENS = 256


async def asked_directly(url: str, body: dict[str, Any]) -> int:
    """Ask the engine past any proxy; returns the cached tokens by its account."""
    async with httpx.AsyncClient(timeout=60) as http:
        usage = (await http.post(f"{url}/v1/chat/completions", json=body)).json()["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached


async def held(directory: LMCacheCoordinator, tokens: list[int], wanted: Mapping[str, int]) -> None:
    """Return once the directory has these tokens; the servers report within a second or two."""

    async def ask() -> Mapping[str, int]:
        found = await directory.lookup(Prefix(array("I", tokens), MODEL))
        return {one.instance_id: one.tokens for one in found}

    await until_says(wanted, ask)


async def test_all_holders_are_known(pair: Pair, directory: LMCacheCoordinator, saw: Saw) -> None:
    """One prompt computed by one engine, a longer one begun like it by the other: each instance's exact prefix."""
    words = text(500, seed="shared beginning")
    short, long = (chat(TINY.name, words[:size]) for size in (1800, len(words)))
    tokens = await chat_tokens(pair.a.url, long)
    common = len(await chat_tokens(pair.a.url, short)) // CHUNK_TOKENS * CHUNK_TOKENS
    whole = len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
    assert 0 < common < whole
    await asked_directly(pair.a.url, long)
    await held(directory, tokens, {"mp-a": whole})
    await asked_directly(pair.b.url, short)
    await held(directory, tokens, {"mp-a": whole, "mp-b": common})
    instances = {one.instance_id for one in await directory.list_instances()}
    assert instances == {"mp-a", "mp-b"}
    saw(f"{len(tokens)} tokens: mp-a holds {whole}, mp-b {common} of them, both known at once")


async def test_a_request_follows_the_directory(
    pair: Pair, endpoints: list[dict[str, Any]], coordinator: Coordinator, directory: LMCacheCoordinator, saw: Saw
) -> None:
    """Prompts only one instance has, in LMCache and not in the engine any more: the request goes there and hits."""
    settings = {
        "lmcache_endpoint": coordinator.url,
        "directory_model": MODEL,
        "lookup_routing_timeout": "5s",  # two busy cores do not keep 50 ms
    }
    seen = []
    async with running_proxy(endpoints, filters=with_kvcache(**settings)) as proxy:
        for holder in ("b", "a", "b", "b"):
            body = chat(TINY.name, text(300, seed=f"directory {len(seen)}"))
            tokens = await chat_tokens(pair.a.url, body)
            await asked_directly(pair.urls[holder], body)
            await held(directory, tokens, {f"mp-{holder}": len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS})
            pair.forget()
            answer = await ask(proxy.client, body)
            assert (answer.endpoint, answer.source) == (holder, "lmcache_coordinator")
            assert answer.cached_tokens >= answer.predicted == len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
            seen.append(f"{holder}: predicted {answer.predicted}, cached {answer.cached_tokens}")
    saw("; ".join(seen))


async def test_a_prefix_is_evicted_at_one_instance(pair: Pair, directory: LMCacheCoordinator, saw: Saw) -> None:
    """`delete` drops one prompt at one instance and leaves the other's copy; a second one has no effect."""
    body = chat(TINY.name, text(300, seed="evict here"))
    tokens = await chat_tokens(pair.a.url, body)
    whole = len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
    for url in pair.urls.values():
        await asked_directly(url, body)
    await held(directory, tokens, {"mp-a": whole, "mp-b": whole})
    gone = await directory.act(ActionKind.EVICT, "mp-a", Prefix(array("I", tokens), MODEL))
    await held(directory, tokens, {"mp-b": whole})
    again = await directory.act(ActionKind.EVICT, "mp-a", Prefix(array("I", tokens), MODEL))
    assert gone.amount == whole // CHUNK_TOKENS
    assert again.amount == 0
    saw(f"evicted at mp-a: {gone.amount} chunks; mp-b still holds {whole} tokens")


async def test_memory_by_instance(pair: Pair, directory: LMCacheCoordinator, saw: Saw) -> None:
    """Every instance's use of its memory is told: the signal that eviction goes by."""
    body = chat(TINY.name, text(300, seed="memory"))
    await asked_directly(pair.a.url, body)
    await held(directory, tokens := await chat_tokens(pair.a.url, body), {"mp-a": len(tokens) // CHUNK_TOKENS * 256})
    usage = {one.instance_id: one.modules for one in (await directory.fetch_usage()).instances}
    assert set(usage) == {"mp-a", "mp-b"}
    assert usage["mp-a"][0].used_bytes > 0
    chunks = await directory.indexed_chunks()
    assert chunks > 0
    saw(f"mp-a uses {usage['mp-a'][0].used_bytes >> 10} KiB; {chunks} keys")
