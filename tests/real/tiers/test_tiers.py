"""Where a prompt is, tier by tier: the directory, what the proxy predicts and what the engine reuses; and transfers."""

from __future__ import annotations

import asyncio
import random
from array import array
from functools import partial
from typing import Any

import httpx
import pytest

from kvproxy.base.errors import ClientError, UnknownInstance
from kvproxy.base.types import Tier
from kvproxy.cache.store import ActionKind, Prefix
from kvproxy.cluster.routing.onboarding import TIER_WEIGHTS
from kvproxy.features.lmcache.coordinator import LMCacheCoordinator, Prefetch
from kvproxy.features.lmcache.provider import Effect
from tests.real.conftest import Saw
from tests.real.engines.place import MID
from tests.real.kvcache import ask, chat_tokens, with_kvcache
from tests.real.prompts import chat, text
from tests.real.tiers.conftest import Tiers
from tests.support.decision import decided
from tests.support.proxy import running_proxy
from tests.support.until import until_says

pytestmark = pytest.mark.real

#: The directory knows vLLM's `--model`, not the name it serves it under.
MODEL = str(MID.folder)
CHUNK = 256

Places = set[tuple[str, str]]


def whole_chunks(tokens: list[int] | array[int]) -> int:
    return len(tokens) // CHUNK * CHUNK


async def places(tiers: Tiers, tokens: list[int]) -> list[Places]:
    """Instance and tier of every placement, chunk by chunk, as the directory has them."""
    body = {"model_name": MODEL, "world_size": 1, "token_ids": tokens}
    async with httpx.AsyncClient() as http:
        answer = (await http.post(f"{tiers.coordinator.url}/directory/lookup", json=body)).json()
    return [{(one["instance_id"], one["tier"]) for one in result["placements"]} for result in answer["results"]]


