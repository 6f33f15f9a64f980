"""Two real vLLM servers behind the transport, the middleware and Ray Serve: chats stay where their prefix is cached."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import kvproxy
from kvproxy.base.types import EndpointId
from tests.real.conftest import Saw, needs_memory
from tests.real.engines.place import TINY
from tests.real.engines.vllm import BLOCK_TOKENS, Vllm
from tests.real.pair import Pair, running_pair, until_in_flight
from tests.real.prompts import chat, text
from tests.support.loopback import serve
from tests.support.ray_node import start_ray
from tests.support.until import until

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default")]

PATH = "/v1/chat/completions"
CHATS, TURNS = 6, 4
#: Sends a body; the answer, as data.
Ask = Callable[[dict[str, Any]], Awaitable[Any]]


@pytest.fixture(scope="module")
def engines(saw: Saw) -> Iterator[Pair]:
    needs_memory(gib=6)
    saw("starting two vLLM servers")
    with running_pair(*(Vllm(name, TINY, core=core) for core, name in enumerate("ab"))) as pair:
        yield pair


async def hold_chats(ask: Ask, name: str) -> tuple[int, int]:
    """Return the prompt tokens of later turns that were cached, and those that the turn before had computed."""
    cached = before = 0
    talks = [[text(200, seed=(name, number))] for number in range(CHATS)]
    computed = [0] * CHATS
    for turn in range(TURNS):
        for number, talk in enumerate(talks):
            answer = await ask(chat(TINY.name, *talk, max_tokens=8))
            usage = answer["usage"]
            if turn:
                cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                before += computed[number] // BLOCK_TOKENS * BLOCK_TOKENS
            computed[number] = usage["prompt_tokens"]
            talk += [answer["choices"][0]["message"]["content"] or "", text(20, seed=(name, number, turn))]
    return cached, before


@asynccontextmanager
async def by_transport(engines: Pair, _: Path) -> AsyncIterator[Ask]:
    async with httpx.AsyncClient(transport=kvproxy.AsyncTransport(endpoints=engines.urls), timeout=60) as http:
        client = AsyncOpenAI(base_url="http://engines/v1", api_key="none", http_client=http)

        async def ask(body: dict[str, Any]) -> Any:
            return (await client.chat.completions.create(**body)).model_dump()

        yield ask


@asynccontextmanager
async def by_middleware(engines: Pair, _: Path) -> AsyncIterator[Ask]:
    """Serve a gateway that forwards by itself, below a prefix."""
    http = httpx.AsyncClient(timeout=60)

    async def forward(request: Request) -> Response:
        body = await request.json()
        engine = await kvproxy.choose(request)
        assert engine is not None
        answer = await http.post(engines.urls[engine] + PATH, json=body)
        return Response(answer.content, answer.status_code, media_type="application/json")

    app = Starlette(routes=[Route("/llm" + PATH, forward, methods=["POST"])])
    app.add_middleware(kvproxy.KVCacheMiddleware, endpoints=engines.urls)
    async with http, serve(app, lifespan="on") as url, httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def ask(body: dict[str, Any]) -> Any:
            answer = await client.post("/llm" + PATH, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield ask


@asynccontextmanager
async def by_ray(engines: Pair, folder: Path) -> AsyncIterator[Ask]:
    """Run a replica for each engine."""
    ray = pytest.importorskip("ray", reason="pip install 'kvproxy[ray]'", exc_type=ImportError)
    from ray import serve as ray_serve
    from ray.serve.config import RequestRouterConfig

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    start_ray()
    try:
        deployment = ray_serve.deployment(
            num_replicas=len(engines.urls),
            ray_actor_options={"num_cpus": 0.1},
            request_router_config=RequestRouterConfig(
                request_router_class="kvproxy.ray:KVCacheRouter", request_routing_stats_period_s=1
            ),
        )(replica_of(list(engines.urls.values()), folder))
        handle = ray_serve.run(deployment.bind(), route_prefix=None)

        async def ask(body: dict[str, Any]) -> Any:
            return await handle.remote(body)

        yield ask
    finally:
        ray_serve.shutdown()
        ray.shutdown()


def replica_of(urls: list[str], folder: Path) -> type:
    """Return the class of replicas, each with the next engine that no other has. Nothing of this module is in it."""

    class Engine:
        async def __init__(self) -> None:
            import httpx

            for number, url in enumerate(urls):
                try:
                    (folder / str(number)).touch(exist_ok=False)
                except FileExistsError:
                    continue
                self.http = httpx.AsyncClient(base_url=url, timeout=60)
                return

        def record_routing_stats(self) -> dict[str, Any]:
            return {"engine_url": str(self.http.base_url).rstrip("/")}

        async def __call__(self, body: dict[str, Any]) -> Any:
            return (await self.http.post("/v1/chat/completions", json=body)).json()

    return Engine


@pytest.mark.parametrize("through", [by_transport, by_middleware, by_ray], ids=lambda through: through.__name__)
async def test_later_turns_reuse_the_turn_before(through: Any, engines: Pair, saw: Saw, tmp_path: Path) -> None:
    """Nine tenths at least; templates and the end of a prompt may part."""
    async with through(engines, tmp_path) as ask:
        cached, before = await hold_chats(ask, through.__name__)
    saw(f"{through.__name__}: {cached} tokens cached of {before} in whole blocks of the turn before")
    assert cached >= 0.9 * before


async def test_a_stream_that_is_left_early_frees_the_engine(engines: Pair) -> None:
    transport = kvproxy.AsyncTransport(endpoints={"a": engines.a.url})
    async with httpx.AsyncClient(transport=transport, timeout=60) as http, httpx.AsyncClient() as direct:
        client = AsyncOpenAI(base_url="http://engines/v1", api_key="none", http_client=http)
        body = chat(TINY.name, text(50, seed="left"), max_tokens=2000, stream=True)
        stream = await client.chat.completions.create(**body, extra_body={"ignore_eos": True})
        await anext(aiter(stream))
        await until_in_flight(direct, engines.a, 1)
        await stream.close()
        await until_in_flight(direct, engines.a, 0)


async def test_the_transport_follows_what_engines_evict(engines: Pair) -> None:
    """By KV events, which it finds by itself."""
    transport = kvproxy.AsyncTransport(endpoints=engines.urls)
    async with httpx.AsyncClient(transport=transport, timeout=60) as http:
        body = chat(TINY.name, text(300, seed="evicted"))

        def held() -> int:
            cache = transport.proxy.kvcache
            assert cache is not None
            return sum(cache.overlap.indexes["default"].precise.count_rows(EndpointId(one)) for one in "ab")

        await http.post("http://engines" + PATH, json=body)
        await until(lambda: held() > 0, within_s=30)
        engines.forget()
        for url in engines.urls.values():  # a reset is published with the engine's next step
            async with httpx.AsyncClient(timeout=60) as direct:
                await asyncio.gather(direct.post(url + PATH, json=chat(TINY.name, "and?")))
        await until(lambda: held() < 9, within_s=30)
