"""Two vLLMs that keep their KV cache in LMCache's multi-process servers too, and the coordinator that knows them.

Endpoints `a` and `b` have the LMCache instances `mp-a` and `mp-b`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from kvproxy.features.lmcache.coordinator import LMCacheCoordinator
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import lmcache
from tests.real.engines.lmcache import Coordinator, Server
from tests.real.engines.place import TINY
from tests.real.pair import Pair, running_pair


@pytest.fixture(scope="package")
def coordinator(saw: Saw) -> Iterator[Coordinator]:
    saw("starting LMCache's coordinator")
    service = Coordinator()
    with lmcache.running(service.program):
        yield service


@pytest.fixture(scope="package")
def _engines(coordinator: Coordinator, saw: Saw) -> Iterator[Pair]:
    needs_memory(gib=9)
    saw("starting two LMCache servers and two vLLMs that use them (one to two minutes)")
    servers = [Server(name, coordinator) for name in ("mp-a", "mp-b")]
    with lmcache.running(*(server.program for server in servers)):
        a, b = (server.vllm(TINY, core=core) for core, server in enumerate(servers))
        with running_pair(a, b) as pair:
            saw(f"coordinator at {coordinator.url}, vLLM a at {a.url}, b at {b.url}")
            yield pair


@pytest.fixture
def pair(_engines: Pair) -> Pair:
    """Both engines with empty caches of their own; LMCache's servers keep what they have."""
    _engines.forget()
    return _engines


@pytest.fixture
def endpoints(pair: Pair) -> list[dict[str, Any]]:
    """Endpoints with their LMCache instances, as a configuration has them."""
    return [{"id": name, "url": url, "instance_id": f"mp-{name}"} for name, url in pair.urls.items()]


@pytest.fixture
async def directory(coordinator: Coordinator) -> AsyncIterator[LMCacheCoordinator]:
    """kvproxy's client of the coordinator."""
    async with httpx.AsyncClient() as http:
        yield LMCacheCoordinator(http, coordinator.url)