async def until_placed(tiers: Tiers, tokens: list[int], wanted: Places) -> None:
    """Return once every chunk is in these places and no other; the servers report within a second or two."""
    await until_says([wanted] * (len(tokens) // CHUNK), partial(places, tiers, tokens))


async def asked(url: str, tokens: list[int]) -> int:
    """Send a prompt past any proxy; returns the reused tokens by the engine's account."""
    body = {"model": MID.name, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    async with httpx.AsyncClient(timeout=120) as http:
        usage = (await http.post(f"{url}/v1/completions", json=body)).json()["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached


async def drop_memory(tiers: Tiers, directory: LMCacheCoordinator, tokens: list[int], *instances: str) -> None:
    """Drop the prompt from the memory of these servers, and both engines' own."""
    for name in instances:
        await directory.act(ActionKind.EVICT, name, Prefix(array("I", tokens), MODEL))
    await forget(tiers)


async def forget(tiers: Tiers) -> None:
    """Both engines' own caches are emptied, and their streams say so: events leave with an engine's next step."""
    tiers.pair.forget()
    for url in tiers.pair.urls.values():
        await asked(url, prompt(64, f"a step {random.random()}"))


def prompt(count: int, seed: str) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 30_000) for _ in range(count)]


async def test_every_tier_is_predicted_as_it_is_reused(tiers: Tiers, directory: LMCacheCoordinator, saw: Saw) -> None:
    """Unknown, in the engine, in its server's memory, on the disk alone, and there asked at the other engine."""
    body = chat(MID.name, text(600, seed="walk"))
    tokens = await chat_tokens(tiers.pair.a.url, body)
    chunks, seen = whole_chunks(tokens), []
    async with (
        running_proxy(tiers.endpoints[:1], filters=with_kvcache(**tiers.kvcache)) as proxy,
        running_proxy(tiers.endpoints[1:], filters=with_kvcache(**tiers.kvcache)) as other,
    ):

        async def walk(state: str, through: Any, least: int) -> None:
            answer = await ask(through.client, body)
            seen.append(f"{state}: predicted {answer.predicted} ({answer.source}), reused {answer.cached_tokens}")
            assert least <= answer.cached_tokens <= answer.predicted + 32, seen
            assert answer.predicted <= answer.cached_tokens + 32, seen

        await walk("unknown", proxy, 0)
        await until_placed(tiers, tokens, {("mp-a", "l1"), ("mp-a", "l2")})
        await walk("in the engine", proxy, len(tokens) - 33)
        await forget(tiers)
        await walk("in its server's memory", proxy, chunks)
        await drop_memory(tiers, directory, tokens, "mp-a")
        await until_placed(tiers, tokens, {("mp-a", "l2")})
        await walk("on the disk", proxy, chunks)
        await walk("on the disk, at the other engine", other, chunks)
    saw(f"{len(tokens)} tokens, {chunks} in whole chunks; " + "; ".join(seen))


@pytest.mark.parametrize(
    ("known", "wanted", "found"),
    [(3000, 3000, 2816), (0, 1024, 0), (1536, 3072, 1536), (1024, 200, 0)],
    ids=["whole", "absent", "half", "short"],
)
async def test_a_transfer_says_what_it_found(
    tiers: Tiers, directory: LMCacheCoordinator, saw: Saw, known: int, wanted: int, found: int
) -> None:
    """Into the other server's memory; what was found is there afterwards, and its engine reuses that."""
    tokens = prompt(wanted, f"transfer {known} {wanted}")
    if known:
        stored = tokens[:known] if known <= wanted else prompt(known, f"transfer {known} {wanted}")
        await asked(tiers.pair.a.url, stored)
        await until_placed(tiers, stored, {("mp-a", "l1"), ("mp-a", "l2")})
    loop = asyncio.get_running_loop()
    began = loop.time()
    effect = await directory.act(ActionKind.TRANSFER, "mp-b", Prefix(array("I", tokens), MODEL))
    took_ms = 1000 * (loop.time() - began)
    assert effect == Effect(found)
    if found:
        await until_placed(tiers, tokens[:found], {("mp-a", "l1"), ("mp-a", "l2"), ("mp-b", "l1")})
        tiers.pair.forget()
        reused = await asked(tiers.pair.b.url, tokens)
        assert reused in (found, found - 1)  # one token is always computed
        saw(f"{found} of {wanted} tokens in {took_ms:.0f} ms; b reuses {reused}")


async def test_a_transfer_into_nothing(directory: LMCacheCoordinator) -> None:
    with pytest.raises(UnknownInstance):
        await directory.act(ActionKind.TRANSFER, "mp-9", Prefix(array("I", prompt(1024, "nothing")), MODEL))


async def test_a_stale_placement_costs_once(tiers: Tiers, directory: LMCacheCoordinator, saw: Saw) -> None:
    """The files are gone and the directory does not know: a transfer finds nothing, a request is answered all the same,
    and what its engine denied is believed of no endpoint the next time."""
    assert tiers.shared is not None
    body = chat(MID.name, text(600, seed="stale"))
    tokens = await chat_tokens(tiers.pair.a.url, body)
    async with httpx.AsyncClient(timeout=120) as http:
        await http.post(f"{tiers.pair.a.url}/v1/chat/completions", json=body)
    await until_placed(tiers, tokens, {("mp-a", "l1"), ("mp-a", "l2")})
    for path in tiers.shared.rglob("*.data"):
        path.unlink()
    await drop_memory(tiers, directory, tokens, "mp-a")
    await until_placed(tiers, tokens, {("mp-a", "l2")})
    assert await directory.act(ActionKind.TRANSFER, "mp-b", Prefix(array("I", tokens), MODEL)) == Effect(0)
    settings = with_kvcache(**{**tiers.kvcache, "kv_events": False})
    async with running_proxy(tiers.endpoints, filters=settings, policy="kv_aware") as proxy:
        wrong = await ask(proxy.client, body)
        debug = {"x-kvproxy-debug": "1"}
        answer = await proxy.client.post("/v1/chat/completions", json=body, headers=debug, timeout=60)
        matched = decided(answer.headers)["matched"]
    saw(f"predicted {wrong.predicted} ({wrong.source}), reused {wrong.cached_tokens}; then {matched}")
    assert (wrong.predicted, wrong.source) == (whole_chunks(tokens), "lmcache_coordinator")
    assert wrong.cached_tokens < CHUNK
    assert [name for name in "ab" if f"{name}:" in matched] == [wrong.endpoint]  # which has computed it since


async def left_on_disk(tiers: Tiers, directory: LMCacheCoordinator, body: dict[str, Any]) -> list[int]:
    """Return the tokens of a prompt that a computed and that nothing but the shared disk holds."""
    tokens = await chat_tokens(tiers.pair.a.url, body)
    async with httpx.AsyncClient(timeout=120) as http:
        await http.post(f"{tiers.pair.a.url}/v1/chat/completions", json=body)
    await until_placed(tiers, tokens, {("mp-a", "l1"), ("mp-a", "l2")})
    await drop_memory(tiers, directory, tokens, "mp-a")
    await until_placed(tiers, tokens, {("mp-a", "l2")})
    return tokens


async def test_a_request_waits_for_its_copy(tiers: Tiers, directory: LMCacheCoordinator, saw: Saw) -> None:
    """No engine is busy: the request has its place, and goes when the copy is in the memory of b's server. Unless
    a store is said to be dear, nothing is copied: b's engine reads it as cheaply as it reads memory."""
    long, cheap = (chat(MID.name, text(2500, seed=seed)) for seed in ("awaited", "not awaited"))
    tokens = await left_on_disk(tiers, directory, long)
    await left_on_disk(tiers, directory, cheap)
    transfers = {"on_demand": True, "max_wait": "10s", "min_tokens": 512}
    settings = with_kvcache(**tiers.kvcache, transfers=transfers)
    counts = []
    for weights, body in (({}, cheap), ({Tier.HOST: 1.0, Tier.SHARED: 0.0}, long)):
        async with running_proxy(tiers.endpoints[1:], filters=settings, policy="kv_aware", queue={}) as proxy:
            speeds = proxy.proxy.clusters["default"].speeds
            assert speeds is not None
            speeds.onboarding.weights = {**TIER_WEIGHTS, **weights}
            await ask(proxy.client, chat(MID.name, text(600, seed="another prompt, from which speeds are learned")))
            speeds.seconds = (0.0, 0.01, 0.0, 1.0)  # a copy saves more than `max_wait`, however busy this machine is
            answer = await ask(proxy.client, body)
            counts.append(proxy.metric("kvproxy_kvcache_transfers_on_demand_total", result="done"))
            waited_s = proxy.metric("kvproxy_kvcache_transfer_wait_seconds_sum")
    reused = f"reused {answer.cached_tokens} of {len(tokens)}"
    saw(f"waited {waited_s * 1000:.0f} ms, predicted {answer.predicted} ({answer.source}), {reused}")
    assert counts == [0, 1]
    await until_placed(tiers, tokens, {("mp-a", "l2"), ("mp-b", "l1")})
    assert answer.cached_tokens >= whole_chunks(tokens) - 1
    assert answer.predicted <= answer.cached_tokens + 32


class Killing(LMCacheCoordinator):
    """Its coordinator dies once it has taken a prefetch."""

    tiers: Tiers

    async def prefetch(self, instance_id: str, prefix: Prefix) -> Prefetch:
        taken = await super().prefetch(instance_id, prefix)
        self.tiers.coordinator.program.kill()
        return taken


async def test_a_coordinator_killed_in_the_middle_of_a_prefetch(tiers: Tiers, saw: Saw) -> None:
    """The transfer has failed, requests are answered and reuse what is there; a new coordinator is told of what is
    stored from then on."""
    tokens = prompt(4000, "killed")
    await asked(tiers.pair.a.url, tokens)
    await until_placed(tiers, tokens, {("mp-a", "l1"), ("mp-a", "l2")})
    async with httpx.AsyncClient() as http:
        client = Killing(http, tiers.coordinator.url)
        client.tiers = tiers
        with pytest.raises(ClientError) as failure:
            await client.act(ActionKind.TRANSFER, "mp-b", Prefix(array("I", tokens), MODEL))
        tiers.pair.forget()
        reused = await asked(tiers.pair.b.url, tokens)
        tiers.coordinator.program.start()
        tiers.coordinator.program.await_ready(within_s=120)
        await until_says(frozenset({"mp-a", "mp-b"}), client.instances)
    saw(f"{failure.value.reason}; b reuses {reused} of {len(tokens)} from the disk; both are registered again")
    assert reused >= whole_chunks(tokens) - 1
