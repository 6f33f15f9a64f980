"""A lease by a pin of the real coordinator: the prompt stays on the disk through an eviction that takes all else."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest

from kvproxy.features.leases.leases import Leasing
from kvproxy.features.lmcache.coordinator import LMCacheCoordinator
from tests.real.conftest import Saw
from tests.real.engines.place import MID
from tests.real.kvcache import ask, chat_tokens, with_kvcache
from tests.real.prompts import chat, text
from tests.real.tiers.conftest import Tiers
from tests.real.tiers.test_tiers import drop_memory, until_placed, whole_chunks
from tests.support.proxy import running_proxy
from tests.support.until import until, until_says

pytestmark = pytest.mark.real

STORED = {("mp-a", "l1"), ("mp-a", "l2")}


async def on_disk(tiers: Tiers) -> int:
    """Chunks that the disk has, a file each. (The directory goes on naming them at one server where the other was told
    to delete them, which the coordinator draws.)"""
    return sum(1 for file in tiers.shared.rglob("*") if file.is_file())


async def pinned(tiers: Tiers) -> int:
    """Pinned chunks, by the coordinator."""
    async with httpx.AsyncClient() as http:
        total: int = (await http.get(f"{tiers.coordinator.url}/cache/pins")).json()["total"]
        return total


async def set_quota(tiers: Tiers, gb: float | None) -> None:
    """How much of the disk prompts without a salt may take; None: as much as there is."""
    async with httpx.AsyncClient() as http:
        url = f"{tiers.coordinator.url}/quota/_default"
        answer = await (http.delete(url) if gb is None else http.put(url, json={"limit_gb": gb, "tier": "l2"}))
        answer.raise_for_status()


async def test_a_prompt_under_lease_survives_the_eviction_of_the_disk(
    tiers: Tiers, directory: LMCacheCoordinator, saw: Saw
) -> None:
    """Promised, pinned, found again by the engine once its conversation goes on, and given back; a prompt that came
    before it without a lease is computed again."""
    leases = {"enabled": True, "min_tokens": 256}
    chain = with_kvcache(**tiers.kvcache, leases=leases)
    async with running_proxy(tiers.endpoints[:1], filters=chain, policy="kv_aware") as proxy:
        service = proxy.proxy.kvcache
        assert service is not None
        leasing = service.observers.by_feature["leases"]
        assert isinstance(leasing, Leasing)
        book = leasing.book
        words = {name: text(600, seed=f"lease {name}") for name in ("loose", "kept")}
        bodies: dict[str, dict[str, Any]] = {
            "loose": chat(MID.name, words["loose"]),
            "kept": chat(MID.name, words["kept"], prompt_cache_retention="in_memory"),
        }
        tokens = {name: await chat_tokens(tiers.pair.a.url, body) for name, body in bodies.items()}
        answers = {name: await ask(proxy.client, body) for name, body in bodies.items()}
        for each in tokens.values():
            await until_placed(tiers, each, STORED)
        await until(lambda: any(one.held for one in book.leases.values()), within_s=30)
        held = await pinned(tiers)
        await set_quota(tiers, 0.0)  # the coordinator deletes what is over it, every five seconds
        await until_says(held, partial(on_disk, tiers))
        await set_quota(tiers, None)
        for each in tokens.values():
            await drop_memory(tiers, directory, each, "mp-a")
        again = {}
        for name, body in bodies.items():
            turns = (words[name], answers[name].text, "and then?")
            again[name] = await ask(proxy.client, {**chat(MID.name, *turns), **{
                key: value for key, value in body.items() if key == "prompt_cache_retention"}})  # fmt: skip
        reused = ", ".join(f"{name} {one.cached_tokens} of {len(tokens[name])}" for name, one in again.items())
        saw(f"{held} chunks pinned; so many are on the disk after the eviction; next turns reuse {reused} tokens")
        assert held == len(tokens["kept"]) // 256
        assert again["kept"].cached_tokens >= whole_chunks(tokens["kept"]) - 1
        assert again["loose"].cached_tokens < 256
        assert proxy.metric("kvproxy_lease_results_total", result="kept") == 1
        await service.actions.jobs.settled()
    assert await pinned(tiers) == 0  # the lease of the second turn ends with the proxy
