"""Chunks of KV as LMCache keeps them: one store, and the worker of one engine with its stores and control socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.json_app import detail_error, run_while_connected
from kvproxy.lab.simulator.tokenizer import hash_blocks

CHUNK_TOKENS = 256


def hash_chunks(tokens: Sequence[int]) -> list[int]:
    """Chained hashes of the full 256-token chunks; model, LoRA and salt are not part of them."""
    return hash_blocks(tokens, CHUNK_TOKENS)


class ChunkStore:
    """Bounded; a pin is a lease that lapses `pin_s` after it was taken."""

    def __init__(self, capacity_chunks: int, *, clock: Clock, pin_s: float = 300.0) -> None:
        self.capacity_chunks = capacity_chunks
        self._clock = clock
        self._pin_s = pin_s
        self._chunks: OrderedDict[int, None] = OrderedDict()
        self._pinned_until: dict[int, float] = {}
        self.compressed: set[int] = set()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def admit(self, chunks: Sequence[int]) -> list[int]:
        """Store chunks as most recent; returns what had to go. Pinned ones never go, so a full store may refuse."""
        evicted = []
        for chunk in chunks:
            if chunk in self._chunks:
                self._chunks.move_to_end(chunk)
                continue
            if len(self._chunks) >= self.capacity_chunks:
                victim = next((held for held in self._chunks if not self.is_pinned(held)), None)
                if victim is None:
                    break
                self._drop(victim)
                evicted.append(victim)
            self._chunks[chunk] = None
        return evicted

    def held_prefix(self, chunks: Sequence[int]) -> list[int]:
        """Return the leading chunks that are held."""
        held = []
        for chunk in chunks:
            if chunk not in self._chunks:
                break
            held.append(chunk)
        return held

    def pin(self, chunks: Sequence[int]) -> int:
        """Leases the held prefix; the number of chunks."""
        held = self.held_prefix(chunks)
        until = self._clock() + self._pin_s
        for chunk in held:
            self._pinned_until[chunk] = until
        return len(held)

    def is_pinned(self, chunk: int) -> bool:
        """Return True if a lease is running."""
        return self._pinned_until.get(chunk, float("-inf")) > self._clock()

    @property
    def pins(self) -> int:
        """Chunks under a running lease."""
        return sum(1 for chunk in self._chunks if self.is_pinned(chunk))

    def remove(self, chunks: Sequence[int]) -> int:
        """Drop the unpinned of these; the number dropped."""
        gone = [chunk for chunk in chunks if chunk in self._chunks and not self.is_pinned(chunk)]
        for chunk in gone:
            self._drop(chunk)
        return len(gone)

    def clear(self) -> int:
        """Drop everything unpinned; the number dropped."""
        return self.remove(list(self._chunks))

    def _drop(self, chunk: int) -> None:
        del self._chunks[chunk]
        self._pinned_until.pop(chunk, None)
        self.compressed.discard(chunk)


CPU = "LocalCPUBackend"
DISK = "LocalDiskBackend"
WRONG_STATE = "Operation cannot be accomplished in current state"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`capacity_chunks` of 256 tokens in host memory; `control_s` is how long a control call takes.

    `cachegen` shows whether CacheGen supports the model; `p2p` whether chunks can be moved."""

    instance_id: str
    capacity_chunks: int = 4096
    pin_s: float = 300.0
    control_s: float = 0.0
    cachegen: bool = True
    p2p: bool = False


class LmcacheWorker:
    """Chunks by location, in the order in which lookups search. `dead`: it answers no control call."""

    def __init__(self, settings: WorkerSettings, *, clock: Clock) -> None:
        self.settings = settings
        self.stores = {
            location: ChunkStore(settings.capacity_chunks, clock=clock, pin_s=settings.pin_s)
            for location in (CPU, DISK)
        }
        self.dead = False
        self._busy = False
        self._alive = asyncio.Event()

    def admit(self, tokens: Sequence[int], location: str = CPU) -> None:
        """Store the full chunks of a prompt, as the engine does after its prefill."""
        self.stores[location].admit(hash_chunks(tokens))

    def location_of(self, chunk: int) -> str | None:
        """Where a chunk is held, if anywhere."""
        return next((location for location, store in self.stores.items() if chunk in store), None)

    @property
    def keys(self) -> int:
        """Chunks over all locations."""
        return sum(len(store) for store in self.stores.values())

    def kill(self) -> None:
        """Kill the process; the controller's index does not notice."""
        self.dead = True

    def revive(self) -> None:
        """Bring the worker back: hung calls end, the socket works again."""
        self.dead = self._busy = False
        self._alive.set()
        self._alive = asyncio.Event()

    @contextlib.asynccontextmanager
    async def run_control_call(self, request: Request) -> AsyncIterator[None]:
        """One control call for a client. The socket has no lock: a second call at the same time fails, and the first
        call to a dead worker hangs until it is back, while every later one fails (also when the first caller gave
        up)."""
        if self._busy:
            raise detail_error(500, WRONG_STATE)
        self._busy = True
        if self.dead:
            await run_while_connected(request.receive, self._alive.wait())
        try:
            if self.settings.control_s:
                await run_while_connected(request.receive, asyncio.sleep(self.settings.control_s))
            yield
        finally:
            self._busy = False
