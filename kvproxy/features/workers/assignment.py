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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvproxy.base.settings.feature_settings import settings_of_features
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.config.schema import Config
from kvproxy.operate.receipts.files import worker_path

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


#: Upper bound of `auto`: every worker also handles the messages of all the others.
AUTO_MOST = 8
_CGROUP = Path("/sys/fs/cgroup/cpu.max")


def take_share(config: Config, index: int, count: int) -> Config:
    """Its bounds add up to those configured, and none is less than one."""

    def part(whole: int) -> int:
        return -(-whole // count)

    limits = config.limits
    pool = config.pool
    receipts = config.receipts
    shared = config.model_copy(
        update={
            "limits": limits.model_copy(
                update={"connections": part(limits.connections), "bodies": max(limits.body, part(limits.bodies))}
            ),
            "pool": pool.model_copy(update={"max_connections": part(pool.max_connections)}),
            "receipts": receipts.model_copy(
                update={
                    "path": str(worker_path(Path(receipts.path), index)) if receipts.path else "",
                    "max_file": part(receipts.max_file),
                }
            ),
            "clusters": _with_part_of_queues(config.clusters, count),
        }
    )
    for feature in settings_of_features():
        shared = shared.model_copy(update=feature.share(shared, index, part))
    return shared


def _with_part_of_queues(clusters: Mapping[str, ClusterSettings], count: int) -> dict[str, ClusterSettings]:
    """Return a share of each router queue."""
    return {
        name: one.model_copy(update={"queue": one.queue.model_copy(update={"limit": -(-one.queue.limit // count)})})
        for name, one in clusters.items()
    }


def begins_alone(config: Config) -> bool:
    """Return whether the first worker serves before the others start: it restores what they then ask it for, since its
    filters keep files that theirs do not."""
    return take_share(config, 0, 2).filters != take_share(config, 1, 2).filters


def count_workers(wanted: int | str, *, cores: float | None = None) -> int:
    """`auto` leaves one core to everything else."""
    if isinstance(wanted, int):
        return wanted
    free = int(usable_cores() if cores is None else cores) - 1
    return max(1, min(AUTO_MOST, free))


def usable_cores(*, cgroup: Path = _CGROUP) -> float:
    """Those the process may run on, or a container's share of their time where that is less."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = cgroup.read_text().split()[:2]
        return min(allowed, int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or `max`
        return allowed
