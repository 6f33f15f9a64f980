"""Two real engines and what tests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial

import httpx

from kvproxy.cache.clients.vllm import VllmClient
from tests.real.engines import vllm
from tests.real.engines.place import Model
from tests.real.engines.sglang import Sglang
from tests.real.engines.vllm import Vllm
from tests.real.prompts import chat, text
from tests.support.until import until_says


@dataclass(frozen=True)
class Pair:
    """Endpoints `a` and `b` of one model."""

    a: Vllm
    b: Vllm

    @property
    def model(self) -> Model:
        return self.a.model

    @property
    def urls(self) -> dict[str, str]:
        """Endpoints as a configuration has them."""
        return {"a": self.a.url, "b": self.b.url}

    def server(self, endpoint: str) -> Vllm:
        return {"a": self.a, "b": self.b}[endpoint]

    def revive(self) -> None:
        """Start engines again that a test has killed."""
        dead = [each for each in (self.a, self.b) if not _healthy(each)]
        for each in dead:
            each.program.start()
        for each in dead:
            each.await_ready()
            warm_up(each)

    def forget(self) -> None:
        """Drop both prefix caches."""
        for url in self.urls.values():
            httpx.post(f"{url}/reset_prefix_cache", timeout=10).raise_for_status()


@contextlib.contextmanager
def running_pair(a: Vllm, b: Vllm) -> Iterator[Pair]:
    """Both are up inside the block and gone after it."""
    with vllm.running([a, b]):
        for server in (a, b):
            warm_up(server)
        yield Pair(a, b)


def warm_up(server: Vllm | Sglang) -> None:
    """Two questions: an engine's first ones take many times as long as all others."""
    for number in range(2):
        body = chat(server.model.name, text(300, seed=f"warm up {number}"), max_tokens=8)
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


@contextlib.asynccontextmanager
async def engine_client(server: Vllm) -> AsyncIterator[VllmClient]:
    """kvproxy's own client of one engine."""
    async with httpx.AsyncClient() as http:
        yield VllmClient(http, server.url, timeout_s=10.0)


async def in_flight(http: httpx.AsyncClient, server: Vllm) -> int:
    """Return requests that the engine's API server handles, by its own count."""
    load: int = (await http.get(f"{server.url}/load")).json()["server_load"]
    return load


async def until_in_flight(http: httpx.AsyncClient, server: Vllm, wanted: int, *, within_s: float = 20.0) -> float:
    """Seconds until the engine is busy with exactly `wanted` requests."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    await until_says(wanted, partial(in_flight, http, server), within_s=within_s, pause_s=0.005)
    return loop.time() - started


def _healthy(server: Vllm) -> bool:
    if not server.program.running:
        return False
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    return False
