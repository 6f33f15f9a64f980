"""The HTTP API of `lmcache coordinator`: exact holders of every chunk, pins, deletes, prefetches, memory usage."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.json_app import HttpError, JsonApp, detail_error, parse_body
from kvproxy.lab.simulator.lmcache_chunks import CHUNK_TOKENS, ChunkStore
from kvproxy.lab.simulator.tokenizer import hash_blocks


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """One chunk of one rank under one model and salt."""

    chunk: int
    model_name: str
    rank: int
    cache_salt: str

    @property
    def identity(self) -> int:
        """A number that stands for the whole key."""
        return hash((self.chunk, self.model_name, self.rank, self.cache_salt))

    def encode(self) -> dict[str, object]:
        """As it travels in JSON."""
        return {
            "chunk_hash_hex": f"{self.chunk:064x}",
            "model_name": self.model_name,
            "kv_rank": self.rank,
            "object_group_id": 0,
            "cache_salt": self.cache_salt,
        }


class MpServer:
    """One LMCache server (`lmcache server`): its memory tier and how the coordinator reaches it."""

    def __init__(self, instance_id: str, *, capacity_chunks: int, chunk_bytes: int, clock: Clock) -> None:
        self.instance_id = instance_id
        self.chunk_bytes = chunk_bytes
        self.store = ChunkStore(capacity_chunks, clock=clock)
        self.known: dict[int, ChunkKey] = {}
        self.down = False

    def admit(self, keys: Sequence[ChunkKey]) -> None:
        """Store the keys; what had to go is forgotten with them."""
        for key in keys:
            self.known[key.identity] = key
        self.store.admit([key.identity for key in keys])
        if len(self.known) > len(self.store):
            self.known = {identity: key for identity, key in self.known.items() if identity in self.store}

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Drop the keys that are here; how many were."""
        removed = self.store.remove([key.identity for key in keys])
        for key in keys:
            self.known.pop(key.identity, None)
        return removed

    def holds(self, key: ChunkKey) -> bool:
        """Return True if the key's bytes are here."""
        return key.identity in self.store

    @property
    def used_bytes(self) -> int:
        return len(self.store) * self.chunk_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.store.capacity_chunks * self.chunk_bytes

    def describe_placement(self) -> dict[str, object]:
        """Return this server as a holder."""
        return {
            "instance_id": self.instance_id,
            "incarnation": 1,
            "tier": "l1",
            "backend": "dram",
            "size_bytes": self.chunk_bytes,
            "shared": False,
        }


class Directory:
    """Registered servers. Stored chunks are also in the `pool`, a disk that all of them read, if there is one."""

    def __init__(self, pool: MpServer | None = None) -> None:
        self._servers: dict[str, MpServer] = {}
        self.pool = pool
        self._reporters: dict[int, str] = {}  # reporters of entries in the pool

    def store(self, server: MpServer, keys: Sequence[ChunkKey]) -> None:
        """Store chunks that the engine of `server` computed."""
        server.admit(keys)
        if self.pool is not None:
            for key in keys:
                self._reporters.setdefault(key.identity, server.instance_id)
            self.pool.admit(keys)
            self._reporters = {identity: self._reporters[identity] for identity in self.pool.known}

    def readable(self, server: MpServer, key: ChunkKey) -> bool:
        """Return True if the server can load it: from its own memory, from the pool, and without a pool from any
        other."""
        if server.holds(key) or self.pool is None:
            return bool(self.find_holders(key))
        return self.pool.holds(key)

    def describe_placements(self, key: ChunkKey) -> list[dict[str, object]]:
        """Every place of a key; a shared one under the id that reported it."""
        found = [one.describe_placement() for one in self.find_holders(key)]
        reporter = self._reporters.get(key.identity, "")
        if self.pool is not None and self.pool.holds(key):
            shared = {"instance_id": reporter, "tier": "l2", "backend": "fs_native", "shared": True}
            found.append({**self.pool.describe_placement(), **shared})
        return found

    def add(self, server: MpServer) -> None:
        self._servers[server.instance_id] = server

    def get(self, instance_id: str) -> MpServer | None:
        return self._servers.get(instance_id)

    def servers(self) -> list[MpServer]:
        """Return the servers, in order of registration."""
        return list(self._servers.values())

    def find_holders(self, key: ChunkKey) -> list[MpServer]:
        return [server for server in self.servers() if server.holds(key)]

    def all_keys(self) -> Iterator[ChunkKey]:
        """Every key with a holder, once."""
        seen: set[int] = set()
        for server in (*self.servers(), *(() if self.pool is None else (self.pool,))):
            for identity, key in server.known.items():
                if identity not in seen and server.holds(key):
                    seen.add(identity)
                    yield key


_MOST_TOKENS = 1_000_000


class _Tokens(BaseModel):
    model_name: str
    world_size: int
    token_ids: list[int] | None = None
    cache_salt: str | None = None


class _Prefetch(_Tokens):
    instance_id: str


