"""The real LMCache controller with two real engines: which holds what, pins, clears, and what it cannot do."""

from __future__ import annotations

import asyncio
import random
from array import array

import httpx
import pytest

from kvproxy.base.errors import ClientError, NotSupported, UnknownInstance
from kvproxy.cache.store import ActionKind, Prefix
from kvproxy.features.lmcache.controller import CHUNK_TOKENS, LMCacheController
from kvproxy.features.lmcache.provider import Effect
from kvproxy.features.lmcache.settings import StrategySettings
from tests.real.conftest import Saw
from tests.real.controller.conftest import Lmcache
from tests.real.kvcache import found

pytestmark = pytest.mark.real


def prompt(chunks: int, *, seed: str) -> array[int]:
    """Token ids of so many whole chunks and half of one."""
    rng = random.Random(seed)
    return array("I", [rng.randrange(151_000) for _ in range(chunks * CHUNK_TOKENS + CHUNK_TOKENS // 2)])


async def test_lookup_tells_two_instances_apart(
    lmcache_services: Lmcache, directory: LMCacheController, saw: Saw
) -> None:
    """Different prompts stored by different engines, each found where it is; no engine has a third."""
    here, there, nowhere = (prompt(chunks, seed=f"apart {chunks}") for chunks in (4, 3, 2))
    assert lmcache_services.workers["a"].store(here) == 4 * CHUNK_TOKENS
    assert lmcache_services.workers["b"].store(there) == 3 * CHUNK_TOKENS
    await found(directory, here, {"a": 1024})
    await found(directory, there, {"b": 768})
    await found(directory, nowhere, {})
    await found(directory, here[: CHUNK_TOKENS - 1], {})
    saw("lookup: first prompt {a: 1024}, second {b: 768}, unknown prompt {}, shorter than a chunk {}")


async def test_the_instances_are_known(directory: LMCacheController, saw: Saw) -> None:
    """Instances and index size, as kvproxy's readiness checks read them."""
    assert await directory.instances() == {"a", "b"}
    saw(f"instances a and b known, {await directory.indexed_chunks()} chunks in the index")


async def test_a_pin_outlives_a_clear(lmcache_services: Lmcache, directory: LMCacheController, saw: Saw) -> None:
    """A pin takes effect on the held chunks, survives a real clear, and what was not pinned is gone."""
    worker = lmcache_services.workers["a"]
    pinned, loose = prompt(2, seed="pinned"), prompt(3, seed="loose")
    worker.store(pinned)
    worker.store(loose)
    await found(directory, loose, {"a": 768})
    pin = await directory.act(ActionKind.PIN, "a", Prefix(pinned, ""))
    cleared = await directory.act(ActionKind.CLEAR, "a", Prefix(loose, ""))
    assert pin.amount == 2 * CHUNK_TOKENS
    assert cleared.amount is not None
    assert cleared.amount >= 3 * CHUNK_TOKENS
    await found(directory, pinned, {"a": 512})
    await found(directory, loose, {})
    assert (worker.holds(pinned), worker.holds(loose)) == (512, 0)
    saw(f"pin: {pin.amount} tokens; clear: {cleared.amount} tokens gone; the pinned prompt is still there")


async def test_no_effect_is_no_success(lmcache_services: Lmcache, directory: LMCacheController, saw: Saw) -> None:
    """A pin of what is not there, or in a wrong place, answers 200 and does nothing: `num_tokens` says so."""
    absent = Prefix(prompt(2, seed="absent"), "")
    assert await directory.act(ActionKind.PIN, "a", absent) == Effect(0)
    async with httpx.AsyncClient() as http:
        places = StrategySettings(pin_location="lmcache")
        elsewhere = LMCacheController(http, lmcache_services.url, places=places)
        assert await elsewhere.act(ActionKind.PIN, "a", Prefix(prompt(2, seed="pinned"), "")) == Effect(0)
    with pytest.raises(UnknownInstance):
        await directory.act(ActionKind.PIN, "nobody", absent)
    saw("pin of an absent prompt: 0 tokens; in a wrong place: 0 tokens; at an unknown instance: refused as such")


async def test_compression_of_an_unknown_model_is_refused(
    lmcache_services: Lmcache, directory: LMCacheController, saw: Saw
) -> None:
    """CacheGen knows five models; for others it is not supported."""
    tokens = prompt(2, seed="compress")
    lmcache_services.workers["b"].store(tokens)
    await found(directory, tokens, {"b": 512})
    with pytest.raises(NotSupported) as refused:
        await directory.act(ActionKind.COMPRESS, "b", Prefix(tokens, ""))
    assert lmcache_services.workers["b"].holds(tokens) == 512
    saw(f"compress: {refused.value}; nothing lost")


async def test_there_is_no_evict(directory: LMCacheController, saw: Saw) -> None:
    """The route is missing; the client learns it with the first call and asks no second time."""
    assert directory.evicts is None
    with pytest.raises(NotSupported) as first:
        await directory.act(ActionKind.EVICT, "a", Prefix(prompt(1, seed="evict"), ""))
    assert directory.evicts is False
    with pytest.raises(NotSupported, match="not offered"):
        await directory.act(ActionKind.EVICT, "a", Prefix(prompt(1, seed="evict"), ""))
    saw(f"evict: {first.value}; known as absent from then on")


async def test_actions_on_one_instance_do_not_break_each_other(
    lmcache_services: Lmcache, directory: LMCacheController, saw: Saw
) -> None:
    """The controller breaks parallel calls to one worker; the client lines them up, so that all of eight succeed."""
    tokens = prompt(2, seed="parallel")
    lmcache_services.workers["b"].store(tokens)
    await found(directory, tokens, {"b": 512})
    calls = (directory.act(ActionKind.PIN, "b", Prefix(tokens, "")) for _ in range(8))
    results = await asyncio.gather(*calls, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    assert not failed, f"not one {ClientError.__name__}"
    saw("eight pins at once on one instance: eight successes")
