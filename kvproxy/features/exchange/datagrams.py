"""Between the workers of one machine: a Unix datagram socket each, in one folder."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

from kvproxy.features.exchange.bounded_queue import BoundedQueue
from kvproxy.features.exchange.wire import Origin
from kvproxy.operate.companion import Siblings

log = logging.getLogger("kvproxy.sync")

#: More are not configured (`workers`): other numbers are made up.
MAX_WORKERS = 64
#: Bytes waiting for one worker whose socket is full.
MAX_WAITING_BYTES = 8 * 1024 * 1024
#: Memory of a message beside its bytes.
MESSAGE_BYTES = 100
#: Pause before a full socket is tried again: its owner is busy.
AGAIN_S = 0.001
#: Messages read in one turn of the event loop.
_READS = 4
_BUFFER_BYTES = 4 * 1024 * 1024
_MAX_DATAGRAM = 256 * 1024


class Link(Protocol):
    """Carries messages to others, each whole or not at all, those of one sender in order as far as they come."""

    name: str
    connected: bool
    dropped: int  # messages that found no room

    @property
    def held_bytes(self) -> int:
        """Of messages not sent yet."""
        ...

    def send(self, payload: bytes, to: Origin | None) -> None:
        """To one, or to all. At once: what cannot be sent waits, or is dropped."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class DatagramLink:
    """`on_message` is called with what others send. A sibling whose socket is not there is no error: what was meant for
    it is gone."""

    name = "workers"

    def __init__(self, siblings: Siblings, *, on_message: Callable[[bytes], None]) -> None:
        self.connected = True
        self.dropped = 0
        self._siblings = siblings
        self._on_message = on_message
        self._socket: socket.socket | None = None
        self._others = {number for number in range(siblings.count) if number != siblings.number}
        self._waiting: dict[int, BoundedQueue[bytes]] = {}  # by worker
        self._again: asyncio.TimerHandle | None = None
        self._complained = ""

    def _path(self, number: int) -> str:
        return str(self._siblings.folder / f"sync-{number}.sock")

    @property
    def held_bytes(self) -> int:
        return sum(queue.held_bytes for queue in self._waiting.values())

    def know(self, worker: int) -> None:
        """There is a worker of this number, whatever their count was at the start."""
        if worker != self._siblings.number and 0 <= worker < MAX_WORKERS:
            self._others.add(worker)

    async def __aenter__(self) -> Self:
        self._bind()
        return self

    def renew(self) -> None:
        """Bind again if the socket's file is gone, by which the others find it."""
        before = self._socket
        if before is None or os.path.exists(self._path(self._siblings.number)):
            return
        try:
            self._bind()
        except OSError as error:
            self._complain(f"cannot be made again: {error}")
            return
        asyncio.get_running_loop().remove_reader(before)
        before.close()
        self._complained = ""
        self._complain("is made again")

    def _complain(self, what: str) -> None:
        """Log it once, as it is tried again with each heartbeat."""
        if what != self._complained:
            log.warning("the socket of worker %d was removed: it %s", self._siblings.number, what)
        self._complained = what

    def _bind(self) -> None:
        path = self._path(self._siblings.number)
        folder = self._siblings.folder
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the folder of the workers' sockets is another user's", str(folder))
        _unlink(path)
        self._socket = bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bound.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            bound.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        bound.bind(path)
        asyncio.get_running_loop().add_reader(bound, self._read)

    async def __aexit__(self, *_: object) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)
        if self._again is not None:
            self._again.cancel()
        self._socket.close()
        self._socket = None
        _unlink(self._path(self._siblings.number))

    def send(self, payload: bytes, to: Origin | None) -> None:
        for worker in self._others if to is None else (to.worker,):
            queue = self._waiting.get(worker)
            if queue is None and not self._sent(payload, worker):
                queue = self._waiting[worker] = BoundedQueue(MAX_WAITING_BYTES)
                self._try_again_soon()
            if queue is not None:
                self.dropped += queue.append(payload, len(payload) + MESSAGE_BYTES)

    def _sent(self, payload: bytes, worker: int) -> bool:
        """Send a datagram; False: its socket is full."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(payload, self._path(worker))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return False
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                self.dropped += 1
                log.warning("a message to worker %d was not sent: %s", worker, error.strerror)
        return True

    def _try_again_soon(self) -> None:
        if self._again is None:
            self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._try_again)

    def _try_again(self) -> None:
        self._again = None
        for worker, queue in list(self._waiting.items()):
            while queue and self._sent(next(iter(queue)), worker):
                queue.popleft()
            if not queue:
                del self._waiting[worker]
        if self._waiting:
            self._try_again_soon()

    def _read(self) -> None:
        for _ in range(_READS):
            if self._socket is None:
                return
            try:
                payload = self._socket.recv(_MAX_DATAGRAM)
            except (BlockingIOError, InterruptedError):
                return
            self._on_message(payload)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
