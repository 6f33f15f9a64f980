"""Folder of answers, a file each: any process that shares it goes on from any of them. Never on the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Raw

from kvproxy.base.timed_thread import TimedThread
from kvproxy.base.types import Clock, utc_seconds

#: A longer history is not kept: to parse one this long holds the event loop for some milliseconds.
MAX_ENTRY_BYTES = 8 * 1024 * 1024
MAX_AGE_S = 86_400.0
#: The folder is swept after so large a part of its bound was written, and after this time.
_SWEEP_PART = 16
_SWEEP_S = 600.0
_SUFFIX = ".json"
#: Of a call, after which the folder cannot be used for it, and calls at a time: those that hang go on.
_TIMEOUT_S = 2.0
_AT_ONCE = 8

T = TypeVar("T")


class StoredResponse(msgspec.Struct):
    """One answer with all that led to it."""

    items: list[Raw]  # input items, of all turns, then those of the answer
    response: Raw  # the answer as the client got it


_decode = msgspec.json.Decoder(StoredResponse).decode


def key_of(tenant: str, response_id: str) -> str:
    """Return the name of an answer: clients see those of their own tenant alone."""
    return hashlib.sha256(f"{tenant}\0{response_id}".encode()).hexdigest()


class ResponseStore:
    """Bounded in bytes and age. Raises OSError where the folder cannot be used."""

    def __init__(self, folder: Path, *, max_bytes: int, wall_clock: Clock = utc_seconds) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._now = wall_clock
        self._lock = threading.Lock()
        self._written = max_bytes  # since the last sweep: the first write sweeps
        self._swept_at = 0.0
        # A mount that hangs takes so many threads, and none of those that all of the process share.
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def get(self, key: str) -> StoredResponse | None:
        """Return an answer; None: it is not there, or too old."""
        return await self._call(lambda: self._read(key))

    async def put(self, key: str, response: StoredResponse) -> bool:
        """Keep an answer; returns False if it is too large."""
        return await self._call(lambda: self._write(key, response))

    async def remove(self, key: str) -> bool:
        """Forget an answer; returns whether it was there."""
        return await self._call(lambda: self._unlink(key))

    async def _call(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()

        def run() -> T:
            try:
                return work()
            finally:
                loop.call_soon_threadsafe(self._free.release)

        async with asyncio.timeout(_TIMEOUT_S):
            await self._free.acquire()
            return await TimedThread("stored response").call(run, timeout_s=_TIMEOUT_S)

    def _read(self, key: str) -> StoredResponse | None:
        path = self._path(key)
        try:
            if self._now() - path.stat().st_mtime > MAX_AGE_S:
                return None
            found = _decode(path.read_bytes())
            os.utime(path, (self._now(), self._now()))
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise OSError(f"{path.name} is damaged") from None
        return found

    def _write(self, key: str, response: StoredResponse) -> bool:
        data = msgspec.json.encode(response)
        if len(data) > MAX_ENTRY_BYTES:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(key)
        draft = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.utime(draft, (self._now(), self._now()))
        os.replace(draft, path)  # others see all of it or nothing
        with self._lock:
            self._written += len(data)
            due = self._written * _SWEEP_PART >= self._max_bytes or self._now() - self._swept_at > _SWEEP_S
            if due:
                self._written = 0
                self._swept_at = self._now()
        if due:
            self._sweep()
        return True

    def _unlink(self, key: str) -> bool:
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def _sweep(self) -> None:
        """Forget what is too old, and the longest unused beyond the bound. Other processes may do the same."""
        kept = []
        total = 0
        for entry in os.scandir(self._folder):
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            if self._now() - status.st_mtime > MAX_AGE_S:
                Path(entry.path).unlink(missing_ok=True)
            elif entry.name.endswith(_SUFFIX):
                kept.append((status.st_mtime, status.st_size, entry.path))
                total += status.st_size
        for _, size, path in sorted(kept):
            if total <= self._max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"
