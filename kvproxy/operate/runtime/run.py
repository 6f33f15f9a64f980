"""The run of a proxy: how it starts and ends in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from starlette.types import Receive, Send

from kvproxy.base.background_task import find_loop


class Run:
    """Starts `parts` once, in one event loop: by `async with`, a server's lifespan or the first request."""

    def __init__(self, parts: Callable[[], Iterable[AbstractAsyncContextManager[Any]]]) -> None:
        self._parts = parts
        #: Event loop of the latest start.
        self.loop: asyncio.AbstractEventLoop | None = None
        #: Whether the parts run.
        self.runs = False
        self._entered = False  # False while they run: a request started them
        self._started = AsyncExitStack()
        self._starting: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def enter(self) -> None:
        """Start, unless a request has; RuntimeError if it was entered before."""
        loop = find_loop()
        async with self._lock(loop):
            if not self.runs or self.loop is not loop:
                await self._start(loop)
            elif self._entered:
                raise RuntimeError("this Proxy was entered already: do it once, by `async with` or a server's lifespan")
            self._entered = True

    async def begin(self) -> None:
        """Start with the first request, under a server that sends no lifespan events. Nothing ends it then, unless it
        is entered later."""
        loop = find_loop()
        async with self._lock(loop):
            if self.loop is not loop:
                await self._start(loop)

    async def end(self) -> None:
        """End the parts."""
        self.runs = False
        await self._started.aclose()

    async def serve_lifespan(self, receive: Receive, send: Send) -> None:
        """Start and end by the server's events. A start that fails is answered: a server that only sees an error out of
        here takes the app for one without a lifespan, and serves it unstarted."""
        await receive()
        try:
            await self.enter()
        except Exception as error:
            message = f"kvproxy cannot start: {type(error).__name__}: {error}"
            await send({"type": "lifespan.startup.failed", "message": message})
            raise  # as Starlette does: test clients wait for it
        try:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        finally:
            await self.end()
        await send({"type": "lifespan.shutdown.complete"})

    def _lock(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        if self._starting is None or self._starting[0] is not loop:
            self._starting = loop, asyncio.Lock()
        return self._starting[1]

    async def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.runs and self.loop is not None and not self.loop.is_closed():
            raise RuntimeError("this Proxy runs in another event loop; make one for each loop")
        async with AsyncExitStack() as starting:  # a part that cannot start ends those before it
            for part in self._parts():
                await starting.enter_async_context(part)
            self._started = starting.pop_all()
        self.runs = True
        self._entered = False
        self.loop = loop
