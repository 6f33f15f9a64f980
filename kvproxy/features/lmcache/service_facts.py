"""The configured LMCache service and the facts about it, each asked for once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from kvproxy.base.errors import BadResponse, ClientError, ClientTimeout, ClientUnavailable, NotSupported
from kvproxy.base.upstream.origin import Origin
from kvproxy.cache.clients.api import Api
from kvproxy.cache.clients.tokens import TokenIds, body_with_tokens, token_array
from kvproxy.cache.store import EVERY_INSTANCE, ActionKind, Prefix
from kvproxy.features.lmcache.controller import CHUNK_TOKENS, LMCacheController, WireLookup
from kvproxy.features.lmcache.coordinator import LMCacheCoordinator
from kvproxy.features.lmcache.provider import Provider
from kvproxy.features.lmcache.settings import LMCacheSettings, ServiceKind, strategy_of
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.tools import ConnectResult, Tools, try_connect
from kvproxy.operate.doctor.trial import Trial


class _Layout(msgspec.Struct):
    layout_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """Result of a lookup of an engine's trial prompt, after LMCache had time to learn of it.

    `model` is the name it was looked up under, where names matter; `chunks` the whole chunks of the prompt."""

    holders: tuple[str, ...]  # instance ids
    model: str
    chunk_tokens: int
    chunks: int
    shape: str = ""  # of the controller's `layout_info`: `arrays` as LMCache's, `objects` of a stand-in


class LmcacheFacts:
    """Facts raise ClientError when the service cannot be asked."""

    where = "lmcache_endpoint"

    def __init__(self, settings: LMCacheSettings, *, tools: Tools) -> None:
        self.settings = settings
        self.tools = tools
        self.origin = Origin.parse(settings.lmcache_endpoint)
        http = tools.make_client(self.origin)
        url = str(self.origin)
        timeout_s = tools.timeouts.exchange_s
        self.api = Api(http, url, service="lmcache")
        self._controller = LMCacheController(http, url, places=strategy_of(settings), timeout_s=timeout_s)
        self._coordinator = LMCacheCoordinator(http, url, model=settings.directory_model, timeout_s=timeout_s)

    async def try_link(self) -> ConnectResult:
        """Try to connect to LMCache."""
        timeout_s = self.tools.timeouts.exchange_s
        return await self.tools.answers.ask_once("lmcache link", lambda: try_connect(self.origin, timeout_s=timeout_s))

    async def find_kind(self) -> ServiceKind:
        """Return the kind of service that answers, whatever the configuration names. Raises BadResponse if it is
        neither."""
        link = await self.try_link()
        if link.error is not None:
            raise ClientUnavailable(f"{self.where} cannot be connected to")
        return await self.tools.answers.ask_once("lmcache kind", self._recognise)

    async def make_provider(self) -> Provider:
        """Return the service as the proxy speaks to it."""
        if await self.find_kind() is ServiceKind.COORDINATOR:
            return self._coordinator
        return self._controller

    async def list_instances(self) -> frozenset[str]:
        """Return the registered instances; NotSupported if the service cannot list them."""
        provider = await self.make_provider()
        return await self.tools.answers.ask_once("lmcache instances", provider.instances)

    async def find_holders(self, engine: EngineFacts) -> LookupAnswer:
        """Return the holders of this engine's trial prompt. Raises ClientError also when the engine did not
        answer it."""
        return await self.tools.answers.ask_once(
            f"lmcache found {engine.cluster}/{engine.endpoint.id}", lambda: self._find(engine)
        )

    async def time_lookups(self, trial: Trial, *, times: int = 20) -> list[float]:
        """Seconds that lookups of this prompt take, one after another, as the proxy makes them."""
        provider = await self.make_provider()
        clock = self.tools.clock
        prefix = Prefix(token_array(list(trial.tokens)), trial.model)
        took = []
        for _ in range(times + 1):  # the first may have to open a connection
            started = clock()
            await provider.lookup(prefix)
            took.append(clock() - started)
        return took[1:]

    def expected_model(self, trial: Trial) -> str:
        """Return the name under which the proxy looks such a prompt up."""
        return self.settings.directory_model or trial.model

    async def has_evict_route(self) -> bool:
        """Return True if there is an `/evict`, by a method that has no effect."""
        try:
            await self.api.call("GET", "/evict", timeout_s=self.tools.timeouts.exchange_s)
        except NotSupported as error:
            return error.status != 404
        return True

    async def find_copying(self) -> str:
        """By which lever KV can be copied into an instance's memory; "": by none. Moves nothing."""
        if await self.find_kind() is ServiceKind.COORDINATOR:
            peers = [one.instance_id for one in await self._coordinator.list_instances() if one.p2p_advertised_url]
            usage = await self._coordinator.fetch_usage()
            modules = [module for one in usage.instances for module in one.modules]
            own_disks = any(module.tier == "l2" and module.backend != "p2p" for module in modules)
            levers = (
                "a shared store" if usage.shared_modules else "",
                "each other's memory" if peers else "",
                "their own disks" if own_disks else "",
            )
            found = " and ".join(lever for lever in levers if lever)
            return f"prefetches from {found}" if found else ""
        instances = sorted(await self.list_instances())
        if len(instances) < 2:
            return ""
        try:
            source, target = instances[:2]
            await self._controller.act(ActionKind.TRANSFER, target, Prefix(token_array([]), ""), source=source)
        except NotSupported:
            return ""
        return "/move copies between engines"

    async def _recognise(self) -> ServiceKind:
        try:
            if await self._coordinator.answers():
                return ServiceKind.COORDINATOR
            await self._controller.lookup(Prefix(token_array([]), ""))
        except (ClientTimeout, ClientUnavailable):
            raise
        except ClientError as error:
            raise BadResponse(f"{self.where} is neither LMCache's controller nor its coordinator") from error
        return ServiceKind.CONTROLLER

    async def _find(self, engine: EngineFacts) -> LookupAnswer:
        kind = await self.find_kind()
        trial = await engine.trials.try_generating()
        tokens = token_array(list(trial.tokens))
        timeouts = self.tools.timeouts
        for attempt in range(timeouts.lookup_tries):
            if attempt:
                await asyncio.sleep(timeouts.lookup_pause_s)
            if kind is ServiceKind.CONTROLLER:
                found = await self._ask_controller(tokens)
            else:
                root = (await engine.choose_model()).root or ""
                found = await self._ask_coordinator(tokens, self.expected_model(trial), root)
            if found.holders or not found.chunks:
                break
        return found

    async def _ask_controller(self, tokens: TokenIds) -> LookupAnswer:
        timeout_s = self.tools.timeouts.exchange_s
        body = body_with_tokens("tokens", tokens, {})
        raw = await self.api.call("POST", "/lookup", body=body, timeout_s=timeout_s)
        holders = self.api.decode(raw, WireLookup, "/lookup").read_holders()
        places = list(self.api.decode(raw, _Layout, "/lookup").layout_info.values())
        shape = "" if not places else "objects" if isinstance(places[0], dict) else "arrays"
        named = tuple(holder.instance_id for holder in holders if holder.tokens > 0)
        return LookupAnswer(named, "", CHUNK_TOKENS, len(tokens) // CHUNK_TOKENS, shape)

    async def _ask_coordinator(self, tokens: TokenIds, expected: str, root: str) -> LookupAnswer:
        """Under the name the proxy uses, else under the engine's own name of the model."""
        found = await self._in_directory(tokens, expected)
        if not found.holders and root != expected:
            other = await self._in_directory(tokens, root)
            found = other if other.holders else found
        return found

    async def _in_directory(self, tokens: TokenIds, model: str) -> LookupAnswer:
        answer = await self._coordinator.read_directory(Prefix(tokens, model), model=model)
        holders = tuple([one.instance_id for one in answer.holders if one.instance_id != EVERY_INSTANCE])
        return LookupAnswer(holders, model, answer.chunk_tokens, answer.chunks)
