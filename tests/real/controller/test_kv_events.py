"""The precise index, fed by real KV events, knows what the engines have cached."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.block_events import KvEvent
from kvproxy.cache.indexes.precise import PreciseIndex, precise_root
from kvproxy.cache.prefix.hashing import token_blocks
from kvproxy.features.kv_events.status import StreamState, StreamStatus
from kvproxy.features.kv_events.subscriber import KvEventSubscriber
from tests.real.conftest import Saw
from tests.real.engines.vllm import BLOCK_TOKENS, Vllm
from tests.real.pair import Pair, engine_client
from tests.real.prompts import chat, raw, text
from tests.support.proxy import running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real


class Follower:
    """The precise index as the consumer of event streams."""

    def __init__(self) -> None:
        self.index = PreciseIndex()
        self.exact: dict[str, bool] = {}

    def apply(self, endpoint: EndpointId, dp_rank: int, events: Sequence[KvEvent]) -> None:
        self.index.apply_events(endpoint, dp_rank, events)

    def cleared(self, endpoint: EndpointId, dp_rank: int) -> None:
        self.index.clear_rank(endpoint, dp_rank)

    def state_changed(self, endpoint: EndpointId, dp_rank: int, status: StreamStatus) -> None:
        self.exact[endpoint] = status.state is StreamState.EXACT

    def held(self, endpoint: str, tokens: array[int], *, salt: str | None = None) -> int:
        """Leading tokens of the prompt the endpoint has in its memory."""
        matches = self.index.match_prompt(
            lambda size: token_blocks(tokens, size, precise_root(size, cache_salt=salt)),
        )
        match = matches.get(EndpointId(endpoint))
        return match.device_tokens if match else 0


@contextlib.asynccontextmanager
async def following(servers: dict[str, Vllm]) -> AsyncIterator[Follower]:
    """Follow each server's event stream, history included."""
    follower = Follower()
    async with contextlib.AsyncExitStack() as stack:
        for name, server in servers.items():
            async with engine_client(server) as engine:
                (source,) = await engine.kv_event_sources()
            subscriber = KvEventSubscriber(
                EndpointId(name),
                source,
                consumer=follower,
                metrics=Metrics(),
                clock=time.monotonic,
                wall_clock=time.time,  # noqa: TID251 - events carry the engine's wall clock
            )
            await stack.enter_async_context(subscriber)
        await until(lambda: len(follower.exact) == len(servers) and all(follower.exact.values()))
        yield follower


async def tokens_of(server: Vllm, body: dict[str, Any]) -> array[int]:
    """Return the prompt of a chat body as the engine sees it."""
    async with engine_client(server) as engine:
        return await engine.tokenize_chat("", raw(body))


