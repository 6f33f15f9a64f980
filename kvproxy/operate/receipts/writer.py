"""A thread that writes what the event loop hands it; the loop never waits for a disk."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.collectors import Counter, CounterCell
from kvproxy.base.metrics.groups import Metrics
from kvproxy.operate.receipts.files import RotatingFile
from kvproxy.proxy.request.observer import RequestObserver

log = logging.getLogger(__name__)

#: Lines made before they are written. Writing releases the interpreter, so that the event loop runs often.
SLICE = 16
#: Longest wait of the shutdown for a slow disk.
_CLOSE_S = 5.0

T = TypeVar("T")


class Writer(Generic[T]):
    """Writer of lines to `file`, made by `encode` in a thread of its own.

    `put` costs an append. The thread polls every `interval_s` instead of being woken for each item, since waking it
    costs the event loop more than the rest of a receipt. Items beyond `limit` are dropped and counted."""

    def __init__(
        self,
        file: RotatingFile,
        encode: Callable[[T], bytes],
        *,
        limit: int,
        written: CounterCell,
        dropped: CounterCell,
        failed: CounterCell,
        interval_s: float = 0.05,
    ) -> None:
        self._file = file
        self._encode = encode
        self._limit = limit
        self._written = written
        self._dropped = dropped
        self._failed = failed
        self._interval_s = interval_s
        self._waiting: deque[T] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._broken = False

    @property
    def waiting(self) -> int:
        """Items not yet written."""
        return len(self._waiting)

    def start(self) -> None:
        """Open the file (OSError when that cannot be) and begin."""
        self._file.open()
        self._thread = threading.Thread(target=self._run, name=f"kvproxy {self._file.path.name}", daemon=True)
        self._thread.start()

    def put_item(self, item: T) -> None:
        """Have it written soon; dropped when too much is waiting."""
        if len(self._waiting) >= self._limit:
            self._dropped.inc()
        else:
            self._waiting.append(item)

    def close(self, timeout_s: float) -> None:
        """Write the waiting items, for at most `timeout_s`; blocks. The rest is counted as dropped."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        left = len(self._waiting)
        self._waiting.clear()
        self._dropped.inc(left)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._drain()
        self._drain()
        self._file.close()

    def _drain(self) -> None:
        while self._waiting:
            lines = self._slice()
            try:
                self._file.write_lines(lines)
            except OSError as error:
                self._failed.inc(len(lines))
                if not self._broken:
                    log.error("%s is not written: %s", self._file.path, error)
                self._broken = True
            else:
                self._written.inc(len(lines))
                self._broken = False

    def _slice(self) -> list[bytes]:
        lines: list[bytes] = []
        while len(lines) < SLICE:
            try:
                item = self._waiting.popleft()
            except IndexError:
                break
            try:
                lines.append(self._encode(item))
            except Exception:
                self._failed.inc()
                log.exception("a line of %s cannot be written", self._file.path)
        return lines


class WritingObserver(RequestObserver, Generic[T]):
    """Puts a line for requests into a file. Entered before the first request and left after the last."""

    def __init__(self, file: RotatingFile, *, queue: str, limit: int, results: Counter, metrics: Metrics) -> None:
        written, dropped, failed = (results.labels(each) for each in ("written", "dropped", "failed"))
        self._writer: Writer[T] = Writer(file, self._line, limit=limit, written=written, dropped=dropped, failed=failed)
        metrics.group(BoundMetrics).show_queue(queue, lambda: self._writer.waiting, limit=limit)

    async def __aenter__(self) -> Self:
        self._writer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._writer.close, _CLOSE_S)

    def _line(self, item: T) -> bytes:
        """Of one request, in the writer's thread."""
        raise NotImplementedError
