"""The coordinator of LMCache's multi-process mode, over HTTP. Its `model` is always vLLM's `--model`, not a served
name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from kvproxy.base.errors import BadResponse, ClientError, NotSupported, Refused, UnknownInstance
from kvproxy.base.types import Tier
from kvproxy.cache.clients.api import Api
from kvproxy.cache.clients.tokens import body_with_tokens
from kvproxy.cache.store import EVERY_INSTANCE, ActionKind, Holder, Prefix, TierMemory
from kvproxy.features.lmcache.provider import COORDINATOR, Effect

T = TypeVar("T")

#: LMCache's default chunk; used when an answer leaves the real size open.
DEFAULT_CHUNK_TOKENS = 256
#: Directory answers repeat each known chunk's token ids; objects and lists in them: three and two for each chunk and
#: rank, and one more for each further placement.
_MAX_DIRECTORY_BYTES = 8 << 20
_MAX_DIRECTORY_VALUES = 65_536
#: Longer answers are read beside the event loop.
_LONG_BYTES = 1 << 16
#: Pauses between polls of a prefetch: the first one, doubling up to the last. 16 MiB take 30 to 70 ms.
FIRST_POLL_S = 0.02
LAST_POLL_S = 0.2


class _Key(msgspec.Struct):
    chunk_hash_hex: str


class _Placement(msgspec.Struct):
    instance_id: str
    tier: Literal["l1", "l2"]
    shared: bool = False


class _Result(msgspec.Struct):
    key: _Key
    placements: list[_Placement] = []
    token_ids: msgspec.Raw = msgspec.Raw(b"[]")


class WireDirectory(msgspec.Struct):
    """`/directory/lookup`: one result a chunk and rank, in order."""

    chunks: int
    results: list[_Result] = []


class Directory(NamedTuple):
    """Whole chunks of one prompt, and which instances hold leading ones: exact, all of them, for one model and salt."""

    chunks: int
    chunk_tokens: int
    holders: list[Holder]


class Instance(msgspec.Struct, frozen=True):
    """A registered MP server."""

    instance_id: str
    p2p_advertised_url: str = ""  # where other servers read its memory; "": they do not


class MemoryModule(msgspec.Struct, frozen=True):
    """One compartment of memory."""

    tier: str
    backend: str
    used_bytes: int
    capacity_bytes: int
    usage_ratio: float | None = None  # None: no capacity declared
    shared: bool = False


class InstanceUsage(msgspec.Struct, frozen=True):
    """Memory of one instance: a real pressure signal."""

    instance_id: str
    modules: tuple[MemoryModule, ...] = ()


class FleetUsage(msgspec.Struct, frozen=True):
    """Memory of every instance, and of pools they share."""

    instances: tuple[InstanceUsage, ...] = ()
    shared_modules: tuple[MemoryModule, ...] = ()


class Prefetch(msgspec.Struct, frozen=True):
    """A submitted warm-up; `request_id` is empty when there was nothing to do."""

    request_id: str = ""
    chunks: int = 0


class _Progress(msgspec.Struct):
    """Progress of a warm-up: `pending`, then `completed` once; after that the job is unknown."""

    status: str
    found_keys: int | None = None


class _Change(msgspec.Struct):
    """Result of a pin, unpin or delete, in keys: 0 means no effect."""

    affected: int = 0


class _Stats(msgspec.Struct):
    num_keys: int


class _Instances(msgspec.Struct):
    instances: tuple[Instance, ...]


class LMCacheCoordinator:
    """The coordinator: exact holders, real pins, deletion of one prefix, memory by instance. Every method raises
    ClientError and nothing else; nothing is retried here. `model`: the directory's name for it, where that differs from
    the request's."""

    source = COORDINATOR
    supports = frozenset({ActionKind.PIN, ActionKind.UNPIN, ActionKind.EVICT, ActionKind.TRANSFER})

    def __init__(self, http: httpx.AsyncClient, base_url: str, *, model: str = "", timeout_s: float = 2.0) -> None:
        self.copies = False  # until its instances are listed, and read each other's memory
        self._api = Api(http, base_url, service="lmcache coordinator")
        self._model = model
        self._timeout_s = timeout_s

    async def lookup(self, prefix: Prefix) -> list[Holder]:
        return (await self.read_directory(prefix)).holders

    async def read_directory(self, prefix: Prefix, *, model: str = "") -> Directory:
        """Look up every whole chunk of a prompt (at most a million tokens), by this name of the model if given one."""
        path = "/directory/lookup"
        body = self._body(prefix, {"model_name": model} if model else {})
        raw = await self._call("POST", path, body, max_bytes=_MAX_DIRECTORY_BYTES)

        def read() -> Directory:
            answer = self._api.decode(raw, WireDirectory, path, max_values=_MAX_DIRECTORY_VALUES)
            return directory_of(answer, prompt_tokens=len(prefix.tokens))

        return read() if len(raw) <= _LONG_BYTES else await asyncio.to_thread(read)

    async def act(self, kind: ActionKind, instance_id: str, prefix: Prefix, *, source: str = "") -> Effect:
        """Pin or unpin the prompt's L2 keys, fleet-wide and counted; drop its L1 keys at one instance; or load it there
        from the server's sources (a shared store, its disk, its peers), which names the tokens found: none, if none of
        them has any."""
        match kind:
            case ActionKind.TRANSFER:
                return await self._transfer(instance_id, prefix)
            case ActionKind.PIN | ActionKind.UNPIN:
                method = "POST" if kind is ActionKind.PIN else "DELETE"
                change = await self._ask(method, "/cache/pins", _Change, self._body(prefix, {}))
            case ActionKind.EVICT:
                others = {"instance_id": instance_id, "tier": "l1", "force": False}
                change = await self._ask("POST", "/cache/delete", _Change, self._body(prefix, others))
            case _:
                raise NotSupported(f"lmcache coordinator: no {kind}", status=404)
        return Effect(change.affected)

    async def _transfer(self, instance_id: str, prefix: Prefix) -> Effect:
        """Wait for the end of a prefetch, which is reported once."""
        tokens = len(prefix.tokens)
        job = await self.prefetch(instance_id, prefix)
        if not job.request_id:
            return Effect(0)  # shorter than a chunk
        path = f"/cache/prefetches/{_segment(instance_id)}/{_segment(job.request_id)}"
        pause_s = FIRST_POLL_S
        while (seen := await self._ask("GET", path, _Progress)).status == "pending":
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)
        return Effect(min(max(0, seen.found_keys or 0) * chunk_tokens_of(job.chunks, tokens), tokens))

    async def prefetch(self, instance_id: str, prefix: Prefix) -> Prefetch:
        """Start loading the prompt's chunks into one instance's memory."""
        return await self._ask("POST", "/cache/prefetches", Prefetch, self._body(prefix, {"instance_id": instance_id}))

    async def list_instances(self) -> Sequence[Instance]:
        """Return registered MP servers."""
        return (await self._ask("GET", "/instances", _Instances)).instances

    async def instances(self) -> frozenset[str]:
        listed = await self.list_instances()
        self.copies = any(one.p2p_advertised_url for one in listed)
        return frozenset(one.instance_id for one in listed)

    async def indexed_chunks(self) -> int:
        return (await self._ask("GET", "/directory/stats", _Stats)).num_keys

    async def answers(self) -> bool:
        """Return True if a coordinator answers there; ClientError when nothing does."""
        try:
            await self.indexed_chunks()
        except (Refused, BadResponse):
            return False
        return True

    async def fetch_usage(self) -> FleetUsage:
        """Memory of the whole fleet."""
        return await self._ask("GET", "/instances/usage", FleetUsage)

    async def memory(self) -> Sequence[TierMemory]:
        usage = await self.fetch_usage()
        with contextlib.suppress(ClientError):
            await self.instances()  # servers that came meanwhile may read each other's memory
        own = [(one.instance_id, module) for one in usage.instances for module in one.modules]
        shared = [(EVERY_INSTANCE, module) for module in usage.shared_modules]
        found: dict[tuple[str, Tier], TierMemory] = {}
        for name, module in (*own, *shared):
            tier = _tier_of(module)
            found[name, tier] = _with_module(found.get((name, tier), TierMemory(name, tier, 0, 0, None)), module)
        return tuple(found.values())

    def _body(self, prefix: Prefix, others: Mapping[str, Any]) -> bytes:
        named = {"model_name": self._model or prefix.model, "world_size": 1, "cache_salt": prefix.cache_salt}
        return body_with_tokens("token_ids", prefix.tokens, {**named, **others})

    async def _ask(self, method: str, path: str, answer: type[T], body: bytes | None = None) -> T:
        return self._api.decode(await self._call(method, path, body), answer, path)

    async def _call(self, method: str, path: str, body: bytes | None, *, max_bytes: int = 1 << 20) -> bytes:
        """Return the answer. UnknownInstance: a 404 about a requested object; a missing route is NotSupported."""
        try:
            return await self._api.call(method, path, timeout_s=self._timeout_s, body=body, max_bytes=max_bytes)
        except Refused as error:
            if error.status == 404 and not isinstance(error, NotSupported):
                raise UnknownInstance(str(error), status=404) from error
            raise


