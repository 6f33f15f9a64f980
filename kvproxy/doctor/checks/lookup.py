"""Does LMCache find what an engine has just computed?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.config.kvcache_schema import Provider
from kvproxy.doctor.checks.chat import TRIAL_CALLS
from kvproxy.doctor.engine import Engine
from kvproxy.doctor.finding import Finding, ok, problem, warning
from kvproxy.doctor.lmcache import Found, LmCache
from kvproxy.doctor.site import known
from kvproxy.errors import BadResponse, ClientError

LOOKUP_CALLS = TRIAL_CALLS + 8

_HASHES = (
    "PYTHONHASHSEED is not the same for the controller and every engine: set PYTHONHASHSEED=0 for all, restart them",
    "the controller's environment cannot import vLLM, or not the same one: its first hash differs then",
    "engines hash with pre_caching_hash_algorithm sha256 or sha256_cbor: only `builtin` matches the controller",
    "engines have a chunk_size other than 256: the controller looks up nothing else",
    "LMCache before 0.4.1 on Python before 3.12 hashes differently in every process: upgrade it",
)
_EMPTY = (
    "vLLM runs without the connector: --kv-transfer-config with LMCacheConnectorV1 (controller) or LMCacheMPConnector",
    "the engine does not report what it stores: enable_controller and its URLs, or --coordinator-event-reporting",
    "LMCache has just been (re)started and the engine is frozen until the first full sync: wait, then look again",
    "the engine runs without LMCache's memory: local_cpu and max_local_cpu_size, or --l1-size-gb",
)


@dataclass(frozen=True, slots=True)
class LookupCheck:
    """One engine's trial prompt."""

    engine: Engine
    lmcache: LmCache

    name = "lookup"
    calls = LOOKUP_CALLS

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        await self.lmcache.kind()
        trial = await self.engine.trial()
        if not trial.tokens or not await self._registered():
            return []  # told with tokenize, or with the instance ids
        try:
            found = await self.lmcache.found(self.engine)
        except BadResponse as error:
            fix = "is it LMCache, and of a version up to 0.5? A proxy in between may have changed its answers"
            return [problem(self.lmcache.where, f"answers lookups in an unknown shape: {error}", fix)]
        except ClientError as error:
            return [problem(self.lmcache.where, f"does not answer lookups: {error}", "read LMCache's log")]
        if found.holders:
            return [self._held(found, self.lmcache.expected_model(trial))]
        if not found.chunks:
            return []  # told with the chunk size
        return [await self._empty(found)]

    async def _registered(self) -> bool:
        """Also when the service cannot tell."""
        try:
            return self.engine.instance_id in await self.lmcache.instances()
        except ClientError:
            return True

    def _held(self, found: Found, expected_model: str) -> Finding:
        own = self.engine.instance_id
        if own not in found.holders:
            what = f"LMCache holds its prompts under {', '.join(found.holders)}, not under {own!r}: hits lead elsewhere"
            return problem(self.where, what, f"set `instance_id: {found.holders[0]}`; are two endpoints swapped?")
        if found.model not in ("", expected_model):
            what = f"LMCache holds its prompts for the model {found.model!r}, and lookups ask for {expected_model!r}"
            return problem(self.where, what, f"set `directory_model: {found.model}` of the kvcache filter")
        shapes = {"arrays": ", in LMCache's own shape", "objects": ", in Pixiu's shape: no real LMCache"}
        return ok(self.where, f"LMCache finds what it computed{shapes.get(found.shape, '')}")

    async def _empty(self, found: Found) -> Finding:
        provider = await self.lmcache.provider()
        try:
            indexed: int | None = await provider.indexed_chunks()
        except ClientError:
            indexed = None
        if indexed == 0:
            what = "LMCache's index is empty although the engine has just computed a long prompt"
            return problem(self.where, what, "let the engine store in LMCache; see the causes", _EMPTY)
        if await self.lmcache.kind() is Provider.COORDINATOR:
            what = f"LMCache does not find a prompt that the engine has just computed, under the model {found.model!r}"
            causes = ("the directory has it under another name: set `directory_model` to vLLM's --model", *_EMPTY)
            return problem(self.where, what, "see the causes", causes)
        what = "LMCache does not find a prompt that the engine has just computed"
        what += ", though its index is not empty" if indexed else ""
        return problem(self.where, what, "make controller and engines hash alike; see the causes", (*_HASHES, *_EMPTY))


@dataclass(frozen=True, slots=True)
class BudgetCheck:
    """LookupClient in a row, against the time that the routing path gives them."""

    engines: Sequence[Engine]
    lmcache: LmCache

    name = "lookup time"
    calls = LOOKUP_CALLS + 20

    where = LmCache.where

    async def find(self) -> Sequence[Finding]:
        trials = await known(self.engines, lambda engine: engine.trial())
        trial = next((one for one in trials.values() if one.tokens), None)
        if trial is None:
            return []
        samples = await self.lmcache.time_lookups(trial)
        return [budget_finding(self.where, samples, trial.tokenize_s, self.lmcache.settings.lookup_routing_timeout)]


#: Fewer samples have no 99th percentile.
_FOR_P99 = 200


def budget_finding(where: str, lookups_s: Sequence[float], tokenize_s: float, budget_s: float) -> Finding:
    """The verdict on how long lookups took; a prompt that is not remembered is tokenized within the same budget."""
    ordered = sorted(lookups_s)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1) + 0.5)]  # of a few: the slowest
    slowest = "p99" if len(ordered) >= _FOR_P99 else "the slowest"
    took = f"{len(ordered)} lookups took {_ms(p50)} (median) and {_ms(p99)} ({slowest}) of {_ms(budget_s)}"
    fix = f"bring LMCache nearer to the proxy, or set `lookup_routing_timeout` to {_ms(2 * p99)} or more"
    if p50 > budget_s:
        return problem(where, f"{took}: they are never in time", fix)
    if p99 > budget_s:
        return warning(where, f"{took}: some are late", fix)
    if p50 + tokenize_s > budget_s:
        what = f"{took}, and /tokenize {_ms(tokenize_s)} more: prompts seen first are looked up late"
        return warning(where, what, f"set `lookup_routing_timeout` to {_ms(2 * (p99 + tokenize_s))} or more")
    return ok(where, took)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
