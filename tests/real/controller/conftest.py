"""Two vLLMs of the tiny model as endpoints `a` and `b`, and LMCache's controller with an engine for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass

import httpx
import pytest

from kvproxy.features.lmcache.controller import LMCacheController
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import lmcache
from tests.real.engines.lmcache import Controller, Worker
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.pair import Pair, running_pair


@dataclass(frozen=True)
class Lmcache:
    """The controller, and the engines registered with it by instance id."""

    controller: Controller
    workers: Mapping[str, Worker]

    @property
    def url(self) -> str:
        """Of the controller."""
        return self.controller.url


@pytest.fixture(scope="package")
def _engines(saw: Saw) -> Iterator[Pair]:
    needs_memory(gib=7)
    saw("starting two vLLM servers (half a minute to a minute and a half)")
    with running_pair(Vllm("a", TINY, core=0), Vllm("b", TINY, core=1)) as pair:
        saw(f"vLLM a at {pair.a.url}, b at {pair.b.url}")
        yield pair


@pytest.fixture
def pair(_engines: Pair) -> Pair:
    """Both engines, alive and with empty prefix caches, whatever an earlier test did to them."""
    _engines.revive()
    _engines.forget()
    return _engines


@pytest.fixture(scope="package")
def lmcache_services(saw: Saw) -> Iterator[Lmcache]:
    """Yield the controller with the engines of instances `a` and `b`; what they hold outlives each test."""
    saw("starting LMCache's controller and two of its engines")
    controller = Controller()
    with lmcache.running(controller.program):
        workers = {name: Worker(name, controller) for name in ("a", "b")}
        with lmcache.running(*(worker.program for worker in workers.values())):
            saw(f"LMCache controller at {controller.url}, instances a and b")
            yield Lmcache(controller, workers)


@pytest.fixture
async def directory(lmcache_services: Lmcache) -> AsyncIterator[LMCacheController]:
    """kvproxy's client of the controller."""
    async with httpx.AsyncClient() as http:
        yield LMCacheController(http, lmcache_services.url)
