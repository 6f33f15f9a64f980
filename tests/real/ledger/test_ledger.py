"""The ledger on a real vLLM: what is billed is what the engine counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvproxy.features.ledger.ledger import LedgerReader
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import MID
from tests.real.engines.vllm import Vllm
from tests.real.pair import warm_up
from tests.real.prompts import chat, text
from tests.support.proxy import running_proxy

pytestmark = pytest.mark.real

#: Of 32 tokens each: 10,240 tokens.
BLOCKS = 320


@pytest.fixture(scope="module")
def server(saw: Saw) -> Iterator[Vllm]:
    needs_memory(gib=4)
    one = Vllm("ledger", MID, core=0, blocks=BLOCKS)
    saw("starting a vLLM server with a small cache")
    with vllm.running([one]):
        warm_up(one)
        yield one


_SAMPLE = re.compile(r"^vllm:(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)


async def counters(server: Vllm) -> dict[str, float]:
    """Return the engine's own, by name."""
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"{server.url}/metrics", timeout=30)).text
    return {name: float(value) for name, value in _SAMPLE.findall(page) if name.endswith("_total")}


async def test_billed_tokens_are_the_engines_counts(server: Vllm, saw: Saw, tmp_path: Path) -> None:
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
