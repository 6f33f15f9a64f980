"""What the supervisor and a worker tell each other over the line between them, a socket pair.

First the supervisor says what the worker is; the worker says once that it serves. Then the supervisor may say to end,
and to hurry. The end of either process is the end of the line, which the other one notices at once, however it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvproxy.config.schema import Config

log = logging.getLogger("kvproxy")

READY, DRAIN, HURRY = b"r", b"d", b"h"
_LENGTH = struct.Struct("!Q")
_SAY_S = 10.0


@dataclass(frozen=True, slots=True)
class Change:
    """A request to a worker's admin app; of an operator's changes one that every worker has done."""

    method: str
    target: str
    """Path and query."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One worker: which of how many, and what it serves. Both processes run the same code, so it travels as a pickle;
    what was checked once is what every worker serves, whatever the file says meanwhile."""

    index: int
    count: int
    config: Config
    changes: Sequence[Change]
    """Done before it serves, in this order."""
    public: tuple[int, ...]
    """Descriptors of the listening sockets of clients, shared by all workers."""
    control: int
    """That of its own listening socket, for the supervisor alone."""
    folder: Path
    """Where the workers' sockets are."""
    receipts_key: bytes
    """Hides names in receipts: the same for all, so that a session has one name in them."""


async def send_assignment(line: socket.socket, assignment: Assignment) -> None:
    """The first thing said. OSError when the worker is gone, or does not listen."""
    data = pickle.dumps(assignment)
    async with asyncio.timeout(_SAY_S):
        await asyncio.get_running_loop().sock_sendall(line, _LENGTH.pack(len(data)) + data)


def receive_assignment(line: socket.socket) -> Assignment:
    """Waits for it. EOFError when the supervisor is gone."""
    (length,) = _LENGTH.unpack(_read(line, _LENGTH.size))
    assignment = pickle.loads(_read(line, length))
    assert isinstance(assignment, Assignment)
    return assignment


def _read(line: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = line.recv(length - len(data))
        if not piece:
            raise EOFError("the supervisor is gone")
        data += piece
    return bytes(data)


class Link:
    """The worker's end of the line. `stop` is set when it shall end, `hurry` when at once.

    A supervisor that is gone means the end, as gracefully as on its word: no worker outlives it by more than a drain.
    """

    def __init__(self, line: socket.socket) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._line = line

    def install(self) -> None:
        """Listen from now on."""
        self._line.setblocking(False)
        asyncio.get_running_loop().add_reader(self._line, self._said)

    def say_ready(self) -> None:
        """The worker serves."""
        with contextlib.suppress(OSError):  # the supervisor is gone, which is noticed by reading
            self._line.send(READY)

    def _said(self) -> None:
        try:
            words = self._line.recv(64)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        if not words:
            log.error("the supervisor is gone: no new requests, running ones finish")
            asyncio.get_running_loop().remove_reader(self._line)
        if HURRY in words:
            self.hurry.set()
        self.stop.set()
