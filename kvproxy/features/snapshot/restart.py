"""Keeps a service's snapshot: read before the first request, written again and again and at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Protocol, Self, TypeVar

from xxhash import xxh3_64

from kvproxy.base.background_task import BackgroundTask, run_in_slices
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.timed_thread import TimedThread
from kvproxy.base.types import Clock, Sleep
from kvproxy.cache.feature import CacheObserver, CacheParts
from kvproxy.features.snapshot.metrics import SnapshotMetrics
from kvproxy.features.snapshot.settings import SnapshotSettings
from kvproxy.operate.runtime.saved_state import Contents, Outcome, Returned, Saved, Unusable, decode, pack_checksum

#: Largest file, with a little over 8 bytes for each 256 bytes of prompt; the least recently requested entries are left
#: out.
MAX_BYTES = 64 * 1024 * 1024
#: An older file is not used: the engines have evicted much of its contents.
MAX_AGE_S = 3600.0
_READ_BYTES = 4 << 20
#: A temporary file this old was left by a proxy that was killed while it wrote.
_LEFT_BEHIND_S = 600.0
#: Interval of writes.
INTERVAL_S = 60.0


class Store(Protocol):
    """Where snapshots are kept. Both may raise OSError and take their time."""

    def read(self) -> Saved:
        """Return the latest. Raises Unusable when there is none, or none that can be used."""
        ...

    def write(self, pieces: Sequence[bytes]) -> int:
        """Replace it by this one; its size in bytes."""
        ...


class SnapshotFile:
    """One file. `write` is what writes to a descriptor (os.write), `wall_clock` seconds since the epoch."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        wall_clock: Clock,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._wall_clock = wall_clock
        self._write = write

    def read(self) -> Saved:
        """Return the latest one; what a killed writer left behind is cleared away."""
        self._clear_left_behind()
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hold us
        except FileNotFoundError:
            raise Unusable(Outcome.NONE, "no file yet") from None
        with open(descriptor, "rb", buffering=0) as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise OSError("not a regular file")
            if about.st_size > self._max_bytes:
                raise Unusable(Outcome.TOO_LARGE, f"{about.st_size} bytes, of {self._max_bytes} allowed")
            pieces = iter(lambda: file.read(_READ_BYTES), b"")
            return decode(b"".join(pieces))

    def write(self, pieces: Sequence[bytes]) -> int:
        """Temporary file, fsync, rename, fsync of the folder: after a crash there is the old file or the new one."""
        folder = self._path.parent
        descriptor, name = tempfile.mkstemp(prefix=self._prefix, suffix=".tmp", dir=folder)  # mode 0600
        try:
            with open(descriptor, "wb", buffering=0):
                size = self._write_all(descriptor, pieces)
                os.fsync(descriptor)
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        self._sync(folder)
        return size

    @property
    def _prefix(self) -> str:
        return f".{self._path.name}."

    def _write_all(self, descriptor: int, pieces: Sequence[bytes]) -> int:
        """Piece by piece, so that this thread never keeps the interpreter from the event loop for long."""
        seen = xxh3_64()
        size = 0
        for piece in pieces:
            seen.update(piece)
            size += self._append(descriptor, piece)
        return size + self._append(descriptor, pack_checksum(seen))

    def _append(self, descriptor: int, piece: bytes) -> int:
        rest = memoryview(piece)
        while rest:
            rest = rest[self._write(descriptor, rest) :]
        return len(piece)

    def _sync(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _clear_left_behind(self) -> None:
        before = self._wall_clock() - _LEFT_BEHIND_S
        for file in self._path.parent.glob(f"{escape(self._prefix)}*.tmp"):
            with contextlib.suppress(OSError):
                if file.lstat().st_mtime < before:
                    file.unlink()


log = logging.getLogger("kvproxy.kvcache")

#: The event loop is held no longer than this at a time, and then left alone for as long as the pause.
SLICE_S = 0.0005
PAUSE_S = 0.005
#: For the file alone, at the start and at the end. A disk that takes longer is left to itself.
FILE_TIMEOUT_S = 10.0

T = TypeVar("T")


@dataclass(slots=True)
class Last:
    """The snapshot there is."""

    taken_at: float  # by the proxy's clock
    size_bytes: int
    took_s: float | None  # None: another life wrote it


#: Those of this process that keep a file.
_running: weakref.WeakSet[WarmRestart] = weakref.WeakSet()


class WarmRestart(BackgroundTask, CacheObserver):
    """An async context manager around the service's other tasks: entered first, so that everything is there when they
    start, and left last. Only a `fresh` service is filled; one that follows on another has it all already. A file that
    another service of this process keeps is left alone.

    Nothing about the file ever fails a request, the start or the end.
    """

    task_name = "kvcache snapshots"

    def __init__(
        self,
        settings: SnapshotSettings,
        contents: Contents,
        store: Store,
        *,
        fresh: bool,
        metrics: Metrics,
        clock: Clock,
        sleep: Sleep = asyncio.sleep,
        file_timeout_s: float = FILE_TIMEOUT_S,
    ) -> None:
        self._settings = settings
        self._contents = contents
        self._store = store
        self._fresh = fresh
        self._clock = clock
        self._sleep = sleep
        self._file_timeout_s = file_timeout_s
        self._thread = TimedThread("kvcache snapshot")
        self._loop: asyncio.AbstractEventLoop | None = None  # while it keeps the file
        self._last: Last | None = None
        self._failing = False
        self.restored: Outcome | None = None
        self._returned: Returned | None = None
        self._writes = metrics.group(SnapshotMetrics).writes
        self._restores = metrics.group(SnapshotMetrics).restores
        self.lifetime = self

    def bind_gauges(self, metrics: Metrics) -> None:
        """Bind the gauges to this object."""
        metrics.group(SnapshotMetrics).bytes.set_source(self._sizes)
        metrics.group(SnapshotMetrics).age.set_source(self._ages)

    async def __aenter__(self) -> Self:
        if any(other.keeps(self._settings.path, self._contents) for other in list(_running)):
            log.warning(
                "[kvcache] no snapshot at %s: another proxy or middleware of this process keeps it; "
                "set another `snapshot.path` for this one",
                self._settings.path,
            )
            self.restored = Outcome.IN_USE
            self._restores.labels(self.restored.value).inc()
            return self
        self._loop = asyncio.get_running_loop()
        _running.add(self)
        if self._fresh:
            await self._restore()
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        if self._loop is None:
            return
        await super().__aexit__(*exc_info)
        await self.write(pause_s=0.0)
        self._loop = None
        _running.discard(self)

    def keeps(self, path: str, contents: Contents) -> bool:
        """Return whether this file is kept here, for another service than that of these contents."""
        return (
            self._loop is not None
            and not self._loop.is_closed()
            and not contents.continues(self._contents)
            and os.path.realpath(path) == os.path.realpath(self._settings.path)
        )

    def status(self) -> dict[str, object]:
        """For people."""
        last = self._last
        return {
            "path": self._settings.path,
            "age_s": None if last is None else self._clock() - last.taken_at,
            "bytes": None if last is None else last.size_bytes,
            "took_s": None if last is None else last.took_s,
            "failing": self._failing,
            "restored": None if self.restored is None else self.restored.value,
            "restored_blocks": 0 if self._returned is None else self._returned.blocks,
            "restored_endpoints": 0 if self._returned is None else self._returned.endpoints,
        }

    async def write(self, *, pause_s: float = PAUSE_S) -> None:
        """Take and write a snapshot. A failure is logged once, until one succeeds."""
        began = self._clock()
        try:
            pieces = await self._sliced(self._contents.take(MAX_BYTES), pause_s)
            size = await self._thread.call(lambda: self._store.write(pieces), timeout_s=self._file_timeout_s)
        except Exception as error:  # noqa: BLE001 - logged there; the proxy works as well without a snapshot
            self._failed(error)
            return
        self._writes.labels("written").inc()
        if self._failing:
            log.info("[kvcache] snapshots at %s are written again", self._settings.path)
        self._failing = False
        self._last = Last(began, size, self._clock() - began)

    async def _run(self) -> None:
        while True:
            await self._sleep(INTERVAL_S)
            await self.write()

    def _failed(self, error: Exception) -> None:
        self._writes.labels("failed").inc()
        if not self._failing:
            ours = None if isinstance(error, OSError) else error
            log.warning("[kvcache] no snapshot at %s: %s", self._settings.path, _reason(error), exc_info=ours)
        self._failing = True

    async def _restore(self) -> None:
        try:
            snapshot = await self._thread.call(self._store.read, timeout_s=self._file_timeout_s)
            steps = self._contents.put_back(snapshot, max_age_s=MAX_AGE_S)
            self._welcome(await self._sliced(steps, 0.0), snapshot.size_bytes)
            self.restored = Outcome.RESTORED
        except Unusable as error:
            self.restored = error.outcome
            level = logging.INFO if error.outcome is Outcome.NONE else logging.WARNING
            log.log(level, "[kvcache] starting empty: snapshot %s: %s", self._settings.path, error)
        except OSError as error:
            self.restored = Outcome.UNREADABLE
            log.warning("[kvcache] starting empty: snapshot %s: %s", self._settings.path, _reason(error))
        except Exception:
            self.restored = Outcome.CORRUPT
            log.exception("[kvcache] starting without snapshot %s", self._settings.path)
        self._restores.labels(self.restored.value).inc()

    def _welcome(self, returned: Returned, size_bytes: int) -> None:
        self._returned = returned
        self._last = Last(self._clock() - returned.age_s, size_bytes, None)
        log.info(
            "[kvcache] warm start: %d blocks at %d endpoints from %s, %.0f s old; endpoints left out: %d",
            returned.blocks,
            returned.endpoints,
            self._settings.path,
            returned.age_s,
            returned.left_out,
        )

    async def _sliced(self, steps: Generator[None, None, T], pause_s: float) -> T:
        return await run_in_slices(steps, slice_s=SLICE_S, clock=self._clock, pause_s=pause_s, sleep=self._sleep)

    def _sizes(self) -> Iterator[tuple[tuple[str, ...], float]]:
        if self._last is not None:
            yield (), self._last.size_bytes

    def _ages(self) -> Iterator[tuple[tuple[str, ...], float]]:
        if self._last is not None:
            yield (), self._clock() - self._last.taken_at


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def warm_restart(settings: SnapshotSettings, parts: CacheParts) -> WarmRestart:
    """Return the observer that keeps this service's snapshot."""
    store = SnapshotFile(Path(settings.path), max_bytes=MAX_BYTES, wall_clock=parts.wall_clock)
    contents = Contents(parts.state, clusters=parts.clusters, clock=parts.clock, wall_clock=parts.wall_clock)
    return WarmRestart(settings, contents, store, fresh=parts.state.fresh, metrics=parts.metrics, clock=parts.clock)
