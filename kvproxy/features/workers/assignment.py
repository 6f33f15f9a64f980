"""Interface of the supervisor and a worker: the line between them, a socket pair, and the folder of the workers'
sockets.

First the supervisor sends the assignment; the worker reports once that it serves, and sends heartbeats. Then the
supervisor may send the order to end, and to hurry. The end of either process closes the line, which the other one
notices at once, however it died."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import pickle
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvproxy.operate.config.schema import Config

log = logging.getLogger("kvproxy")

READY = b"r"
ALIVE = b"a"
DRAIN = b"d"
HURRY = b"h"
#: Interval of a worker's heartbeats, which show that its event loop runs.
BEAT_S = 0.5
_PREFIX = "kvproxy-"
_LOCK = "supervisor"
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
    """Assignment of one worker: its number among how many, and its configuration. Both processes run the same code, so
    it travels as a pickle; every worker serves the configuration that was checked once, even if the file changes
    meanwhile."""

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
    """Send the assignment, the first message. OSError when the worker is gone, or does not listen."""
    data = pickle.dumps(assignment)
    async with asyncio.timeout(_SAY_S):
        await asyncio.get_running_loop().sock_sendall(line, _LENGTH.pack(len(data)) + data)


def receive_assignment(line: socket.socket) -> Assignment:
    """Wait for it. EOFError when the supervisor is gone."""
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


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder for this user alone, gone afterwards; those that a supervisor could not remove because it was
    killed are removed before. Its supervisor holds a lock in it for as long as it lives."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        remove_left_folder(old)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / "new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / _LOCK)  # renamed last, so that no unlocked folder is visible
            yield folder


def remove_left_folder(folder: Path) -> None:
    """Unless its supervisor lives, or it is another user's."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return


class Link:
    """The worker's end of the line. `stop` is set when it shall end, `hurry` when at once; `cut` when the supervisor is
    gone.

    A supervisor that is gone means the end, as gracefully as on its word: no worker outlives it by more than a drain.
    """

    def __init__(self, line: socket.socket) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.cut = False
        self._line = line

    def install(self) -> None:
        """Start listening, and send the first heartbeat."""
        self._line.setblocking(False)
        asyncio.get_running_loop().add_reader(self._line, self._said)
        self._beat()

    def say_ready(self) -> None:
        """Report that the worker serves."""
        self._say(READY)

    def _beat(self) -> None:
        self._say(ALIVE)
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the supervisor does not listen, or is gone, which is noticed by reading
            self._line.send(word)

    def _said(self) -> None:
        try:
            words = self._line.recv(64)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        if not words:
            log.error("the supervisor is gone: no new requests, running ones finish")
            self.cut = True
            asyncio.get_running_loop().remove_reader(self._line)
        if HURRY in words:
            self.hurry.set()
        self.stop.set()
