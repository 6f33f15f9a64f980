"""Simulated engines that read each other's KV, behind a proxy that separates prefill from decode."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec

from kvproxy.features.disaggregation.companion import CanaryService
from kvproxy.features.disaggregation.pairs import PairState
from kvproxy.features.disaggregation.watch import Disaggregated, find_all
from kvproxy.lab.simulator.vllm_nixl import NixlSide
from kvproxy.lab.simulator.vllm_server import VllmApp
from kvproxy.lab.simulator.vllm_settings import NixlLinks
from tests.lab.simulator.support import TINY
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}


@dataclass
class Fleet:
    """Engines by endpoint id."""

    apps: dict[str, VllmApp]
    urls: dict[str, str]

    def side(self, name: str) -> NixlSide:
        side = self.apps[name].state.nixl
        assert side is not None
        return side

    def fault(self, name: str, **values: Any) -> None:
        self.apps[name].state.faults.update(values)

    def calls(self, name: str) -> int:
        """Return the generations that reached the engine."""
        return sum(count for path, count in self.apps[name].state.calls.items() if path.startswith("POST /v1/"))

    def is_dead(self, name: str) -> bool:
        return self.apps[name].state.faults.values.engine_dead


@contextlib.asynccontextmanager
async def running_fleet(*names: str, links: NixlLinks | None = None, **changes: Any) -> AsyncIterator[Fleet]:
    """Yield engines that can read each other's KV."""
    links = links or NixlLinks(s_per_token=0.0)
    async with contextlib.AsyncExitStack() as stack:
        apps = {}
        urls = {}
        for number, name in enumerate(names):
            app = VllmApp(replace(TINY, nixl=links, **changes), rng=random.Random(number))
            apps[name] = await stack.enter_async_context(app)
            urls[name] = await stack.enter_async_context(serve(app))
        yield Fleet(apps, urls)


@dataclass
class Separated:
    """A fleet and a proxy before it."""

    fleet: Fleet
    proxy: RunningProxy

    @property
    def state(self) -> Disaggregated:
        return next(find_all(self.proxy.proxy.clusters.values()))

    async def ask(self, text: str, **fields: Any) -> httpx.Response:
        return await self.proxy.client.post("/v1/completions", json=prompt(text, **fields))

    async def ask_engine(self, name: str, text: str, **fields: Any) -> str:
        """Return the text of an engine alone."""
        async with httpx.AsyncClient(base_url=self.fleet.urls[name]) as client:
            return text_of(await client.post("/v1/completions", json=prompt(text, cache_salt="alone", **fields)))

    def requests(self, result: str) -> float:
        return self.proxy.metric("kvproxy_disaggregated_requests_total", cluster="default", result=result)

    def prefills(self, endpoint: str, result: str) -> float:
        name = "kvproxy_disaggregated_prefills_total"
        return self.proxy.metric(name, cluster="default", endpoint=endpoint, result=result)

    async def prove_pairs(self) -> Mapping[tuple[str, str], PairState]:
        """Send a canary to every pair, after one that may be under way, and return what they found."""
        await self.run_round()
        for pair in self.state.pairs:
            pair.due_at = -math.inf
        await self.run_round()
        return self.found()

    async def run_round(self) -> None:
        """Send the canaries that are due."""
        service = next(one for one in self.proxy.proxy.companions if isinstance(one, CanaryService))
        await service.run_round()

    def found(self) -> Mapping[tuple[str, str], PairState]:
        return {(str(pair.prefill.id), str(pair.decode.id)): pair.state for pair in self.state.pairs}


@contextlib.asynccontextmanager
async def separated(
    *names: str,
    links: NixlLinks | None = None,
    roles: Mapping[str, str] = ROLES,
    plant: Callable[[Fleet], None] = lambda _: None,
    **config: Any,
) -> AsyncIterator[Separated]:
    """Yield a proxy before such engines. Without learned speeds every long prompt is separated; pairs are used
    unproven unless `canary` says otherwise. `plant` makes faults before the proxy sends its first canary."""
    settings = {"connector": "nixl", "min_tokens": 16, "canary": 0, **config.pop("disaggregation", {})}
    async with running_fleet(*names, links=links) as fleet:
        plant(fleet)
        endpoints = [{"id": name, "url": fleet.urls[name], "role": roles[name]} for name in names]
        async with running_proxy(endpoints, disaggregation=settings, **config) as proxy:
            yield Separated(fleet, proxy)


def prompt(text: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a completion of about twice as many tokens as words."""
    return {"model": "tiny", "prompt": text, "max_tokens": 6, "temperature": 0, **fields}


def words(seed: str, count: int = 120) -> str:
    """Return a prompt of its own."""
    rng = random.Random(seed)
    return " ".join(str(rng.randrange(10_000)) for _ in range(count))


def text_of(answer: httpx.Response) -> str:
    """Return the text of a completion, streamed or not."""
    assert answer.status_code == 200, answer.text
    if "event-stream" not in answer.headers["content-type"]:
        text: str = answer.json()["choices"][0]["text"]
        return text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in msgspec.json.decode(event)["choices"])


async def until_freed(side: NixlSide) -> None:
    """Wait until no block of the engine waits for a decoder."""
    await until(lambda: not side.held)
