"""Prompts whose answers have no usage are counted by an engine's tokenizer, some of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import httpx
import pytest

from kvproxy.cache.overlap.facts import Result
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.sglang_server import SglangApp
from kvproxy.lab.simulator.sglang_settings import SglangSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.proxy.listener.server import serve
from tests.cache.fleet import simulated
from tests.cache.support import A, Fake, Service, chat, cluster_of, engine, long_text, running, settings, world

_SIZE = EngineSettings(4096, 16, token_outputs=True, timing=EngineTiming(time_scale=0.001))


def digits(rng: random.Random) -> str:
    return " ".join(str(rng.random()) for _ in range(300))


def code(rng: random.Random) -> str:
    return "\n".join(f"    if (a[{rng.randrange(99)}] != &b->c) {{ return {{}}; }}" for _ in range(150))


def chinese(rng: random.Random) -> str:
    return "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(2000))


@contextlib.asynccontextmanager
async def one_engine(kind: str) -> AsyncIterator[str]:
    """Yield the URL of a simulated engine."""
    async with contextlib.AsyncExitStack() as stack:
        if kind == "vllm":
            place = await stack.enter_async_context(simulated(names=("a",), engine={"max_model_len": 60_000}))
            yield place.engines["a"]
        else:
            sglang = SglangSettings(model="tiny", context_length=60_000, engine=_SIZE)
            app = await stack.enter_async_context(SglangApp(sglang, wall_clock=lambda: 0.0, rng=random.Random(1)))
            yield await stack.enter_async_context(serve(app))


async def count(url: str, text: str) -> int:
    """Return the tokens that the engine makes of a chat."""
    async with httpx.AsyncClient(trust_env=False) as http:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        return int((await http.post(f"{url}/tokenize", json=asked)).json()["count"])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("write", [digits, code, chinese])
async def test_contexts_are_counted_well_without_any_usage(kind: str, write: object) -> None:
    """At four bytes a token they would be taken for a quarter to a half of what they are."""
    assert callable(write)
    rng = random.Random(1)
    async with one_engine(kind) as url, running(settings(), cluster_of({"a": url})) as service:
        guessed = await service.serve(chat(write(rng), model="tiny"), A)
        await service.settled()
        other = write(rng)
        tokens = await count(url, other)
        assert (await service.ask(chat(other, model="tiny"))).overlaps.prompt_tokens == pytest.approx(tokens, rel=0.05)
        assert guessed.overlaps.prompt_tokens < 0.8 * tokens


async def serve_many(service: Service, number: int, *, words: int = 600, prompt_tokens: int | None = None) -> None:
    for index in range(number):
        facts = await service.ask(chat(long_text(f"w{index}-", words)))
        service.kv.placed(facts, A)
        service.kv.finished(facts, Result(A, True, prompt_tokens=prompt_tokens))
        await service.settled()


async def test_one_in_64_is_counted_after_the_first() -> None:
    """Its tokens are not kept, since no prompt's tokens are looked for."""
    tokenizer = engine()
    async with world({"a": tokenizer}) as service:
        await serve_many(service, 1)
        assert tokenizer.calls["/tokenize"] == 1
        await serve_many(service, 640)
        assert 5 <= tokenizer.calls["/tokenize"] <= 20
        assert len(service.kv.overlap.tokens.memory) == 0


async def test_an_engine_that_refuses_is_asked_once() -> None:
    """Nothing else comes of it."""
    refusing = Fake({})
    async with world({"a": refusing}) as service:
        await serve_many(service, 640)
    assert refusing.calls["/tokenize"] == 1


async def test_answers_with_usage_and_short_prompts_are_not_counted() -> None:
    tokenizer = engine()
    async with world({"a": tokenizer}) as service:
        await serve_many(service, 100, prompt_tokens=1200)
        await serve_many(service, 100, words=50)
    assert not tokenizer.calls


async def test_counts_are_passed_on() -> None:
    """Other routers learn from this one's samples."""
    async with world({"a": engine()}) as service:
        passed: list[tuple[str, int]] = []
        service.kv.state.on_counted = lambda model, keys, size, tokens: passed.append((model, tokens))
        await serve_many(service, 1)
    assert passed == [("m", 601)]
