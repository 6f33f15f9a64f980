"""Leases and the ledger on a real vLLM whose cache is small: what is touched is still there after pressure that evicts
all else, budgets refuse, and what is billed is what the engine counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.cache.service import KvCache
from kvproxy.features.ledger.ledger import LedgerReader
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import MID
from tests.real.engines.vllm import Vllm
from tests.real.kvcache import Asked, ask
from tests.real.pair import warm_up
from tests.real.prompts import chat, text
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real

#: Of 32 tokens each: 10,240 tokens.
BLOCKS = 320
#: Words of a prompt; some 2,200 tokens.
WORDS = 1000


@pytest.fixture(scope="module")
def server(saw: Saw) -> Iterator[Vllm]:
    needs_memory(gib=4)
    one = Vllm("leases", MID, core=0, blocks=BLOCKS)
    saw("starting a vLLM server with a small cache")
    with vllm.running([one]):
        warm_up(one)
        yield one


def chain(**leases: Any) -> list[Any]:
    """Leases by touching; its engine is read when a test says so."""
    settings = {"enabled": True, "touch": True, "min_tokens": 256, "endpoint_tokens": 100_000, **leases}
    return [
        "request_id",
        "inference_request",
        {"kvcache": {"engine_metrics_interval": 0, "leases": settings}},
        "router",
    ]


def held(words: str, *further: str) -> dict[str, Any]:
    """A chat whose client asks for its prompt to be kept."""
    return chat(MID.name, words, *further, max_tokens=4, prompt_cache_retention="in_memory")


def service_of(proxy: RunningProxy) -> KvCache:
    service = proxy.proxy.kvcache
    assert service is not None
    assert service.leasing is not None
    return service


def explain(proxy: RunningProxy) -> list[str]:
    """What was counted of leases and of the tokens that they need."""
    found = (one for metric in proxy.proxy.metrics.registry.collect() for one in metric.samples)
    return [
        f"{one.name}{one.labels} {one.value}"
        for one in found
        if one.value and ("lease" in one.name or "token" in one.name)
    ]


async def press(proxy: RunningProxy, prompts: int, *, seed: str) -> None:
    """Other prompts, one after the other and streamed, which is what speeds are learned from; between them the proxy
    has its turn, and what it began ends."""
    service = service_of(proxy)
    for number in range(prompts):
        body = chat(MID.name, text(WORDS, seed=f"{seed} {number}"), max_tokens=4)
        sent = await proxy.client.post("/v1/chat/completions", json={**body, "stream": True,
                                       "stream_options": {"include_usage": True}}, timeout=60)  # fmt: skip
        assert b"[DONE]" in sent.content
        await service.scraper.scrape_all()
        await service.actions.jobs.settled()


def go_on(first: str, answer: Asked) -> dict[str, Any]:
    """The next turn."""
    return held(first, answer.text, text(40, seed=f"next {answer.text}"))


async def test_a_touched_prompt_survives_what_evicts_others(server: Vllm, saw: Saw) -> None:
    """Promised, touched while twice what the engine's cache holds goes by, and verified on its return; one that came
    at the same time without a lease is gone."""
    short = chain(max_duration=20)  # for longer it would not be worth its touches: this model computes fast
    async with running_proxy({"a": server.url}, policy="kv_aware", filters=short) as proxy:
        service = service_of(proxy)
        await press(proxy, 6, seed="learn")
        kept, lost = text(WORDS, seed="kept"), text(WORDS, seed="lost")
        first = await ask(proxy.client, held(kept))
        other = await ask(proxy.client, chat(MID.name, lost, max_tokens=4))
        await until(lambda: not proxy.proxy.running)
        await service.actions.jobs.settled()
        assert service.leasing is not None
        assert len(service.leasing.book.leases) == 1, explain(proxy)
        await press(proxy, 10, seed="pressure")
        touches = proxy.metric("kvproxy_kvcache_actions_total", action="touch", result="done")
        again = await ask(proxy.client, go_on(kept, first))
        gone = await ask(proxy.client, chat(MID.name, lost, other.text, "and?", max_tokens=4))
        saw(
            f"{first.prompt_tokens} tokens promised, {touches:.0f} touches while 10 prompts of the same length came: "
            f"{again.cached_tokens} reused; without a lease {gone.cached_tokens} of {other.prompt_tokens}"
        )
        ended = sum(proxy.metric("kvproxy_lease_results_total", result=one) for one in ("expired", "too_late"))
        if ended:  # a machine too busy for it: then nothing is promised
            assert proxy.metric("kvproxy_lease_promised_tokens_total") == 0
            return
        assert touches > 0, explain(proxy)
        assert again.cached_tokens >= first.prompt_tokens - 32
        assert gone.cached_tokens < 64
        assert proxy.metric("kvproxy_lease_results_total", result="kept") == 1
        assert proxy.metric("kvproxy_lease_kept_ratio") == 1.0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"tenant_tokens": 3000}, "tenant_budget"), ({"endpoint_tokens": 3000}, "endpoint_budget"),
     ({"max_leases": 1}, "max_leases")],
)  # fmt: skip
async def test_budgets_refuse(server: Vllm, limits: dict[str, int], reason: str) -> None:
    """The first lease is granted, the next one would pass the bound; its request is answered all the same."""
    async with running_proxy({"a": server.url}, policy="kv_aware", filters=chain(**limits)) as proxy:
        service = service_of(proxy)
        await press(proxy, 2, seed=f"learn {reason}")
        for number in range(2):
            await ask(proxy.client, held(text(WORDS, seed=f"{reason} {number}")))
            await until(lambda: not proxy.proxy.running)
            await service.actions.jobs.settled()
        assert service.leasing is not None
        assert len(service.leasing.book.leases) == 1, explain(proxy)
        assert proxy.metric("kvproxy_lease_refusals_total", reason=reason) == 1


_SAMPLE = re.compile(r"^vllm:(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)


async def counters(server: Vllm) -> dict[str, float]:
    """The engine's own, by name."""
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"{server.url}/metrics", timeout=30)).text
    return {name: float(value) for name, value in _SAMPLE.findall(page) if name.endswith("_total")}


