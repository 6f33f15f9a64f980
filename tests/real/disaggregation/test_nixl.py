"""Prefill and decode on two real vLLMs: the same text as one alone, the whole prompt pulled, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvproxy.features.disaggregation.note import NOTE
from kvproxy.features.disaggregation.pairs import PairState
from kvproxy.features.disaggregation.watch import Disaggregated, find_all
from tests.real.conftest import Saw
from tests.real.engines.place import TINY
from tests.real.pair import Pair, engine_client, until_in_flight
from tests.real.prompts import text
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real

#: Words of each prompt, about two tokens each.
LENGTHS = (50, 150, 400, 900, 50, 150, 400, 900, 2000, 3750)
PROMPTS = int(os.environ.get("KVPROXY_SEPARATED_PROMPTS", "200"))
#: Number of the first one, for runs in parts.
FIRST = int(os.environ.get("KVPROXY_SEPARATED_FIRST", "0"))


@contextlib.asynccontextmanager
async def separating(
    two: Pair, *, config: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[RunningProxy, Disaggregated]]:
    """Yield a proxy that separates every prompt, once its pair is proven."""
    roles = {"a": "prefill", "b": "decode"}
    endpoints = [{"id": name, "url": url, "role": roles[name]} for name, url in two.urls.items()]
    settings = {"connector": "nixl", "min_tokens": 1, **settings}
    async with running_proxy(endpoints, disaggregation=settings, **(config or {})) as proxy:
        state = next(find_all(proxy.proxy.clusters.values()))
        await ask(proxy.client, text(settings["min_tokens"], seed="a first request names the pair"))
        if settings["connector"] != "off":
            await until(lambda: any(pair.state is not PairState.UNPROVEN for pair in state.pairs), within_s=240)
        yield proxy, state


async def ask(client: httpx.AsyncClient, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": TINY.name, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **fields}
    answer = await client.post("/v1/completions", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def results(proxy: RunningProxy) -> dict[str, float]:
    """Return how many requests ended how, and how many prefills."""
    found: dict[str, float] = {}
    for family in proxy.proxy.metrics.registry.collect():
        if family.name in ("kvproxy_disaggregated_requests", "kvproxy_disaggregated_prefills"):
            for sample in family.samples:
                if sample.name.endswith("_total") and sample.value:
                    found[f"{family.name.rpartition('_')[2]} {sample.labels['result']}"] = sample.value
    return found


@pytest.mark.timeout(3600)
async def test_the_text_is_that_of_the_decoder_alone(two: Pair, saw: Saw) -> None:
    """Of prompts of 100 to 8,000 tokens; every prompt token is pulled."""
    async with (
        separating(two, prefill_timeout="10m", canary="24h") as (proxy, state),  # a canary's tokens are pulled, too
        engine_client(two.b) as decoder,
        httpx.AsyncClient(base_url=two.b.url) as alone,
    ):
        assert [pair.state for pair in state.pairs] == [PairState.GOOD]
        before = (await decoder.fetch_metrics(timeout_s=120)).external_hits_tokens or 0
        equal = tokens = 0
        took: dict[str, list[float]] = {"separated": [], "alone": []}
        for number in range(FIRST, FIRST + PROMPTS):
            prompt = text(LENGTHS[number % len(LENGTHS)], seed=f"separated {number}")
            began = time.monotonic()
            answer = await ask(proxy.client, prompt)
            took["separated"].append(time.monotonic() - began)
            tokens += answer["usage"]["prompt_tokens"]
            began = time.monotonic()
            other = await ask(alone, prompt, cache_salt=f"alone {number}")
            took["alone"].append(time.monotonic() - began)
            equal += answer["choices"][0]["text"] == other["choices"][0]["text"]
            if number % 20 == 19:
                saw(f"{equal} of {number + 1 - FIRST} texts equal so far")
        pulled = ((await decoder.fetch_metrics(timeout_s=120)).external_hits_tokens or 0) - before
        means = ", ".join(f"{name} {statistics.mean(seconds):.2f} s" for name, seconds in took.items())
        saw(f"{equal} of {PROMPTS} texts equal; {pulled} of {tokens} prompt tokens pulled; 16 tokens took {means}")
        saw(", ".join(f"{name} {count:.0f}" for name, count in results(proxy).items()))
        assert equal == PROMPTS
        assert pulled == tokens
        assert proxy.metric("kvproxy_disaggregated_requests_total", cluster="default", result="pulled") == PROMPTS


async def _read_gaps(client: httpx.AsyncClient, prompt: str, gaps: list[float]) -> int:
    """Read a streamed answer; add the seconds between its chunks, and return the chunks."""
    body = {"model": TINY.name, "prompt": prompt, "max_tokens": 256, "temperature": 0, "ignore_eos": True}
    chunks = 0
    last = 0.0
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}, timeout=600) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                if chunks:
                    gaps.append(now - last)
                last = now
                chunks += 1
    return chunks


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["together", "separated", "chosen"])
async def test_running_answers_while_long_prompts_come(two: Pair, saw: Saw, how: str) -> None:
    """Of four answers, the pauses; of twelve long prompts, the first tokens."""
    settings: dict[str, Any] = {"min_tokens": 512, "prefill_timeout": "10m"}
    settings |= {"connector": "off"} if how == "together" else {}
    config = {"policy": "least_request" if how == "separated" else "kv_aware"}
    async with separating(two, config=config, **settings) as (proxy, state):
        for number in range(12):  # speeds are learned
            await ask(proxy.client, text(400 + 100 * (number % 4), seed=f"learn {how} {number}"))
        gaps: list[float] = []
        readers = [
            asyncio.create_task(_read_gaps(proxy.client, text(40, seed=f"running {how} {number}"), gaps))
            for number in range(4)
        ]
        await until(lambda: len(gaps) >= 16, within_s=240)
        firsts = []
        for number in range(12):
            began = time.monotonic()
            await ask(proxy.client, text(1200, seed=f"long {how} {number}"), max_tokens=1)
            firsts.append(time.monotonic() - began)
        assert min(await asyncio.gather(*readers)) > 16
        gaps.sort()
        saw(
            f"{how}: pauses p50 {gaps[len(gaps) // 2] * 1e3:.0f} ms, p99 {gaps[int(len(gaps) * 0.99)] * 1e3:.0f} ms; "
            f"first tokens of long prompts {statistics.mean(firsts):.2f} s; {results(proxy)}"
        )
        for pair in state.pairs:
            saw(f"a token is pulled in {1e3 * pair.s_per_token:.3f} ms by the canary")
        for shown in itertools.islice(proxy.proxy.recent.latest(), 3):
            saw(f"{shown.outcome.notes.get(NOTE)}, first token after {shown.outcome.ttft_s}")


async def test_a_client_that_leaves_kills_no_engine(two: Pair, saw: Saw) -> None:
    """At any moment of both legs; afterwards both engines serve and nothing is in flight."""
    async with separating(two) as (proxy, _), httpx.AsyncClient() as http:
        for number in range(20):
            prompt = text(600, seed=f"leaves {number}")
            task = asyncio.create_task(ask(proxy.client, prompt, max_tokens=64))
            await asyncio.wait([task], timeout=0.05 * number)
            task.cancel()
            await asyncio.wait([task])
        for server in (two.a, two.b):
            await until_in_flight(http, server, 0)
        assert (await ask(proxy.client, text(100, seed="after")))["choices"]
        saw(f"20 clients left; the pool serves {[server.program.running for server in (two.a, two.b)]}")
        assert two.a.program.running
        assert two.b.program.running


async def test_the_decoder_serves_alone_once_the_prefiller_is_killed(two: Pair, saw: Saw) -> None:
    """In the middle of a prefill, and after."""
    async with separating(two) as (proxy, _), httpx.AsyncClient(base_url=two.b.url) as alone:
        try:
            prompt = text(1500, seed="killed")
            task = asyncio.create_task(ask(proxy.client, prompt))
            async with httpx.AsyncClient() as http:
                await until_in_flight(http, two.a, 1)
            two.a.program.kill()
            began = time.monotonic()
            answer = await task
            saw(f"the answer came {time.monotonic() - began:.1f} s after the kill")
            assert answer["choices"][0]["text"] == (await ask(alone, prompt, cache_salt="x"))["choices"][0]["text"]
            assert (await ask(proxy.client, text(200, seed="next")))["choices"]
        finally:
            two.revive()
