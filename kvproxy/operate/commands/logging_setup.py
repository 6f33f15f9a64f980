"""The process log: a thread formats and writes its records, so that a slow terminal blocks no request."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import queue
import select
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from kvproxy.operate.log_lines import FIELDS, format_console_line, format_time
from kvproxy.proxy.settings import LogSettings

_MAX_WAITING_RECORDS = 10_000
#: How long the end waits for unwritten lines; the rest is lost if the log is no longer read.
END_S = 1.0
_STEP_MS = 100
#: Its records hold several lines, each with the time its request ended.
_ACCESS = "kvproxy.access"


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Lines of the access log that are objects already stay as they are."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name != _ACCESS:
            return self._object(record, {"message": record.getMessage()})
        lines = record.getMessage().split("\n")  # several lines in one record
        return "\n".join(line if line.startswith("{") else self._object(record, {"message": line}) for line in lines)

    def _object(self, record: logging.LogRecord, said: Mapping[str, Any]) -> str:
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **getattr(record, FIELDS, said),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class ConsoleFormatter(logging.Formatter):
    """Time, level and message for people. Lines of the access log have them already."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if record.name == _ACCESS else super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return format_console_line(_time(record), record.levelname, record.message)


def _time(record: logging.LogRecord) -> str:
    return format_time(datetime.fromtimestamp(record.created, UTC))


class _DroppingQueueHandler(logging.handlers.QueueHandler):
    """Never waits: when the writer cannot keep up, records are dropped and counted."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format the message now, since its arguments may change; its exception is left to the writer."""
        record.msg = record.getMessage()
        record.args = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class LogOutput:
    """A stream that its writer is never stuck in.

    A pipe or terminal that takes nothing is waited for in steps, until `give_up` is set: a thread stuck in a write
    would hold the stream's lock, and the interpreter could not end.
    """

    def __init__(self, stream: TextIO) -> None:
        self.give_up = threading.Event()
        self._stream = stream
        self._poll = select.poll()
        self._fd = -1
        self._piece_bytes = select.PIPE_BUF  # as much as does not block a pipe that polls as writable
        with contextlib.suppress(OSError, ValueError):  # not a file
            stream.flush()
            self._fd = stream.fileno()
            self._poll.register(self._fd, select.POLLOUT)
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                self._piece_bytes = sys.maxsize

    def write(self, text: str) -> None:
        """All of it, unless it is given up."""
        if self._fd < 0:
            self._stream.write(text)
            return
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        with contextlib.suppress(OSError):  # no place to report it
            while left:
                gives_up = self.give_up.is_set()
                if self._poll.poll(0 if gives_up else _STEP_MS):
                    left = left[os.write(self._fd, left[: self._piece_bytes]) :]
                elif gives_up:
                    return

    def flush(self) -> None:
        """As streams have it; a file descriptor keeps nothing back."""
        if self._fd < 0:
            self._stream.flush()


class _Writer(logging.handlers.QueueListener):
    """Ends although its queue is full, and although its output takes nothing."""

    def __init__(self, waiting: queue.Queue[Any], handler: logging.Handler, output: LogOutput) -> None:
        super().__init__(waiting, handler)
        self._waiting = waiting
        self._output = output

    def stop(self) -> None:
        """Wait for what is to be written, for a bounded time."""
        thread: threading.Thread | None = self._thread
        self._thread = None
        if thread is None:
            return
        self.enqueue_sentinel()
        thread.join(END_S)
        if thread.is_alive():
            self._output.give_up.set()
            thread.join(END_S)

    def enqueue_sentinel(self) -> None:
        """Put the end mark, in place of the oldest waiting record if there is no room."""
        while True:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._waiting.get_nowait()
            else:
                return


@contextlib.contextmanager
def log_to(settings: LogSettings, *, stream: TextIO = sys.stderr) -> Iterator[None]:
    """Log to `stream` for the length of the block; what waits is written before it ends, or what END_S suffices for."""
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING_RECORDS)
    output = LogOutput(stream)
    writer: logging.Handler = logging.StreamHandler(output)
    writer.setFormatter(JsonFormatter() if settings.format == "json" else ConsoleFormatter())
    listener = _Writer(waiting, writer, output)
    handler = _DroppingQueueHandler(waiting)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(settings.level.upper())
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        if handler.dropped and not output.give_up.is_set():
            output.write(f"{handler.dropped} log records were dropped: the log could not be written fast enough\n")
        root.removeHandler(handler)
        root.setLevel(level)
