"""Actions of the coordinator: pins, deletes, prefetches."""

from __future__ import annotations

import random
from collections import Counter
from itertools import takewhile
from typing import Any

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.http_call import Request, detail_error
from kvproxy.lab.simulator.lmcache_chunks import CHUNK_TOKENS
from kvproxy.lab.simulator.lmcache_directory import ChunkKey, Directory, MpServer, make_keys

_TOKENS = {"model_name": str, "world_size": int, "token_ids?": list, "cache_salt?": str}
_MOST_TOKENS = 1_000_000


class CacheActions:
    """Handlers of `/cache/*`."""

    def __init__(
        self,
        directory: Directory,
        *,
        rng: random.Random,
        clock: Clock,
        kept_prefetches: int,
        chunk_tokens: int = CHUNK_TOKENS,
        prefetch_s: float = 0.0,
    ) -> None:
        self._directory = directory
        self._chunk_tokens = chunk_tokens
        self._rng = rng
        self._kept_prefetches = kept_prefetches
        self._pins: Counter[ChunkKey] = Counter()
        self._clock = clock
        self._prefetch_s = prefetch_s
        self._prefetches: dict[tuple[str, str], tuple[float, int, int]] = {}  # end, keys found, keys requested

    @property
    def pins(self) -> int:
        """Active pins over all keys."""
        return sum(self._pins.values())

    async def pin(self, request: Request) -> Any:
        """Pins are fleet-wide and counted."""
        body = request.parse_body(_TOKENS)
        keys = parse_keys(body, chunk_tokens=self._chunk_tokens)
        self._pins.update(keys)
        return {"requested": len(keys) // body["world_size"], "affected": len(keys), "status": "pinned"}

    async def unpin(self, request: Request) -> Any:
        """Take one pin off each key that has one."""
        body = request.parse_body(_TOKENS)
        keys = parse_keys(body, chunk_tokens=self._chunk_tokens)
        held = [key for key in keys if self._pins[key] > 0]
        self._pins.subtract(held)
        self._pins = +self._pins
        return {"requested": len(keys) // body["world_size"], "affected": len(held), "status": "unpinned"}

    async def list_pins(self, request: Request) -> Any:
        """Return what is pinned, page by page."""
        model = request.query.get("model_name", "")
        salt = request.query.get("cache_salt", "")
        rows = [
            {"key": key.encode(), "pin_count": count}
            for key, count in self._pins.items()
            if model in ("", key.model_name) and salt in ("", key.cache_salt)
        ]
        return {"total": len(rows), "pins": paginate(request, rows)}

    async def delete(self, request: Request) -> Any:
        """Remove a prompt's chunks from one server."""
        body = request.parse_body({**_TOKENS, "instance_id": str, "tier?": str, "force?": bool})
        server = self._reachable(body["instance_id"])
        keys = parse_keys(body, chunk_tokens=self._chunk_tokens)
        tier = body.get("tier") or "all"
        pool = self._directory.pool
        removed = 0 if tier == "l2" else server.remove(keys)
        if pool is not None and tier != "l1":
            removed += pool.remove(keys)
        elif tier == "all":  # without L2 the real coordinator deletes in L1 and then answers so
            raise detail_error(502, f"instance {server.instance_id} rejected the delete")
        status = "deleted" if removed else "noop"
        requested = len(keys) // body["world_size"]
        return {
            "instance_id": server.instance_id,
            "requested": requested,
            "affected": removed,
            "skipped": 0,
            "status": status,
        }

    async def prefetch(self, request: Request) -> Any:
        """Copy the beginning of a prompt that one server can read into its memory."""
        body = request.parse_body({**_TOKENS, "instance_id": str})
        server = self._reachable(body["instance_id"])
        keys = parse_keys(body, chunk_tokens=self._chunk_tokens)
        chunks = len(keys) // body["world_size"]
        if not chunks:
            return {"instance_id": server.instance_id, "request_id": "", "chunks": 0, "status": "noop"}
        found = list(takewhile(lambda key: self._directory.readable(server, key), keys))
        server.admit(found)
        request_id = f"{self._rng.getrandbits(128):032x}"
        if len(self._prefetches) >= self._kept_prefetches:
            self._prefetches.pop(next(iter(self._prefetches)))
        over_at = self._clock() + self._prefetch_s
        self._prefetches[server.instance_id, request_id] = over_at, len(found), len(keys)
        return {"instance_id": server.instance_id, "request_id": request_id, "chunks": chunks, "status": "submitted"}

    async def prefetch_status(self, request: Request) -> Any:
        """Return the first poll that sees completion forgets the job."""
        instance_id = request.path_values["instance_id"]
        request_id = request.path_values["request_id"]
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

    def require_server(self, instance_id: str) -> MpServer:
        """Return a registered server, or a 404."""
        server = self._directory.get(instance_id)
        if server is None:
            raise detail_error(404, f"instance {instance_id} is not registered")
        return server

    def _reachable(self, instance_id: str) -> MpServer:
        server = self.require_server(instance_id)
        if server.down:
            raise detail_error(502, f"instance {instance_id} is unreachable")
        return server


def parse_keys(body: dict[str, Any], *, chunk_tokens: int = CHUNK_TOKENS) -> list[ChunkKey]:
    """Return the keys of a body's tokens, or the coordinator's error about them."""
    tokens = body.get("token_ids") or []
    if len(tokens) > _MOST_TOKENS:
        raise detail_error(400, f"token_ids exceeds the cap of {_MOST_TOKENS}")
    if "@" in body["model_name"]:
        raise detail_error(400, "model_name must not contain '@'")
    if tokens and min(tokens) < 0:
        raise detail_error(500, "Internal Server Error")
    return make_keys(
        tokens,
        model_name=body["model_name"],
        world_size=body.get("world_size") or 1,
        cache_salt=body.get("cache_salt") or "",
        chunk_tokens=chunk_tokens,
    )


def decode_key(key: dict[str, Any]) -> ChunkKey:
    """Return a key as it came in JSON."""
    return ChunkKey(int(key["chunk_hash_hex"], 16), key["model_name"], key["kv_rank"], key.get("cache_salt", ""))


def paginate(request: Request, rows: list[Any]) -> list[Any]:
    """Return the rows that `offset` and `limit` ask for."""
    offset = int(request.query.get("offset", "0"))
    limit = int(request.query.get("limit", "1000"))
    return rows[offset : offset + limit]
