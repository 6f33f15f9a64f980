"""Keeps a snapshot in a file: replaced whole or not at all, for its owner's eyes. Blocking calls."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from glob import escape
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_64

from kvproxy.base.types import Clock
from kvproxy.cache.saved_state import Outcome, Saved, Unusable, decode, pack_checksum

_READ_BYTES = 4 << 20
#: A temporary file this old was left by a proxy that was killed while it wrote.
_LEFT_BEHIND_S = 600.0


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
