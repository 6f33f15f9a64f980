"""Schedule of the garbage collector of a `kvproxy serve` process: never for long while requests wait.

Requests leave no cycles, so nearly all memory comes back without it. Python's own rule would scan every object, the
whole index of KV events among them, whenever there are a quarter more: nearly a second where engines hold a million
unrelated blocks.

Nor does the C library keep the memory of large bodies: by its own rule they come from the heap once some were freed,
where one small block above them keeps all of it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

from kvproxy.base.background_task import BackgroundTask
from kvproxy.base.types import Clock

#: Sizes of the young and the middle generation: a collection scans their product at most, some five milliseconds of it.
YOUNG_OBJECTS = 2_000
YOUNG_ROUNDS = 5
#: The collector's own rule never scans the oldest generation.
_NEVER = 2**31 - 1

#: A full collection expected to be this short needs no quiet moment.
SHORT_S = 0.01
#: Interval of full collections in a quiet moment, and in any case.
EVERY_S = 600.0
AT_LATEST_S = 3_600.0
#: Interval of checks for a quiet moment, and of trimming the heap in one.
LOOK_S = 1.0
TRIM_EVERY_S = 60.0

_THRESHOLDS = YOUNG_OBJECTS, YOUNG_ROUNDS, _NEVER

#: Larger blocks are mapped separately and returned when freed: glibc's own bound, which it would raise by itself.
MAPPED_BYTES = 128 * 1024
#: Free memory kept at the heap's end for later use.
KEPT_BYTES = 8 * 1024 * 1024
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


class GarbageCollections(BackgroundTask):
    """The policy of the process, from entering to leaving. Enter it once everything is built: that is never looked at
    again.

    `is_quiet`: no request waits. `replaced` counts configurations whose last request is over: each drops many objects
    at once, and everything is looked at sooner then.
    """

    task_name = "garbage collections"

    def __init__(
        self,
        *,
        is_quiet: Callable[[], bool],
        replaced: Callable[[], int] = lambda: 0,
        clock: Clock = time.monotonic,
        cpu_clock: Clock = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.expected_s = 0.0  # expected duration of a full collection
        self._is_quiet = is_quiet
        self._replaced = replaced
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._sleep = sleep
        self._began_s = 0.0
        self._thresholds = gc.get_threshold()

    async def __aenter__(self) -> Self:
        gc.collect()
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*_THRESHOLDS)
        gc.callbacks.append(self._timed)
        return_large_memory()
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        await super().__aexit__(*exc_info)
        gc.callbacks.remove(self._timed)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    async def _run(self) -> None:
        collected_at = trimmed_at = self._clock()
        replaced = self._replaced()
        while True:
            await self._sleep(LOOK_S)
            now = self._clock()
            is_due = now - collected_at >= EVERY_S or self._replaced() != replaced
            if is_due and (self.expected_s <= SHORT_S or self._is_quiet() or now - collected_at >= AT_LATEST_S):
                replaced = self._replaced()
                gc.collect()
                collected_at = self._clock()
            if now - trimmed_at >= TRIM_EVERY_S and self._is_quiet():
                trim_heap()
                trimmed_at = self._clock()

    def _timed(self, phase: str, info: dict[str, Any]) -> None:
        """Time a collection: objects that survive the middle generation are scanned again in a full one, which takes as
        long again."""
        if phase == "start":
            self._began_s = self._cpu_clock()
        elif info["generation"] == 1:
            self.expected_s += self._cpu_clock() - self._began_s
        elif info["generation"] == 2:
            self.expected_s = self._cpu_clock() - self._began_s


def return_large_memory() -> None:
    """Large blocks go back to the system when they are freed. Nothing where the C library is not glibc."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def trim_heap() -> None:
    """Whole free pages of the heap go back to the system: some 10 ms for 100 MB. Nothing where there is no glibc."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
