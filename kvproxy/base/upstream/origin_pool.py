"""The connections to one origin: idle ones, how many may be open, requests that wait. Opens and sends nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvproxy.base.errors import PoolFull
from kvproxy.base.types import Clock
from kvproxy.base.upstream.connection import Connection
from kvproxy.base.upstream.origin import Origin


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of each origin's pool."""

    max_connections: int
    max_idle: int
    idle_timeout_s: float
    max_waiting: int


class OriginPool:
    """Pool of one origin; it counts slots from before a connection is opened until its socket is gone.

    A free slot or connection goes to the longest waiting request first, so connections are idle and slots unused only
    while no request waits. `on_empty` is called when nothing is left."""

    def __init__(
        self, origin: Origin, limits: PoolLimits, *, clock: Clock, on_empty: Callable[[OriginPool], None]
    ) -> None:
        self.origin = origin
        self.open = 0  # slots taken: idle, busy and still connecting
        self._members: set[Connection] = set()  # those with a socket
        self._limits = limits
        self._clock = clock
        self._on_empty = on_empty
        self._idle: dict[Connection, float] = {}  # since when; in that order, so the last is the warmest
        self._waiting: deque[asyncio.Future[Connection | None]] = deque()
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None  # while `close` waits

    @property
    def idle(self) -> int:
        """Connections that could serve a request now."""
        return len(self._idle)

    @property
    def waiting(self) -> int:
        """Requests in the waiting line."""
        return len(self._waiting)

    def acquire_idle(self) -> Connection | None:
        """Return the connection used last, if any was used recently enough."""
        if not self._idle:
            return None
        connection, since = self._idle.popitem()
        if self._clock() - since <= self._limits.idle_timeout_s:
            return connection
        connection.close()
        self.close_idle()  # it was the youngest
        return None

    def reserve_slot(self) -> bool:
        """Take a slot for a new connection; False when all are taken."""
        if self.open >= self._limits.max_connections:
            return False
        self.open += 1
        return True

    def free_slot(self) -> None:
        """Free a slot; the next request in line connects with it."""
        self.open -= 1
        while self._waiting and self.open < self._limits.max_connections:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self.open += 1
                waiter.set_result(None)
        if not self.open and not self._waiting:
            if self._sweeper is not None:
                self._sweeper.cancel()
                self._sweeper = None
            self._on_empty(self)

    async def wait_in_line(self, timeout_s: float) -> Connection | None:
        """Stands in line: a connection at rest, or None for a slot reserved for a new one.

        Raises PoolFull when the line is at its bound or `timeout_s` (0: none) passed.
        """
        if len(self._waiting) >= self._limits.max_waiting:
            raise PoolFull(f"{self.open} connections to {self.origin} busy and {len(self._waiting)} requests waiting")
        waiter: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(timeout_s or None):
                return await waiter
        except BaseException as error:
            if not waiter.done() or waiter.cancelled() or waiter.exception() is not None:
                waiter.cancel()
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
            elif (connection := waiter.result()) is None:  # handed to it in the same moment: it goes to the next
                self.free_slot()
            elif not connection.closed:
                self.release(connection)
            if isinstance(error, TimeoutError):
                raise PoolFull(f"no free connection to {self.origin} within {timeout_s:g} s") from None
            raise

    def adopt_connection(self, connection: Connection) -> bool:
        """Return a new connection in a reserved slot, which goes with it from here on; False when it is
        closed already."""
        if connection.lost:
            self.free_slot()
            return False
        connection.owner = self
        self._members.add(connection)
        return not connection.closed

    def make_room(self) -> None:
        """When all slots are taken, closes the longest idle connection to get one for a fresh connection."""
        oldest = next(iter(self._idle), None)
        if oldest is not None and self.open >= self._limits.max_connections:
            oldest.close()

    def close_idle(self) -> None:
        """Close every idle connection."""
        for connection in list(self._idle):
            connection.close()

    async def close(self, error: Exception) -> None:
        """Close every connection and waits until their sockets are gone; requests in line get the error."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(error)
        if self._members:
            self._emptied = asyncio.get_running_loop().create_future()
            for connection in list(self._members):
                connection.close()
            await self._emptied

    # Owner of its connections

    def release(self, connection: Connection) -> None:
        """To the next in line, else to the idle ones, else closed."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        if len(self._idle) >= self._limits.max_idle:
            connection.close()
            return
        self._idle[connection] = self._clock()
        if self._sweeper is None:
            self._sweep()

    def retire(self, connection: Connection) -> None:
        """Take a connection off the idle ones."""
        self._idle.pop(connection, None)

    def lost(self, connection: Connection) -> None:
        """Its slot is free."""
        self.retire(connection)
        self._members.discard(connection)
        if self._emptied is not None and not self._members and not self._emptied.done():
            self._emptied.set_result(None)
        self.free_slot()

    def _sweep(self) -> None:
        """Close connections that were idle for too long; look again when the next one will have been."""
        self._sweeper = None
        now = self._clock()
        for connection, since in list(self._idle.items()):
            left_s = since + self._limits.idle_timeout_s - now
            if left_s > 0:
                self._sweeper = asyncio.get_running_loop().call_later(max(left_s, 0.01), self._sweep)
                return
            connection.close()
