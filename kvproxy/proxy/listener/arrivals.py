"""Bytes of one client: parsed when their turn comes, and no more of them read than its requests take."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sized
from typing import Protocol

from kvproxy.proxy.listener.ending import Ended, Ending
from kvproxy.proxy.listener.parser import BadRequest

#: Unread request body held for a slow app before reading from the client pauses.
HIGH_WATER_BYTES = 64 * 1024
#: Of a body that goes on after its answer; one that does not end there costs its connection.
MAX_UNWANTED_BYTES = 1024 * 1024
#: Pieces in which possible pipelined requests are parsed, as their turn comes. A head is rarely longer, and bodies
#: usually have no carriage return: most requests are parsed in one piece, however long.
PIECE_BYTES = 2048


class Buffered(Protocol):
    """A request whose body arrives."""

    @property
    def buffered_bytes(self) -> int: ...


class Receiver(Ended, Protocol):
    """The connection, as its bytes see it."""

    loop: asyncio.AbstractEventLoop
    ending: Ending

    @property
    def running(self) -> Buffered | None: ...
    @property
    def waiting(self) -> Sized: ...  # pipelined requests


class Arrivals:
    """The bytes of one connection that were not parsed yet, and whether more of them are read."""

    def __init__(self, connection: Receiver) -> None:
        self.unparsed = memoryview(b"")  # arrived, but not its turn yet
        self.paused = False
        self.unwanted_bytes = 0  # of the current body, since its answer was sent
        self._connection: Receiver = weakref.proxy(connection)  # which keeps this: no reference cycle

    @property
    def held_up(self) -> bool:
        """True while parsing is paused: earlier answers are due, or the app holds enough of its body."""
        connection = self._connection
        running = connection.running
        full = running is not None and running.buffered_bytes > HIGH_WATER_BYTES
        return full or bool(connection.waiting) or connection.ending.begun

    def keep(self, data: bytes) -> None:
        """Keep what came until its turn, which may be now."""
        self.unparsed = memoryview(bytes(self.unparsed) + data)
        self.read_on()

    def unwanted(self, size_bytes: int) -> None:
        """Count so much of a body that came after its answer."""
        self.unwanted_bytes += size_bytes
        if self.unwanted_bytes > MAX_UNWANTED_BYTES and not self._connection.ending.begun:
            self._connection.ending.hang_up(unread=True)

    def may_read_rest(self, arrived_bytes: int) -> bool:
        """Return True if the rest of a body of which so much arrived is known to be short enough to be dropped."""
        declared_bytes = self._connection.parser.declared_bytes
        return declared_bytes is not None and declared_bytes - arrived_bytes <= MAX_UNWANTED_BYTES

    def pause(self) -> None:
        """Pause reading: a slow app holds enough of the request body, or requests wait."""
        if not self.paused:
            self.paused = True
            self._connection.transport.pause_reading()

    def read_on(self) -> None:
        """Parse what is there as far as its turn has come, and read on."""
        while self.unparsed and not self.held_up:
            piece = self.unparsed[:PIECE_BYTES]
            self.unparsed = self.unparsed[PIECE_BYTES:]
            self.parse(piece)
        if self.paused and not self.held_up:
            self.resume()

    def resume(self) -> None:
        """Read again, if reading is paused."""
        if self.paused:
            self.paused = False
            self._connection.transport.resume_reading()

    def parse(self, data: bytes | memoryview) -> None:
        """Parse bytes whose turn has come."""
        connection = self._connection
        parser = connection.parser
        try:
            parser.feed(data)
        except BadRequest as error:
            connection.reject(error.status, str(error))
            return
        if parser.head_began:
            parser.head_began = False
            if parser.in_head:
                connection.ending.head_since = connection.loop.time()
        elif parser.dropped_bytes > MAX_UNWANTED_BYTES and not connection.ending.begun:
            connection.ending.hang_up(unread=True)
