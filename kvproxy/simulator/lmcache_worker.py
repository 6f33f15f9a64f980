"""One engine's LMCache as the controller knows it: its stores, and the one fragile control socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvproxy.simulator.chunk_store import ChunkStore, hash_chunks
from kvproxy.simulator.http_call import detail_error
from kvproxy.types import Clock

CPU = "LocalCPUBackend"
DISK = "LocalDiskBackend"
WRONG_STATE = "Operation cannot be accomplished in current state"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`capacity_chunks` of 256 tokens in host memory; `control_s` is how long a control call takes.

    `cachegen` says whether the model is one of the few CacheGen knows; `p2p` whether chunks can be moved.
    """

    instance_id: str
    capacity_chunks: int = 4096
    pin_s: float = 300.0
    control_s: float = 0.0
    ip: str = "127.0.0.1"
    port: int = 8501
    cachegen: bool = True
    p2p: bool = False


class LmcacheWorker:
    """Chunks by location, in the order in which lookups search. `dead`: it answers no control call."""

    def __init__(self, settings: WorkerSettings, *, clock: Clock) -> None:
        self.settings = settings
        self.registered_at = clock()
        self.stores = {
            location: ChunkStore(settings.capacity_chunks, clock=clock, pin_s=settings.pin_s)
            for location in (CPU, DISK)
        }
        self.dead = False
        self.control_s = settings.control_s
        self._busy = False
        self._alive = asyncio.Event()

    def admit(self, tokens: Sequence[int], location: str = CPU) -> None:
        """Stores the full chunks of a prompt, as the engine does after its prefill."""
        self.stores[location].admit(hash_chunks(tokens))

    def location_of(self, chunk: int) -> str | None:
        """Where a chunk is held, if anywhere."""
        return next((location for location, store in self.stores.items() if chunk in store), None)

    @property
    def keys(self) -> int:
        """Chunks over all locations."""
        return sum(len(store) for store in self.stores.values())

    def kill(self) -> None:
        """The process is gone; the controller's index does not notice."""
        self.dead = True

    def revive(self) -> None:
        """It is back: hung calls end, the socket works again."""
        self.dead = self._busy = False
        self._alive.set()
        self._alive = asyncio.Event()

    @contextlib.asynccontextmanager
    async def run_control_call(self) -> AsyncIterator[None]:
        """One control call. The socket has no lock: a second call at the same time fails, and the first call to a
        dead worker hangs until it is back, while every later one fails (also when the first caller gave up)."""
        if self._busy:
            raise detail_error(500, WRONG_STATE)
        self._busy = True
        if self.dead:
            await self._alive.wait()
        try:
            await asyncio.sleep(self.control_s)
            yield
        finally:
            self._busy = False
