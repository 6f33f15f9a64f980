"""The LMCache controller's HTTP API, with its true shapes, semantics and weaknesses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.json_app import JsonApp, detail_error, parse_body, run_while_connected
from kvproxy.lab.simulator.lmcache_chunks import (
    CHUNK_TOKENS,
    CPU,
    DISK,
    ChunkStore,
    LmcacheWorker,
    WorkerSettings,
    hash_chunks,
)


class _Lookup(BaseModel):
    tokens: list[int]


class _Target(BaseModel):
    instance_id: str
    location: str


class _Pin(_Target):
    tokens: list[int]


class _Codec(_Target):
    method: str
    tokens: list[int] | None = None


class _Evict(BaseModel):
    tokens: list[int]
    instance_id: str


class _Move(BaseModel):
    old_position: list[Any]
    new_position: list[Any]
    tokens: list[int] | None = None
    should_copy: bool | None = None


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """`pixiu_shape` answers as Dubbo-go-Pixiu expects it: objects in layout_info, an /evict that exists. `lookup_s`
    is how long a lookup takes."""

    workers: tuple[WorkerSettings, ...] = field(default_factory=tuple)
    pixiu_shape: bool = False
    lookup_s: float = 0.0


class ControllerApp(JsonApp):
    """The index of chunk holders, in order of registration, and the actions on the workers: routes of the real
    controller (0.3.5 to 0.5.6), and `/sim/state` for tests. `workers[id].admit(tokens)` reports a store."""

    def __init__(
        self, settings: ControllerSettings, *, clock: Clock = time.monotonic, rng: random.Random | None = None
    ) -> None:
        super().__init__()
        self.settings = settings
        self._clock = clock
        self._rng = rng or random.Random()
        self.workers = {one.instance_id: LmcacheWorker(one, clock=clock) for one in settings.workers}
        for name in ("lookup", "pin", "clear", "compress", "decompress", "move"):
            self.answer("POST", f"/{name}", getattr(self, f"_{name}"))
        if settings.pixiu_shape:
            self.answer("POST", "/evict", self._evict)
        self.answer("GET", "/controller/key-stats", self._key_stats)
        self.answer("GET", "/sim/state", self._sim_state)

    def register(self, settings: WorkerSettings) -> None:
        """Register a worker, again if it was: whatever it held before is forgotten."""
        self.workers[settings.instance_id] = LmcacheWorker(settings, clock=self._clock)

    async def _lookup(self, request: Request) -> Any:
        body = await parse_body(request, _Lookup)
        if self.settings.lookup_s:
            await run_while_connected(request.receive, asyncio.sleep(self.settings.lookup_s))
        layout = _find_layout(body.tokens, self.workers)
        if self.settings.pixiu_shape:
            shaped: dict[str, Any] = {name: {"0": place, "1": end} for name, (place, end) in layout.items()}
        else:
            shaped = {name: [place, end] for name, (place, end) in layout.items()}
        return {"event_id": self._make_event_id("Lookup"), "layout_info": shaped}

    async def _pin(self, request: Request) -> Any:
        body = await parse_body(request, _Pin)
        worker = self._worker(body.instance_id, "pinned")
        async with worker.run_control_call(request):
            store = worker.stores.get(body.location)
            chunks = 0 if store is None else store.pin(hash_chunks(body.tokens))
        return self._done("Pin", chunks)

    async def _clear(self, request: Request) -> Any:
        body = await parse_body(request, _Target)
        worker = self._worker(body.instance_id, "cleared")
        async with worker.run_control_call(request):
            store = worker.stores.get(body.location)
            chunks = 0 if store is None else store.clear()
        return self._done("Clear", chunks)

    async def _compress(self, request: Request) -> Any:
        body = await parse_body(request, _Codec)
        worker = self._worker(body.instance_id, "compressed")
        async with worker.run_control_call(request):
            store, chunks = _find_codec_chunks(worker, body, "Operation 'compress' is not supported.")
            store.compressed.update(chunks)
        return self._done("Compress", len(chunks))

    async def _decompress(self, request: Request) -> Any:
        body = await parse_body(request, _Codec)
        worker = self._worker(body.instance_id, "")
        async with worker.run_control_call(request):
            store, chunks = _find_codec_chunks(worker, body, "")
            compressed = store.compressed.intersection(chunks)
            store.compressed -= compressed
        return self._done("Decompress", len(compressed))

    async def _move(self, request: Request) -> Any:
        body = await parse_body(request, _Move)
        source_id, source_place = _check_position(body.old_position, "old")
        target_id, target_place = _check_position(body.new_position, "new")
        source = self._worker(source_id, "moved")
        target = self._worker(target_id, "moved")
        if not (source.settings.p2p and target.settings.p2p):
            text = f"Src worker 0 not registered for instance {source_id} or dst worker 0 not registered"
            raise detail_error(500, f"{text} for instance {target_id} or P2P is not enabled.")
        async with source.run_control_call(request):
            chunks = source.stores[source_place].held_prefix(hash_chunks(body.tokens or []))
            target.stores[target_place].admit(chunks)
            if not body.should_copy:
                source.stores[source_place].remove(chunks)
        return self._done("Move", len(chunks))

    async def _evict(self, request: Request) -> Any:
        body = await parse_body(request, _Evict)
        worker = self._worker(body.instance_id, "evicted")
        async with worker.run_control_call(request):
            chunks = hash_chunks(body.tokens)
            removed = sum(store.remove(store.held_prefix(chunks)) for store in worker.stores.values())
        return self._done("Evict", removed)

    async def _key_stats(self, _request: Request) -> Any:
        rows = [
            {"instance_id": name, "key_count": worker.keys, "worker_count": 1} for name, worker in self.workers.items()
        ]
        return {
            "total_key_count": sum(worker.keys for worker in self.workers.values()),
            "total_instance_count": len(rows),
            "total_worker_count": len(rows),
            "instances": rows,
        }

    async def _sim_state(self, _request: Request) -> Any:
        workers = {
            name: {
                "keys": worker.keys,
                "dead": worker.dead,
                "pinned": {place: store.pins for place, store in worker.stores.items()},
                "compressed": {place: len(store.compressed) for place, store in worker.stores.items()},
            }
            for name, worker in self.workers.items()
        }
        return {"calls": dict(self.calls), "workers": workers}

    def _worker(self, instance_id: str, verb: str) -> LmcacheWorker:
        worker = self.workers.get(instance_id)
        if worker is None:
            text = f"The number of tokens {verb} should be the same across all workers."
            raise detail_error(500, text if verb else "")
        return worker

    def _make_event_id(self, kind: str) -> str:
        """As the controller makes them: the kind and a UUID-like tail."""
        return f"{kind}{self._rng.getrandbits(128):032x}"

    def _done(self, kind: str, chunks: int) -> dict[str, Any]:
        return {"event_id": self._make_event_id(kind), "num_tokens": chunks * CHUNK_TOKENS}


def _find_layout(tokens: Sequence[int], workers: Mapping[str, LmcacheWorker]) -> dict[str, tuple[str, int]]:
    """Per instance its last matched end, counting for each chunk only the first holder: replicas are invisible, and the
    number is no contiguous prefix of that instance."""
    found: dict[str, tuple[str, int]] = {}
    for index, chunk in enumerate(hash_chunks(tokens)):
        holders = ((name, place) for name, one in workers.items() if (place := one.location_of(chunk)))
        name, place = next(holders, ("", ""))
        if not name:
            break
        found[name] = place, (index + 1) * CHUNK_TOKENS
    return found


def _check_position(position: Sequence[Any], which: str) -> tuple[str, str]:
    if len(position) != 2 or position[1] not in (CPU, DISK):
        raise detail_error(500, f"{which}_position must be [instance, location]")
    return position[0], position[1]


def _find_codec_chunks(worker: LmcacheWorker, body: _Codec, refusal: str) -> tuple[ChunkStore, list[int]]:
    """Return the chunks that a codec works on, in place; any method but CacheGen does nothing and reports 0 tokens."""
    store = worker.stores.get(body.location, worker.stores[CPU])
    if body.method != "cachegen" or not body.tokens or body.location not in worker.stores:
        return store, []
    if not worker.settings.cachegen:
        raise detail_error(500, refusal)
    return store, store.held_prefix(hash_chunks(body.tokens))
