"""What `kvproxy init` sees of each engine and of LMCache: a few questions, none of them a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from kvproxy.clients.lmcache.controller import LMCacheControllerClient
from kvproxy.clients.lmcache.coordinator import LMCacheCoordinatorClient
from kvproxy.clients.tokens import token_array
from kvproxy.clients.vllm import VllmClient
from kvproxy.errors import ClientError
from kvproxy.kvcache.providers import is_coordinator

_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One engine as it presented itself. `trouble`: why it did not."""

    id: str
    url: str
    models: tuple[str, ...] = ()
    health_path: str = "/health"
    events: bool = False
    trouble: str = ""

    def words(self) -> str:
        """One line for a person."""
        if self.trouble:
            return f"{self.id}  {self.url}: {self.trouble}; written all the same"
        events = "publishes KV events" if self.events else "publishes no KV events"
        health = "" if self.health_path == "/health" else f"; no /health, so {self.health_path} is probed"
        return f"{self.id}  {self.url}: serves {', '.join(self.models) or 'no model'}; {events}{health}"


@dataclass(frozen=True, slots=True)
class SeenLmCache:
    """LMCache's service."""

    url: str
    kind: str = ""
    trouble: str = ""

    def words(self) -> str:
        """One line for a person."""
        return f"LMCache  {self.url}: {self.trouble or f'answers as the {self.kind}'}"


async def look(engines: Mapping[str, str], lmcache: str) -> tuple[list[Seen], SeenLmCache | None]:
    """All of them at the same time, each within a few seconds; never raises for what they do."""
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as http:
        seen = await asyncio.gather(*(_engine(http, name, url) for name, url in engines.items()))
        controller = await _lmcache(http, lmcache) if lmcache else None
    return list(seen), controller


async def _engine(http: httpx.AsyncClient, name: str, url: str) -> Seen:
    client = VllmClient(http, url, timeout_s=_TIMEOUT_S)
    try:
        models = tuple(model.id for model in await client.models())
    except ClientError as error:
        return Seen(name, url, trouble=f"no answer on /v1/models ({_short(error)})")
    try:
        events = bool(await client.kv_event_sources())
    except ClientError:
        events = False
    path = "/health" if await _answers(http, f"{url}/health") else "/v1/models"
    return Seen(name, url, models, path, events)


_WORDS = {
    "ConnectError": "it cannot be connected to",
    "ConnectTimeout": "no connection in time",
    "ReadTimeout": "nothing came in time",
    "RemoteProtocolError": "it does not speak plain http",
}


def _short(error: ClientError) -> str:
    """Without the path, which is named already, and in words."""
    why = str(error).rpartition(": ")[2]
    return _WORDS.get(why, why)


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).is_success
    except httpx.HTTPError:
        return False


async def _lmcache(http: httpx.AsyncClient, url: str) -> SeenLmCache:
    try:
        if await is_coordinator(LMCacheCoordinatorClient(http, url, lookup_timeout_s=_TIMEOUT_S)):
            return SeenLmCache(url, "coordinator")
        await LMCacheControllerClient(http, url, lookup_timeout_s=_TIMEOUT_S).lookup(token_array([]))
    except ClientError as error:
        return SeenLmCache(url, trouble=f"no answer as LMCache's ({_short(error)}); written all the same")
    return SeenLmCache(url, "controller")