async def test_what_is_billed_is_what_the_engine_counted(server: Vllm, saw: Saw, tmp_path: Path) -> None:
    """Prompt, cached and generated tokens, over chats, completions and streams, some of them for the second time."""
    path = tmp_path / "ledger.jsonl"
    prices = [{"uncached": 2, "cached": 1, "output": 4}]
    before = await counters(server)
    async with running_proxy({"a": server.url}, ledger={"path": str(path), "prices": prices}) as proxy:
        for number in range(6):
            words = text(300, seed=f"billed {number // 2}")
            sent = await proxy.client.post("/v1/chat/completions", json=chat(MID.name, words, max_tokens=5), timeout=60)
            assert sent.status_code == 200
            streamed = {**chat(MID.name, words, "so", "on", max_tokens=3), "stream": True,
                        "stream_options": {"include_usage": True}}  # fmt: skip
            sent = await proxy.client.post("/v1/chat/completions", json=streamed, timeout=60)
            assert b"[DONE]" in sent.content
            body = {"model": MID.name, "prompt": words, "max_tokens": 2}
            assert (await proxy.client.post("/v1/completions", json=body, timeout=60)).status_code == 200
    after = await counters(server)
    counted = {name: after[name] - before[name] for name in after}
    [billed] = LedgerReader(path).read().values()
    saw(f"ledger: {billed}; engine: " + ", ".join(f"{name} {counted[name]:.0f}" for name in (
        "prompt_tokens_total", "prefix_cache_hits_total", "generation_tokens_total")))  # fmt: skip
    assert billed.requests == 18
    assert billed.uncached + billed.cached == counted["prompt_tokens_total"]
    assert billed.cached == counted["prefix_cache_hits_total"] > 0
    assert billed.output == counted["generation_tokens_total"]
    assert billed.price == pytest.approx((2 * billed.uncached + billed.cached + 4 * billed.output) / 1e6)
