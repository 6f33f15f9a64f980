"""The HTTP API of `lmcache coordinator`: exact holders of every chunk, pins, deletes, prefetches, memory usage."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.coordinator_actions import CacheActions, decode_key, paginate, parse_keys
from kvproxy.lab.simulator.http_call import HttpError, JsonApp, Request
from kvproxy.lab.simulator.lmcache_chunks import CHUNK_TOKENS
from kvproxy.lab.simulator.lmcache_directory import Directory, MpServer, make_keys


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """`instances` are registered from the start and need no heartbeat unless `instance_timeout_s` is set. With
    `shared_chunks` all of them read one disk of that size; without, each other's memory. A prefetch takes
    `prefetch_s`."""

    instances: tuple[str, ...] = ()
    capacity_chunks: int = 4096
    chunk_bytes: int = 256 * 131_072
    instance_timeout_s: float | None = None
    kept_prefetches: int = 1000
    chunk_tokens: int = CHUNK_TOKENS
    shared_chunks: int = 0
    prefetch_s: float = 0.0


class CoordinatorApp(JsonApp):
    """Serve it. Engines report what they store through `admit`, or over HTTP with POST /sim/admit or /events."""

    def __init__(self, settings: CoordinatorSettings, *, clock: Clock, rng: random.Random) -> None:
        super().__init__()
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._applied: dict[tuple[str, int], int] = {}
        pool = self._server("", capacity_chunks=settings.shared_chunks) if settings.shared_chunks else None
        self.directory = Directory(clock=clock, timeout_s=settings.instance_timeout_s, pool=pool)
        self._actions = CacheActions(
            self.directory,
            rng=rng,
            clock=clock,
            kept_prefetches=settings.kept_prefetches,
            chunk_tokens=settings.chunk_tokens,
            prefetch_s=settings.prefetch_s,
        )
        for instance_id in settings.instances:
            self.directory.add(self._server(instance_id))
        self._add_routes()

    def admit(
        self, instance_id: str, tokens: Sequence[int], *, model_name: str, world_size: int = 1, cache_salt: str = ""
    ) -> None:
        """Record a prompt stored by an engine behind `instance_id`; an unregistered server is ignored."""
        server = self.directory.get(instance_id)
        if server is not None:
            size = self._settings.chunk_tokens
            keys = make_keys(
                tokens, model_name=model_name, world_size=world_size, cache_salt=cache_salt, chunk_tokens=size
            )
            self.directory.store(server, keys)

    def _add_routes(self) -> None:
        self.route("GET", "/healthz", self._healthz)
        self.route("POST", "/directory/lookup", self._lookup)
        self.route("GET", "/directory/keys", self._keys)
        self.route("GET", "/directory/stats", self._stats)
        self.route("POST", "/events", self._events)
        self.route("GET", "/instances", self._list)
        self.route("POST", "/instances", self._register)
        self.route("GET", "/instances/usage", self._fleet_usage)
        self.route("GET", "/instances/{instance_id}/usage", self._usage)
        self.route("PUT", "/instances/{instance_id}/heartbeat", self._heartbeat)
        self.route("DELETE", "/instances/{instance_id}", self._deregister)
        self.route("POST", "/cache/pins", self._actions.pin)
        self.route("DELETE", "/cache/pins", self._actions.unpin)
        self.route("GET", "/cache/pins", self._actions.list_pins)
        self.route("POST", "/cache/delete", self._actions.delete)
        self.route("POST", "/cache/prefetches", self._actions.prefetch)
        self.route("GET", "/cache/prefetches/{instance_id}/{request_id}", self._actions.prefetch_status)
        self.route("POST", "/sim/admit", self._sim_admit)
        self.route("POST", "/sim/servers", self._sim_servers)
        self.route("GET", "/sim/state", self._sim_state)

    async def _healthz(self, _request: Request) -> Any:
        return {"status": "healthy"}

    async def _lookup(self, request: Request) -> Any:
        body = request.parse_body({"keys?": list, "token_ids?": list, "model_name?": str, "world_size?": int})
        by_key = bool(body.get("keys"))
        by_tokens = "token_ids" in body
        if by_key == by_tokens or (by_tokens and not body.get("model_name")):
            text = "Value error, supply exactly one of 'keys' or 'token_ids' with 'model_name'"
            problem = {"type": "value_error", "loc": ["body"], "msg": text, "input": body}
            raise HttpError(422, {"detail": [problem]})
        size = self._settings.chunk_tokens
        keys = [decode_key(key) for key in body["keys"]] if by_key else parse_keys(body, chunk_tokens=size)
        chunks = len(keys) if by_key else len(keys) // (body.get("world_size") or 1)
        results = [
            {
                "key": key.encode(),
                "placements": self.directory.describe_placements(key),
                "token_ids": [],
                "access_count": 0,
            }
            for key in keys
        ]
        return {"chunks": chunks, "results": results}

    async def _keys(self, request: Request) -> Any:
        wanted = request.query.get("instance_id", "")
        rows = [
            {"key": key.encode(), "placements": placements, "num_tokens": 0, "access_count": 0}
            for key in self.directory.all_keys()
            if (placements := self.directory.describe_placements(key, only=wanted))
        ]
        return {"total": len(rows), "keys": paginate(request, rows)}

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

    async def _events(self, request: Request) -> Any:
        counts = {"applied": 0, "duplicates": 0, "stale": 0}
        for batch in request.parse_body({"batches": list})["batches"]:
            counts[self._apply(batch)] += 1
        return counts

    def _apply(self, batch: dict[str, Any]) -> str:
        server = self.directory.get(batch["instance_id"])
        if server is None or batch["incarnation"] < server.incarnation:
            return "stale"
        source = (server.instance_id, batch["incarnation"])
        if batch["seq"] <= self._applied.get(source, 0):
            return "duplicates"
        server.incarnation = batch["incarnation"]
        self._applied[source] = batch["seq"]
        keys = [decode_key(entry["key"]) for entry in batch.get("entries", ())]
        if batch["event_type"] == "store":
            self.directory.store(server, keys)
        elif batch["event_type"] == "delete":
            server.remove(keys)
        return "applied"

    async def _list(self, _request: Request) -> Any:
        return {"instances": [_described(server) for server in self.directory.servers()]}

    async def _register(self, request: Request) -> Any:
        body = request.parse_body({"instance_id?": str, "ip": str, "http_port": int})
        instance_id = (body.get("instance_id") or "").strip() or f"mp-{self._rng.getrandbits(64):016x}"
        server = self._server(instance_id, ip=body["ip"].strip(), http_port=body["http_port"])
        return {"instance_id": instance_id, "re_registered": self.directory.add(server)}

    async def _heartbeat(self, request: Request) -> Any:
        instance_id = request.path_values["instance_id"]
        if not self.directory.record_heartbeat(instance_id):
            raise HttpError(404, {"error": f"instance {instance_id} is not registered"})
        return {"instance_id": instance_id, "status": "ok"}

    async def _deregister(self, request: Request) -> Any:
        self.directory.remove(request.path_values["instance_id"])
        return 204, None

    async def _fleet_usage(self, _request: Request) -> Any:
        pool = self.directory.pool
        disk = {"tier": "l2", "backend": "fs_native", "shared": True, "capacity_bytes": 0, "usage_ratio": None}
        shared = [] if pool is None else [{**disk, "used_bytes": pool.used_bytes}]
        return {"instances": [_usage(server) for server in self.directory.servers()], "shared_modules": shared}

    async def _usage(self, request: Request) -> Any:
        return _usage(self._actions.require_server(request.path_values["instance_id"]))

    async def _sim_admit(self, request: Request) -> Any:
        body = request.parse_body({"instance_id": str, "tokens": list, "model_name": str, "cache_salt?": str})
        salt = body.get("cache_salt") or ""
        self.admit(body["instance_id"], body["tokens"], model_name=body["model_name"], cache_salt=salt)
        return {"keys": len(self._actions.require_server(body["instance_id"]).store)}

    async def _sim_servers(self, request: Request) -> Any:
        body = request.parse_body({"instance_id": str, "down": bool})
        self._actions.require_server(body["instance_id"]).down = body["down"]
        return body

    async def _sim_state(self, _request: Request) -> Any:
        return {"calls": dict(self.calls), "pins": self._actions.pins}

    def _server(
        self, instance_id: str, *, ip: str = "127.0.0.1", http_port: int = 8080, capacity_chunks: int = 0
    ) -> MpServer:
        return MpServer(
            instance_id,
            capacity_chunks=capacity_chunks or self._settings.capacity_chunks,
            chunk_bytes=self._settings.chunk_bytes,
            clock=self._clock,
            ip=ip,
            http_port=http_port,
        )


def create_coordinator_app(
    settings: CoordinatorSettings, *, clock: Clock = time.monotonic, rng: random.Random | None = None
) -> CoordinatorApp:
    """Return a coordinator ready to be served."""
    return CoordinatorApp(settings, clock=clock, rng=rng or random.Random())


def _described(server: MpServer) -> dict[str, Any]:
    return {
        "instance_id": server.instance_id,
        "ip": server.ip,
        "http_port": server.http_port,
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