@dataclass(slots=True)
class _Chunk:
    """Holders of one chunk: the instances that have every rank of it."""

    l1: set[str]
    own: set[str]
    shared: bool


def directory_of(answer: WireDirectory, *, prompt_tokens: int) -> Directory:
    """`answer` for a prompt of `prompt_tokens` tokens, reduced to contiguous prefixes by instance."""
    chunks = _chunks(answer.results)
    size = _chunk_tokens(answer, prompt_tokens)
    named = dict.fromkeys(name for chunk in chunks for name in chunk.own)
    found = [_held(chunks, name, size) for name in named]
    if shared := _leading(chunk.shared for chunk in chunks) * size:
        found.append(Holder(EVERY_INSTANCE, shared, True, ((Tier.SHARED, shared),)))
    return Directory(answer.chunks, size, [one for one in found if one.tokens])


def _chunks(results: Sequence[_Result]) -> list[_Chunk]:
    """Return the results of each chunk's ranks put together, in order. Hashes are chained: within one prompt none
    repeats."""
    chunks: dict[str, _Chunk] = {}
    for result in results:
        l1 = {p.instance_id for p in result.placements if p.tier == "l1" and not p.shared}
        own = {p.instance_id for p in result.placements if not p.shared}
        shared = any(p.shared for p in result.placements)
        known = chunks.get(result.key.chunk_hash_hex)
        if known is None:
            chunks[result.key.chunk_hash_hex] = _Chunk(l1, own, shared)
        else:
            known.l1 &= l1
            known.own &= own
            known.shared &= shared
    return list(chunks.values())


