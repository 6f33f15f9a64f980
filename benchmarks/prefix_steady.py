"""Cost of single events in the precise index: at an engine's capacity, where every block stored evicts one, and
else."""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.block_events import BlockRemoved, BlockStored, KvEvent
from kvproxy.cache.indexes.precise import PreciseIndex

_CAPACITY = 60_000
_PREFILL, _DECODED, _SYSTEM = 200, 30, 32
#: One source grows to so many blocks, by events as long as the follower applies at once.
_GROWN, _SLICE = 1_000_000, 512
_ENGINE = EndpointId("engine")


class Engine:
    """Prompts of 200 blocks below a shared beginning, 30 more one by one; evicts the oldest prompt, its end first."""

    def __init__(self) -> None:
        self._rng = random.Random(5)
        self._live: deque[list[int]] = deque()
        self.held = 0
        self.system = self.stored(_SYSTEM, None)

    def stored(self, blocks: int, parent: int | None) -> BlockStored:
        """So many new blocks of 16 tokens."""
        names = tuple(self._rng.getrandbits(64) for _ in range(blocks))
        return BlockStored(names, parent, array("I", self._rng.randbytes(64 * blocks)), 16)

    def request(self) -> list[KvEvent]:
        """Return the events of one request: one for each evicted block, then the stored ones."""
        events: list[KvEvent] = []
        names: list[int] = []
        parent = self.system.block_hashes[-1]
        for blocks in (_PREFILL, *[1] * _DECODED):
            while self.held + blocks > _CAPACITY:
                events.append(BlockRemoved((self._live[0].pop(),)))
                self.held -= 1
                if not self._live[0]:
                    self._live.popleft()
            assert isinstance(parent, int)
            event = self.stored(blocks, parent)
            events.append(event)
            names += [each for each in event.block_hashes if isinstance(each, int)]
            parent = names[-1]
            self.held += blocks
        self._live.append(names)
        return events


def steady() -> dict[str, float]:
    """Microseconds by what happens."""
    engine, index = Engine(), PreciseIndex()
    index.apply_events(_ENGINE, 0, [engine.system])
    while engine.held < _CAPACITY - _PREFILL - _DECODED:
        index.apply_events(_ENGINE, 0, engine.request())
    events = [event for _ in range(300) for event in engine.request()]
    blocks = sum(event.blocks for event in events if isinstance(event, BlockStored))
    result = {"a block stored and one evicted, at capacity": _spent(index, events) / blocks}
    assert index.counts.removed_unknown == 0
    assert index.count_rows(_ENGINE) == engine.held + _SYSTEM
    return result | _single(engine) | {"512 blocks while a source grows to a million, the longest of all": _longest()}


def _single(engine: Engine) -> dict[str, float]:
    index, parents, decoded = PreciseIndex(), [engine.system.block_hashes[-1]] * 64, []
    index.apply_events(_ENGINE, 0, [engine.system])
    for turn in range(64 * 200):
        event = engine.stored(1, parents[turn % 64])  # type: ignore[arg-type]
        parents[turn % 64] = event.block_hashes[0]
        decoded.append(event)
    run = engine.stored(2000, None)
    shuffled = list(run.block_hashes)
    random.Random(1).shuffle(shuffled)
    result = {"one decoded block": _spent(index, decoded) / len(decoded)}
    index.apply_events(_ENGINE, 0, [run])
    result["a block told again, of 2 000"] = _spent(index, [run] * 10) / 20_000
    result["its copy to host memory"] = _spent(index, [replace(run, medium="CPU")]) / 2000
    gone = [BlockRemoved((each,)) for each in reversed(run.block_hashes)]
    result["evicted from the device, last first"] = _spent(index, gone) / 2000
    gone = [BlockRemoved((each,), medium="CPU") for each in run.block_hashes]
    result["from host memory, first first"] = _spent(index, gone) / 2000
    index.apply_events(_ENGINE, 0, [run])
    result["in random order"] = _spent(index, [BlockRemoved((each,)) for each in shuffled]) / 2000
    return result


def _longest() -> float:
    """Microseconds of CPU time of the slowest event, by the quickest of three runs: it is what growing takes."""
    runs = []
    for _ in range(3):
        engine, index = Engine(), PreciseIndex()
        runs.append(max(_spent(index, (engine.stored(_SLICE, None),)) for _ in range(_GROWN // _SLICE)))
    return min(runs)


def _spent(index: PreciseIndex, events: Iterable[KvEvent]) -> float:
    """Microseconds of CPU time, one call an event."""
    start = time.process_time()
    for event in events:
        index.apply_events(_ENGINE, 0, (event,))
    return 1e6 * (time.process_time() - start)
