"""The LMCache controller's HTTP API, with its true shapes, semantics and weaknesses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.http_call import JsonApp, Request, detail_error
from kvproxy.lab.simulator.lmcache_chunks import (
    CHUNK_TOKENS,
    CPU,
    DISK,
    ChunkStore,
    LmcacheWorker,
    WorkerSettings,
    hash_chunks,
)

_TARGET = {"instance_id": str, "location": str}


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """`pixiu_shape` answers as Dubbo-go-Pixiu expects it: objects in layout_info, an /evict that exists. `lookup_s`
    is how long a lookup takes."""

    workers: tuple[WorkerSettings, ...] = field(default_factory=tuple)
    pixiu_shape: bool = False
    lookup_s: float = 0.0


class LmcacheController:
    """The index of chunk holders, in order of registration, and the actions on the workers."""

    def __init__(self, settings: ControllerSettings, *, clock: Clock, rng: random.Random) -> None:
        self.settings = settings
        self._clock = clock
        self._rng = rng
        self.lookup_s = settings.lookup_s
        self.workers = {one.instance_id: LmcacheWorker(one, clock=clock) for one in settings.workers}

    def register(self, settings: WorkerSettings) -> LmcacheWorker:
        """Return a worker (re)registers: whatever it held before is forgotten."""
        self.workers[settings.instance_id] = LmcacheWorker(settings, clock=self._clock)
        return self.workers[settings.instance_id]

    def make_event_id(self, kind: str) -> str:
        """As the controller makes them: the kind and a UUID-like tail."""
        return f"{kind}{self._rng.getrandbits(128):032x}"

    def find_layout(self, tokens: Sequence[int]) -> dict[str, tuple[str, int]]:
        """Per instance its last matched end, counting for each chunk only the first holder: replicas are invisible,
        and the number is no contiguous prefix of that instance."""
        found: dict[str, tuple[str, int]] = {}
        for index, chunk in enumerate(hash_chunks(tokens)):
            holder = self._first_holder(chunk)
            if holder is None:
                break
            found[holder[0]] = (holder[1], (index + 1) * CHUNK_TOKENS)
        return found

    def store(self, instance_id: str, location: str) -> ChunkStore | None:
        """One instance's store; a wrong location is None, an unknown instance a KeyError."""
        return self.workers[instance_id].stores.get(location)

    def _first_holder(self, chunk: int) -> tuple[str, str] | None:
        for instance_id, worker in self.workers.items():
            location = worker.location_of(chunk)
            if location is not None:
                return instance_id, location
        return None


