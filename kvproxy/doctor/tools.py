"""What the doctor looks with: connections, sockets, clocks, timeouts, and answers that several checks share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self, TypeVar, cast

import httpx

from kvproxy.background_task import cancel_tasks
from kvproxy.types import Clock
from kvproxy.upstream.origin import Origin
from kvproxy.upstream.pool import UpstreamPool
from kvproxy.upstream.transport import HttpClients

T = TypeVar("T")


class SharedAnswers:
    """By name, one task each; every caller gets the same answer or the same error.

    A check that gives up does not take the answer away from the others. An async context manager: leaving it ends
    what is still being asked.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def ask_once(self, name: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer under `name`; the first caller's `ask` gets it."""
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = asyncio.create_task(ask(), name=f"doctor {name}")
        return cast("T", await asyncio.shield(task))

    async def __aenter__(self) -> SharedAnswers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self._tasks.values())


def utc_seconds() -> float:
    """Wall-clock seconds since 1970."""
    return datetime.now(UTC).timestamp()


@dataclass(frozen=True, slots=True)
class VisitTimeouts:
    """Seconds. `exchange_s` for one call; `event_s` for KV events to arrive after an answer, `late_s` before another
    prompt is sent because a subscription may not have been in force for the first.

    LMCache learns of a prompt after its answer: lookups are tried `lookup_tries` times, `lookup_pause_s` apart.
    """

    exchange_s: float = 5.0
    event_s: float = 2.0
    late_s: float = 0.25
    lookup_tries: int = 15
    lookup_pause_s: float = 0.1


class Tools:
    """An async context manager; what was opened through it is closed with it."""

    def __init__(
        self,
        *,
        timeouts: VisitTimeouts | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Clock = utc_seconds,
        rng: random.Random | None = None,
    ) -> None:
        self.timeouts = timeouts or VisitTimeouts()
        self.clock = clock
        self.wall_clock = wall_clock
        self.rng = rng or random.Random()
        self.answers = SharedAnswers()
        self._pool = UpstreamPool(max_connections=32)
        self._clients = HttpClients(self._pool)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self._pool)
        self._open.push_async_callback(self._clients.aclose)
        await self._open.enter_async_context(self.answers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def make_client(self, origin: Origin) -> httpx.AsyncClient:
        """The client for origins verified as this one."""
        return self._clients.client(origin)
