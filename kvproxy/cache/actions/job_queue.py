"""The queue of work done after responses: bounded, deduplicated, one job at a time per instance, drained at the end."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.cache.metrics import HoldingMetrics

log = logging.getLogger("kvproxy.kvcache")

QUEUE = "kvcache_background"

#: Request bodies that waiting and running jobs hold, together.
MAX_HELD_BYTES = 256 * 1024 * 1024
#: Jobs that wait; further ones are dropped and counted.
MAX_WAITING = 1024
#: Jobs that run at once, on one instance always one at a time.
MAX_RUNNING = 4
#: Duration of a job with all its retries.
JOB_TIMEOUT_S = 10.0
#: Time that jobs have to finish at shutdown.
DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """Work of one kind on one thing. Jobs of one `lane` (an instance) never run at once; None: a lane of its own.

    `run` shows by its answer whether it did what it was for; errors it expects are its own business.
    """

    key: Hashable
    run: Callable[[], Awaitable[bool]]
    lane: str | None = None
    held_bytes: int = 0  # bytes of memory it holds
    about: str = ""  # for people: the action and its prefix (a hash)


class JobQueue:
    """Owns one task a running job, at most `max_running`. A job outlives the request that caused it.

    Leaving it takes no more jobs, gives those that are there `drain_s`, then cancels and drops them.
    """

    def __init__(
        self,
        *,
        metrics: Metrics,
        max_waiting: int = MAX_WAITING,
        max_running: int = MAX_RUNNING,
        timeout_s: float = JOB_TIMEOUT_S,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._max_waiting = max_waiting
        self._max_running = max_running
        self._timeout_s = timeout_s
        self._drain_s = drain_s
        self._results = metrics.group(HoldingMetrics).background
        self._lanes: dict[Hashable, deque[Job]] = {}  # waiting, by lane
        self._ready: deque[Hashable] = deque()  # lanes with waiting jobs and none running
        self._running: dict[Hashable, asyncio.Task[None]] = {}  # by lane
        self._begun: dict[Hashable, Job] = {}  # the same jobs, by lane
        self._keys: set[Hashable] = set()  # of waiting and running jobs
        self._waiting = 0
        self._held_bytes = 0  # by waiting and running jobs
        self._open = False
        self._idle = asyncio.Event()
        self._idle.set()

    def bind_gauges(self, metrics: Metrics) -> None:
        metrics.group(BoundMetrics).show_queue(QUEUE, lambda: self._waiting, limit=self._max_waiting)

    @property
    def waiting(self) -> int:
        """Jobs not begun."""
        return self._waiting

    @property
    def running(self) -> Sequence[Job]:
        """Jobs begun and not over."""
        return tuple(self._begun.values())

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return self._idle.is_set()

    async def settled(self) -> None:
        """Return once nothing waits and nothing runs."""
        await self._idle.wait()

    async def __aenter__(self) -> Self:
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        try:
            async with asyncio.timeout(self._drain_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("[kvcache] %d background jobs are abandoned", self._waiting + len(self._running))
        finally:
            await self._abandon()

    def submit(self, job: Job) -> bool:
        """Queue the job; False when its like waits or runs already, the queue is full, or the end has come."""
        if job.key in self._keys:
            self._results.labels("duplicate").inc()
            return False
        over = self._held_bytes > 0 and self._held_bytes + job.held_bytes > MAX_HELD_BYTES
        if not self._open or over or self._waiting >= self._max_waiting:
            self._results.labels("dropped").inc()
            return False
        lane = job.key if job.lane is None else job.lane
        line = self._lanes.setdefault(lane, deque())
        line.append(job)
        if len(line) == 1 and lane not in self._running:
            self._ready.append(lane)
        self._keys.add(job.key)
        self._held_bytes += job.held_bytes
        self._waiting += 1
        self._idle.clear()
        self._start_ready()
        return True

    def _start_ready(self) -> None:
        while self._ready and len(self._running) < self._max_running:
            lane = self._ready.popleft()
            line = self._lanes[lane]
            job = line.popleft()
            if not line:
                del self._lanes[lane]
            self._waiting -= 1
            self._begun[lane] = job
            self._running[lane] = asyncio.create_task(self._run(job, lane), name=f"kvcache job {job.key}")

    async def _run(self, job: Job, lane: Hashable) -> None:
        result = "failed"
        try:
            async with asyncio.timeout(self._timeout_s):
                result = "done" if await job.run() else "failed"
        except TimeoutError:
            result = "timeout"
            log.warning("[kvcache] a background job did not end within %g s", self._timeout_s)
        except asyncio.CancelledError:
            result = "abandoned"
            raise
        except Exception:
            log.exception("[kvcache] a background job is broken")
        finally:
            self._results.labels(result).inc()
            self._ended(job, lane)

    def _ended(self, job: Job, lane: Hashable) -> None:
        del self._running[lane]
        del self._begun[lane]
        self._keys.discard(job.key)
        self._held_bytes -= job.held_bytes
        if lane in self._lanes:
            self._ready.append(lane)
        self._start_ready()
        if not self._running and not self._waiting:
            self._idle.set()

    async def _abandon(self) -> None:
        self._results.labels("abandoned").inc(self._waiting)
        self._lanes.clear()
        self._ready.clear()
        self._keys.clear()
        self._waiting = 0
        await cancel_tasks(self._running.values())
