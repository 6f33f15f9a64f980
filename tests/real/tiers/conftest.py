"""Two vLLMs whose own caches are small, an LMCache server with host memory beside each, one disk that both servers
read, and the coordinator that knows them. Endpoints `a` and `b` have the LMCache instances `mp-a` and `mp-b`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.features.lmcache.coordinator import LMCacheCoordinator
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import lmcache
from tests.real.engines.lmcache import Coordinator, Server
from tests.real.engines.place import MID
from tests.real.pair import Pair, running_pair

#: Of 32 tokens each: 10,240 tokens, three or four of the prompts here.
BLOCKS = 320


@dataclass(frozen=True)
class Tiers:
    """All of it, running."""

    pair: Pair
    coordinator: Coordinator
    shared: Path | None  # the disk's folder

    @property
    def endpoints(self) -> list[dict[str, Any]]:
        """As a configuration has them."""
        return [{"id": name, "url": url, "instance_id": f"mp-{name}"} for name, url in self.pair.urls.items()]

    @property
    def kvcache(self) -> dict[str, Any]:
        """Settings of a proxy that knows all tiers."""
        return {
            "kv_events": True,
            "lmcache_endpoint": self.coordinator.url,
            "provider": "coordinator",
            "directory_model": str(MID.folder),
            "lookup_routing_timeout": "5s",  # two busy cores do not keep 50 ms
        }


@contextlib.contextmanager
def running_tiers(saw: Saw, *, shared: Path | None, memory_gb: float, tells_tokens: bool = True) -> Iterator[Tiers]:
    needs_memory(gib=9)
    saw("starting LMCache's coordinator, two LMCache servers and two vLLMs that use them (one to three minutes)")
    coordinator = Coordinator()
    with lmcache.running(coordinator.program):
        servers = [Server(name, coordinator, memory_gb=memory_gb, shared=shared) for name in ("mp-a", "mp-b")]
        with lmcache.running(*(server.program for server in servers)):
            made = [
                server.vllm(MID, core=core, blocks=BLOCKS, tells_tokens=tells_tokens)
                for core, server in enumerate(servers)
            ]
            with running_pair(*made) as pair:
                saw(f"coordinator at {coordinator.url}, vLLM a at {pair.a.url}, b at {pair.b.url}")
                yield Tiers(pair, coordinator, shared)


@pytest.fixture(scope="module")
def tiers(saw: Saw, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiers]:
    """With the disk."""
    with running_tiers(saw, shared=tmp_path_factory.mktemp("shared"), memory_gb=0.25) as running:
        yield running


@pytest.fixture
async def directory(tiers: Tiers) -> AsyncIterator[LMCacheCoordinator]:
    """kvproxy's client of the coordinator."""
    async with httpx.AsyncClient() as http:
        yield LMCacheCoordinator(http, tiers.coordinator.url)
