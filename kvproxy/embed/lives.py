"""A proxy in a process that is not ours: one for each event loop it is used in, and a loop of its own for code that has
none."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.types import Scope

from kvproxy.app import ConfigLike, Proxy, read_config
from kvproxy.base.background_task import find_loop
from kvproxy.embed.call import Call
from kvproxy.proxy.request.body import SharedTimer

T = TypeVar("T")

#: How long the end of the process waits for proxies in the background.
_END_S = 5.0
#: How long requests have to end once nobody reads their answers.
_LEAVE_S = 1.0
#: Time limits of clients whose requests share a timer.
_MAX_LIMITS = 64

_all_lives: weakref.WeakSet[Lives] = weakref.WeakSet()
#: A forked child's copies of its parent's sockets and event loops, which must not be closed there.
_inherited: list[object] = []


class Life:
    """One proxy in one event loop."""

    def __init__(self, proxy: Proxy, *, owned: bool) -> None:
        self.proxy = proxy
        self.started = not owned
        self._calls: set[Call] = set()
        self._limits: dict[float, SharedTimer[Call]] = {}
        self._owned = owned
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the proxy, once; requests that come meanwhile wait. Raises what its parts raise; the next call tries
        again."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start(), name="start kvproxy")
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        try:
            await self.proxy.__aenter__()
            self.started = True
        finally:
            self._starting = None

    def begin(self, call: Call, scope: Scope) -> None:
        """Let the proxy answer a request."""
        call.begin(self.proxy, scope, among=self._calls)

    def find_limit(self, limit_s: float | None) -> SharedTimer[Call] | None:
        """Return the timer of calls with this limit for each wait; None: they have none."""
        if limit_s is None:
            return None
        limit = self._limits.get(limit_s)
        if limit is None:
            limit = SharedTimer(limit_s, Call.late)
            if len(self._limits) < _MAX_LIMITS:
                self._limits[limit_s] = limit
        return limit

    async def end(self) -> None:
        """End requests that are under way, then the proxy. The rest is cancelled after a while."""
        for call in self._calls:
            call.leave()
        tasks = {call.task for call in self._calls if call.task is not None}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_LEAVE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._owned and self.started:
            self.started = False
            await self.proxy.__aexit__()


class Lives:
    """Proxies of one configuration by event loop, which end with it. A `Proxy` that is given instead is started and
    ended by its maker."""

    def __init__(self, config: ConfigLike | Proxy | None, endpoints: Mapping[str, str] | None) -> None:
        if config is None:
            config = {"endpoints": {} if endpoints is None else endpoints}
        elif endpoints is not None:
            raise TypeError("give a configuration or endpoints, not both")
        self._given = config if isinstance(config, Proxy) else None
        self._config = config.config if isinstance(config, Proxy) else read_config(config)
        self._by_loop: dict[asyncio.AbstractEventLoop, Life] = {}
        self._ended: Proxy | None = None  # what it learned goes on with the next start
        _all_lives.add(self)
        weakref.finalize(self, _end_abandoned, self._by_loop).atexit = False

    def of_running_loop(self) -> Life:
        """Return that of the running event loop. The first one goes on with what one that ended, or whose loop is
        closed, has learned."""
        loop = find_loop()
        life = self._by_loop.get(loop)
        if life is None:
            for other in [other for other in self._by_loop if other.is_closed()]:
                self._ended = self._by_loop.pop(other).proxy
            if self._given is not None and self._by_loop:
                raise RuntimeError(
                    "this Proxy runs in another event loop; give the transport its configuration instead"
                )
            proxy = self._given or self._ended or Proxy(self._config)
            self._ended = None
            life = self._by_loop[loop] = Life(proxy, owned=self._given is None)
        return life

    async def end(self) -> None:
        """End the proxy of the running event loop; a later request starts another."""
        life = self._by_loop.pop(find_loop(), None)
        if life is not None:
            await life.end()
            self._ended = life.proxy

    def forget(self) -> None:
        """In a forked child: start over."""
        _inherited.append((dict(self._by_loop), self._ended))
        self._by_loop.clear()
        self._ended = None


def _end_abandoned(by_loop: Mapping[asyncio.AbstractEventLoop, Life]) -> None:
    """End proxies whose client was collected without being closed. Called in any thread."""
    for loop, life in by_loop.items():
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(life.end(), loop)


class Background:
    """An event loop in a thread, for clients without one; all of a process share it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="kvproxy", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait; a wait that is broken off (Ctrl-C) ends it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_background: Background | None = None
_background_lock = threading.Lock()


def background() -> Background:
    """Return the one of this process, made on first use."""
    global _background
    with _background_lock:
        if _background is None:
            _background = Background()
            atexit.register(_end_background, _background)
        return _background


def _end_background(which: Background) -> None:
    """End what runs there, within a bound: requests to engines are cancelled."""
    if which is not _background:
        return
    ends = [which.submit(lives.end()) for lives in list(_all_lives)]
    for each in ends:
        try:
            each.result(_END_S / len(ends))
        except Exception:  # noqa: BLE001 - the process ends, and the error has no reader
            continue
    which.loop.call_soon_threadsafe(which.loop.stop)


def _after_fork() -> None:
    global _background, _background_lock
    _inherited.append(_background)
    _background = None
    _background_lock = threading.Lock()
    for lives in list(_all_lives):
        lives.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