class _Delete(_Prefetch):
    tier: str | None = None
    force: bool | None = None


class _Lookup(BaseModel):
    keys: list[Any] | None = None
    token_ids: list[int] | None = None
    model_name: str | None = None
    world_size: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """`instances` are registered from the start. With `shared_chunks` all of them read one disk of that size; without,
    each other's memory. A prefetch takes `prefetch_s`."""

    instances: tuple[str, ...] = ()
    capacity_chunks: int = 4096
    chunk_bytes: int = 256 * 131_072
    kept_prefetches: int = 1000
    chunk_tokens: int = CHUNK_TOKENS
    shared_chunks: int = 0
    prefetch_s: float = 0.0


class CoordinatorApp(JsonApp):
    """Serve it. Engines report what they store through `admit`. Pins are fleet-wide and counted."""

    def __init__(
        self, settings: CoordinatorSettings, *, clock: Clock = time.monotonic, rng: random.Random | None = None
    ) -> None:
        super().__init__()
        self._settings = settings
        self._clock = clock
        self._rng = rng or random.Random()
        make_server = partial(MpServer, chunk_bytes=settings.chunk_bytes, clock=clock)
        pool = make_server("", capacity_chunks=settings.shared_chunks) if settings.shared_chunks else None
        self.directory = Directory(pool)
        self._pins: Counter[ChunkKey] = Counter()
        self._prefetches: dict[tuple[str, str], tuple[float, int, int]] = {}  # end, keys found, keys requested
        for instance_id in settings.instances:
            self.directory.add(make_server(instance_id, capacity_chunks=settings.capacity_chunks))
        self.answer("POST", "/directory/lookup", self._lookup)
        self.answer("GET", "/directory/stats", self._stats)
        self.answer("GET", "/instances", self._list)
        self.answer("GET", "/instances/usage", self._fleet_usage)
        self.answer("POST", "/cache/pins", self._pin)
        self.answer("DELETE", "/cache/pins", self._unpin)
        self.answer("POST", "/cache/delete", self._delete)
        self.answer("POST", "/cache/prefetches", self._prefetch)
        self.answer("GET", "/cache/prefetches/{instance_id}/{request_id}", self._prefetch_status)
        self.answer("GET", "/sim/state", self._sim_state)

    def admit(
        self, instance_id: str, tokens: Sequence[int], *, model_name: str, world_size: int = 1, cache_salt: str = ""
    ) -> None:
        """Record a prompt stored by an engine behind `instance_id`; an unregistered server is ignored."""
        server = self.directory.get(instance_id)
        if server is not None:
            self.directory.store(server, self._make_keys(tokens, model_name, world_size, cache_salt))

    async def _pin(self, request: Request) -> Any:
        body = await parse_body(request, _Tokens)
        keys = self._parse_keys(body)
        self._pins.update(keys)
        return {"requested": len(keys) // body.world_size, "affected": len(keys), "status": "pinned"}

    async def _unpin(self, request: Request) -> Any:
        """Take one pin off each key that has one."""
        body = await parse_body(request, _Tokens)
        keys = self._parse_keys(body)
        held = [key for key in keys if self._pins[key] > 0]
        self._pins.subtract(held)
        self._pins = +self._pins
        return {"requested": len(keys) // body.world_size, "affected": len(held), "status": "unpinned"}

    async def _delete(self, request: Request) -> Any:
        """Remove a prompt's chunks from one server."""
        body = await parse_body(request, _Delete)
        server = self._reachable(body.instance_id)
        keys = self._parse_keys(body)
        tier = body.tier or "all"
        pool = self.directory.pool
        removed = 0 if tier == "l2" else server.remove(keys)
        if pool is not None and tier != "l1":
            removed += pool.remove(keys)
        elif tier == "all":  # without L2 the real coordinator deletes in L1 and then answers so
            raise detail_error(502, f"instance {server.instance_id} rejected the delete")
        return {
            "instance_id": server.instance_id,
            "requested": len(keys) // body.world_size,
            "affected": removed,
            "skipped": 0,
            "status": "deleted" if removed else "noop",
        }

    async def _prefetch(self, request: Request) -> Any:
        """Copy the beginning of a prompt that one server can read into its memory."""
        body = await parse_body(request, _Prefetch)
        server = self._reachable(body.instance_id)
        keys = self._parse_keys(body)
        chunks = len(keys) // body.world_size
        if not chunks:
            return {"instance_id": server.instance_id, "request_id": "", "chunks": 0, "status": "noop"}
        found = list(takewhile(lambda key: self.directory.readable(server, key), keys))
        server.admit(found)
        request_id = f"{self._rng.getrandbits(128):032x}"
        if len(self._prefetches) >= self._settings.kept_prefetches:
            self._prefetches.pop(next(iter(self._prefetches)))
        over_at = self._clock() + self._settings.prefetch_s
        self._prefetches[server.instance_id, request_id] = over_at, len(found), len(keys)
        return {"instance_id": server.instance_id, "request_id": request_id, "chunks": chunks, "status": "submitted"}

    async def _prefetch_status(self, request: Request) -> Any:
        """Answer; the first poll that sees completion forgets the job."""
        instance_id = request.path_params["instance_id"]
        request_id = request.path_params["request_id"]
        self._reachable(instance_id)
        job = self._prefetches.get((instance_id, request_id))
        if job is None:
            why = "already completed or never submitted"
            raise detail_error(404, f"unknown prefetch request_id='{request_id}' ({why})")
        over_at, found, total = job
        if self._clock() < over_at:
            return {"request_id": request_id, "status": "pending"}
        del self._prefetches[instance_id, request_id]
        return {"request_id": request_id, "status": "completed", "found_keys": found, "total_keys": total}

    async def _lookup(self, request: Request) -> Any:
        body = await parse_body(request, _Lookup)
        if body.keys or body.token_ids is None or not body.model_name:
            text = "Value error, supply exactly one of 'keys' or 'token_ids' with 'model_name'"
            problem = {"type": "value_error", "loc": ["body"], "msg": text, "input": body.model_dump()}
            raise HttpError(422, {"detail": [problem]})
        keys = self._parse_keys(body)
        results = [
            {
                "key": key.encode(),
                "placements": self.directory.describe_placements(key),
                "token_ids": [],
                "access_count": 0,
            }
            for key in keys
        ]
        return {"chunks": len(keys) // (body.world_size or 1), "results": results}

    async def _stats(self, _request: Request) -> Any:
        held = {server.instance_id: len(server.store) for server in self.directory.servers()}
        pool = self.directory.pool
        blend = ("num_contents", "num_chunks", "num_claims", "num_namespaces", "table_size")
        return {
            "num_keys": sum(1 for _ in self.directory.all_keys()),
            "num_placements": sum(held.values()) + (0 if pool is None else len(pool.store)),
            "l1_keys_by_instance": held,
            "blend": dict.fromkeys(blend, 0),
            "l1_count": sum(held.values()),
            "l1_size_bytes": sum(server.used_bytes for server in self.directory.servers()),
            "l2_count": 0 if pool is None else len(pool.store),
            "l2_size_bytes": 0 if pool is None else pool.used_bytes,
        }

    async def _list(self, _request: Request) -> Any:
        return {"instances": [_described(server) for server in self.directory.servers()]}

    async def _fleet_usage(self, _request: Request) -> Any:
        pool = self.directory.pool
        disk = {"tier": "l2", "backend": "fs_native", "shared": True, "capacity_bytes": 0, "usage_ratio": None}
        shared = [] if pool is None else [{**disk, "used_bytes": pool.used_bytes}]
        return {"instances": [_usage(server) for server in self.directory.servers()], "shared_modules": shared}

    async def _sim_state(self, _request: Request) -> Any:
        return {"calls": dict(self.calls), "pins": self._pins.total()}

    def _reachable(self, instance_id: str) -> MpServer:
        server = self.directory.get(instance_id)
        if server is None:
            raise detail_error(404, f"instance {instance_id} is not registered")
        if server.down:
            raise detail_error(502, f"instance {instance_id} is unreachable")
        return server

    def _parse_keys(self, body: _Tokens | _Lookup) -> list[ChunkKey]:
        """Return the keys of a body's tokens, or the coordinator's error about them."""
        tokens = body.token_ids or []
        model_name = body.model_name or ""
        if len(tokens) > _MOST_TOKENS:
            raise detail_error(400, f"token_ids exceeds the cap of {_MOST_TOKENS}")
        if "@" in model_name:
            raise detail_error(400, "model_name must not contain '@'")
        if tokens and min(tokens) < 0:
            raise detail_error(500, "Internal Server Error")
        return self._make_keys(tokens, model_name, body.world_size or 1, body.cache_salt or "")

    def _make_keys(self, tokens: Sequence[int], model_name: str, world_size: int, cache_salt: str) -> list[ChunkKey]:
        """Return the keys of the full chunks, chunk by chunk and rank by rank."""
        return [
            ChunkKey(chunk, model_name, rank, cache_salt)
            for chunk in hash_blocks(tokens, self._settings.chunk_tokens)
            for rank in range(world_size)
        ]


def _described(server: MpServer) -> dict[str, Any]:
    return {
        "instance_id": server.instance_id,
        "ip": "127.0.0.1",
        "http_port": 8080,
        "metadata": {},
        "p2p_advertised_url": "",
        "mq_port": 0,
    }


def _usage(server: MpServer) -> dict[str, Any]:
    module = {
        "tier": "l1",
        "backend": "dram",
        "shared": False,
        "used_bytes": server.used_bytes,
        "capacity_bytes": server.capacity_bytes,
        "usage_ratio": server.used_bytes / server.capacity_bytes,
    }
    return {
        "instance_id": server.instance_id,
        "registered": True,
        "declared_capacity": True,
        "modules": [module],
    }