class ControllerApp(JsonApp):
    """Routes of the real controller (0.3.5 to 0.5.6), and `/sim/state` for tests.
    `controller.workers[id].admit(tokens)` reports a store."""

    def __init__(
        self, settings: ControllerSettings, *, clock: Clock = time.monotonic, rng: random.Random | None = None
    ) -> None:
        super().__init__()
        self.controller = LmcacheController(settings, clock=clock, rng=rng or random.Random())
        for name in ("lookup", "pin", "clear", "compress", "decompress", "move"):
            self.route("POST", f"/{name}", getattr(self, f"_{name}"))
        if settings.pixiu_shape:
            self.route("POST", "/evict", self._evict)
        self.route("GET", "/controller/key-stats", self._key_stats)
        self.route("GET", "/controller/workers", self._workers)
        self.route("GET", "/sim/state", self._sim_state)

    async def _lookup(self, request: Request) -> Any:
        body = request.parse_body({"tokens": list})
        await asyncio.sleep(self.controller.lookup_s)
        layout = self.controller.find_layout(body["tokens"])
        if self.controller.settings.pixiu_shape:
            shaped: dict[str, Any] = {name: {"0": place, "1": end} for name, (place, end) in layout.items()}
        else:
            shaped = {name: [place, end] for name, (place, end) in layout.items()}
        return {"event_id": self.controller.make_event_id("Lookup"), "layout_info": shaped}

    async def _pin(self, request: Request) -> Any:
        body = request.parse_body({**_TARGET, "tokens": list})
        async with self._worker(body["instance_id"], "pinned").run_control_call():
            store = self.controller.store(body["instance_id"], body["location"])
            chunks = 0 if store is None else store.pin(hash_chunks(body["tokens"]))
        return self._done("Pin", chunks)

    async def _clear(self, request: Request) -> Any:
        body = request.parse_body(_TARGET)
        async with self._worker(body["instance_id"], "cleared").run_control_call():
            store = self.controller.store(body["instance_id"], body["location"])
            chunks = 0 if store is None else store.clear()
        return self._done("Clear", chunks)

    async def _compress(self, request: Request) -> Any:
        body = request.parse_body({**_TARGET, "method": str, "tokens?": list})
        worker = self._worker(body["instance_id"], "compressed")
        async with worker.run_control_call():
            store, chunks = self._codec_chunks(worker, body, "Operation 'compress' is not supported.")
            store.compressed.update(chunks)
        return self._done("Compress", len(chunks))

    async def _decompress(self, request: Request) -> Any:
        body = request.parse_body({**_TARGET, "method": str, "tokens?": list})
        worker = self._worker(body["instance_id"], "")
        async with worker.run_control_call():
            store, chunks = self._codec_chunks(worker, body, "")
            compressed = store.compressed.intersection(chunks)
            store.compressed -= compressed
        return self._done("Decompress", len(compressed))

    async def _move(self, request: Request) -> Any:
        body = request.parse_body({"old_position": list, "new_position": list, "tokens?": list, "should_copy?": bool})
        (source_id, source_place), (target_id, target_place) = self._position(body, "old"), self._position(body, "new")
        source = self._worker(source_id, "moved")
        target = self._worker(target_id, "moved")
        if not (source.settings.p2p and target.settings.p2p):
            text = f"Src worker 0 not registered for instance {source_id} or dst worker 0 not registered"
            raise detail_error(500, f"{text} for instance {target_id} or P2P is not enabled.")
        async with source.run_control_call():
            chunks = source.stores[source_place].held_prefix(hash_chunks(body.get("tokens") or []))
            target.stores[target_place].admit(chunks)
            if not body.get("should_copy"):
                source.stores[source_place].remove(chunks)
        return self._done("Move", len(chunks))

    async def _evict(self, request: Request) -> Any:
        body = request.parse_body({"tokens": list, "instance_id": str})
        worker = self._worker(body["instance_id"], "evicted")
        async with worker.run_control_call():
            chunks = hash_chunks(body["tokens"])
            removed = sum(store.remove(store.held_prefix(chunks)) for store in worker.stores.values())
        return self._done("Evict", removed)

    async def _key_stats(self, _request: Request) -> Any:
        rows = [
            {"instance_id": name, "key_count": worker.keys, "worker_count": 1}
            for name, worker in self.controller.workers.items()
        ]
        return {
            "total_key_count": sum(row["key_count"] for row in rows),
            "total_instance_count": len(rows),
            "total_worker_count": len(rows),
            "instances": rows,
        }

    async def _workers(self, request: Request) -> Any:
        rows = {name: {**info, "key_count": self.controller.workers[name].keys} for name, info in self._infos().items()}
        wanted = request.query.get("instance_id")
        if wanted is None:
            return {"workers": list(rows.values()), "total_count": len(rows)}
        if wanted not in rows:
            raise detail_error(404, f"Worker not found for instance {wanted}")
        if "worker_id" in request.query:
            return rows[wanted]
        return {"workers": [rows[wanted]], "total_count": 1}

    async def _sim_state(self, _request: Request) -> Any:
        workers = {
            name: {
                "keys": worker.keys,
                "dead": worker.dead,
                "pinned": {place: store.pins for place, store in worker.stores.items()},
                "compressed": {place: len(store.compressed) for place, store in worker.stores.items()},
            }
            for name, worker in self.controller.workers.items()
        }
        return {"calls": dict(self.calls), "workers": workers}

    def _position(self, body: dict[str, Any], which: str) -> tuple[str, str]:
        position = body[f"{which}_position"]
        if len(position) != 2 or position[1] not in (CPU, DISK):
            raise detail_error(500, f"{which}_position must be [instance, location]")
        return position[0], position[1]

    def _worker(self, instance_id: str, verb: str) -> LmcacheWorker:
        worker = self.controller.workers.get(instance_id)
        if worker is None:
            text = f"The number of tokens {verb} should be the same across all workers."
            raise detail_error(500, text if verb else "")
        return worker

    def _codec_chunks(self, worker: LmcacheWorker, body: dict[str, Any], refusal: str) -> tuple[ChunkStore, list[int]]:
        """Return the chunks that a codec works on, in place; any method but CacheGen does nothing and reports 0
        tokens."""
        store = worker.stores.get(body["location"], worker.stores[CPU])
        if body["method"] != "cachegen" or not body.get("tokens") or body["location"] not in worker.stores:
            return store, []
        if not worker.settings.cachegen:
            raise detail_error(500, refusal)
        return store, store.held_prefix(hash_chunks(body["tokens"]))

    def _done(self, kind: str, chunks: int) -> dict[str, Any]:
        return {"event_id": self.controller.make_event_id(kind), "num_tokens": chunks * CHUNK_TOKENS}

    def _infos(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "instance_id": name,
                "worker_id": 0,
                "ip": worker.settings.ip,
                "port": worker.settings.port,
                "peer_init_url": None,
                "registration_time": worker.registered_at,
                "last_heartbeat_time": worker.registered_at,
            }
            for name, worker in self.controller.workers.items()
        }
