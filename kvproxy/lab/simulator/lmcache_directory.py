"""Directory of the coordinator of LMCache's multi-process mode: every holder of every chunk, per model and salt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.lmcache_chunks import ChunkStore


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
        """Bytes of what is held."""
        return len(self.store) * self.chunk_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes it may hold."""
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
        """Register a server."""
        self._servers[server.instance_id] = server

    def get(self, instance_id: str) -> MpServer | None:
        """Return a server by id."""
        return self._servers.get(instance_id)

    def servers(self) -> list[MpServer]:
        """Return the servers, in order of registration."""
        return list(self._servers.values())

    def find_holders(self, key: ChunkKey) -> list[MpServer]:
        """Return the servers that hold the key."""
        return [server for server in self.servers() if server.holds(key)]

    def all_keys(self) -> Iterator[ChunkKey]:
        """Every key with a holder, once."""
        seen: set[int] = set()
        for server in (*self.servers(), *(() if self.pool is None else (self.pool,))):
            for identity, key in server.known.items():
                if identity not in seen and server.holds(key):
                    seen.add(identity)
                    yield key