def _held(chunks: Sequence[_Chunk], name: str, size: int) -> Holder:
    """Return the leading chunks that one instance can load: from its memory, its own disk or pool, or pools that every
    instance shares."""
    count = _leading(chunk.shared or name in chunk.own for chunk in chunks)
    disk = sum(name in chunk.own - chunk.l1 for chunk in chunks[:count])
    shared = sum(name not in chunk.own for chunk in chunks[:count])
    by_tier = ((Tier.HOST, count - disk - shared), (Tier.DISK, disk), (Tier.SHARED, shared))
    lower = tuple([(tier, size * number) for tier, number in by_tier if number]) if disk or shared else ()
    return Holder(name, size * count, True, lower)


def _leading(held: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, held))


def _chunk_tokens(answer: WireDirectory, prompt_tokens: int) -> int:
    """Return the tokens of a chunk: from a known chunk's ids, else bounded by how many whole chunks the prompt has."""
    told = next((commas for each in answer.results if (commas := bytes(each.token_ids).count(b","))), None)
    return chunk_tokens_of(answer.chunks, prompt_tokens) if told is None else told + 1


def chunk_tokens_of(chunks: int, prompt_tokens: int) -> int:
    """Return the tokens of a chunk, from a prompt and its number of whole chunks."""
    if chunks <= 0:
        return DEFAULT_CHUNK_TOKENS
    most = prompt_tokens // chunks
    least = prompt_tokens // (chunks + 1) + 1
    if least <= DEFAULT_CHUNK_TOKENS <= most:
        return DEFAULT_CHUNK_TOKENS
    power = 1 << (most.bit_length() - 1) if most > 0 else 0
    return power if power >= least else most


def _segment(name: str) -> str:
    """Return a path segment; ids may hold slashes."""
    return quote(name, safe="")


def _tier_of(module: MemoryModule) -> Tier:
    if module.shared:
        return Tier.SHARED
    return Tier.HOST if module.tier == "l1" else Tier.DISK


def _with_module(memory: TierMemory, module: MemoryModule) -> TierMemory:
    """Both together, as full as the fuller one is."""
    used_bytes = memory.used_bytes + module.used_bytes
    capacity_bytes = memory.capacity_bytes + module.capacity_bytes
    shares = [share for share in (memory.share, module.usage_ratio) if share is not None]
    return TierMemory(memory.instance_id, memory.tier, used_bytes, capacity_bytes, max(shares, default=None))