def reusable(held: int, prompt: int) -> int:
    """Return the tokens that vLLM can serve of a held prefix: whole blocks, and the last token is always computed."""
    return min(held, (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, int, int]:
    """Which endpoint served, its prompt tokens, and how many of them were cached by its own account."""
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-kvproxy-endpoint"], usage["prompt_tokens"], cached


CASES: dict[str, dict[str, Any]] = {
    "a short prompt": {"words": 5},
    "a prompt of many blocks": {"words": 400},
    "a prefill of several steps": {"words": 1500},
    "a salted prompt": {"words": 100, "cache_salt": "tenant-a"},
}


@pytest.mark.parametrize("case", CASES)
async def test_the_match_is_what_the_engine_reuses(pair: Pair, saw: Saw, case: str) -> None:
    """For a repeated prompt the index says beforehand, for each engine, what `cached_tokens` says afterwards."""
    fields = dict(CASES[case])
    body = chat(pair.model.name, text(fields.pop("words"), seed=case), **fields)
    salt = fields.get("cache_salt")
    tokens = await tokens_of(pair.a, body)
    whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    seen = []
    async with following({"a": pair.a, "b": pair.b}) as follower, running_proxy(pair.urls) as proxy:
        first, prompt, cached = await ask(proxy.client, body)
        assert (prompt, cached) == (len(tokens), 0)
        await until(lambda: follower.held(first, tokens, salt=salt) == whole)
        for _ in range(2):  # round robin: the other engine, then the first again
            before = {name: follower.held(name, tokens, salt=salt) for name in pair.urls}
            endpoint, prompt, cached = await ask(proxy.client, body)
            assert cached == reusable(before[endpoint], prompt)
            await until(lambda name=endpoint: follower.held(name, tokens, salt=salt) == whole)
            seen.append(f"{endpoint} predicted {before[endpoint]}, cached {cached}")
        assert salt is None or follower.held(first, tokens) == 0, "the same tokens without the salt are nobody's"
    saw(f"{case}, {len(tokens)} tokens: {'; '.join(seen)}")


async def test_a_growing_chat(pair: Pair, saw: Saw) -> None:
    """Each turn reuses the last one's prompt and what was generated; the index follows turn by turn."""
    turns = [text(80, seed="turn 0")]
    seen = []
    async with following({"a": pair.a}) as follower, running_proxy({"a": pair.a.url}) as proxy:
        for number in range(1, 5):
            body = chat(pair.model.name, *turns, max_tokens=40)
            tokens = await tokens_of(pair.a, body)
            held = follower.held("a", tokens)
            answer = (await proxy.client.post("/v1/chat/completions", json=body)).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == reusable(held, len(tokens))
            seen.append(f"{cached}/{len(tokens)}")
            await until(lambda known=tokens: follower.held("a", known) == len(known) // BLOCK_TOKENS * BLOCK_TOKENS)
            turns += [answer["choices"][0]["message"]["content"], text(80, seed=f"turn {number}")]
    assert seen[0].startswith("0/")
    saw(f"cached of prompt tokens, turn by turn, as predicted: {', '.join(seen)}")


async def test_eviction_and_clearing_are_followed(pair: Pair, saw: Saw) -> None:
    """When the cache overflows, the index loses exactly the prompts the engine lost; a reset empties both."""
    bodies = [chat(pair.model.name, text(2000, seed=f"overflow {n}")) for n in range(40)]
    async with following({"a": pair.a}) as follower, running_proxy({"a": pair.a.url}) as proxy:
        prompts = [await tokens_of(pair.a, body) for body in bodies]
        assert sum(map(len, prompts)) > 1.2 * pair.a.blocks * BLOCK_TOKENS
        for body, tokens in zip(bodies, prompts, strict=True):
            await ask(proxy.client, body)
            await until(lambda known=tokens: follower.held("a", known) > len(known) - BLOCK_TOKENS)
        held = [follower.held("a", tokens) for tokens in prompts]
        oldest = next(number for number, tokens in enumerate(held) if tokens)
        _, prompt, cached = await ask(proxy.client, bodies[oldest])
        assert cached == reusable(held[oldest], prompt)
        pair.forget()
        _, _, after_reset = await ask(proxy.client, bodies[-1])
        await until(lambda: follower.held("a", prompts[-2]) == 0 and follower.held("a", prompts[-1]) > 0)
    assert 0 < oldest < len(bodies) - 1
    assert after_reset == 0
    saw(
        f"{len(bodies)} prompts overflowed the cache: index and engine agree that {oldest} are gone and "
        f"{cached} of {prompt} tokens of the next are left; after a reset none"
    )


async def test_a_late_peer_receives_the_history(pair: Pair, saw: Saw) -> None:
    """A subscriber that starts after the fact replays and ends with the same knowledge."""
    bodies = [chat(pair.model.name, text(200, seed=f"history {n}")) for n in range(3)]
    async with running_proxy({"a": pair.a.url}) as proxy:
        for body in bodies:
            await ask(proxy.client, body)
        prompts = [await tokens_of(pair.a, body) for body in bodies]
        async with following({"a": pair.a}) as follower:
            held = [follower.held("a", tokens) for tokens in prompts]
    assert held == [len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in prompts]
    saw(f"three prompts asked before anybody listened: {held} tokens known from replay")
