"""The process log: records are formatted and written by a thread of its own, so that a slow terminal blocks nobody."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import queue
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from kvproxy.config.schema import Log
from kvproxy.log_lines import FIELDS, console_line, stamp

_MAX_WAITING_RECORDS = 10_000
#: Its records hold several lines, each with the time its request ended.
_ACCESS = "kvproxy.access"


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Lines of the access log that are objects already stay as they are."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name != _ACCESS:
            return self._object(record, {"message": record.getMessage()})
        lines = record.getMessage().split("\n")  # several in one record
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
        return console_line(_time(record), record.levelname, record.message)


def _time(record: logging.LogRecord) -> str:
    return stamp(datetime.fromtimestamp(record.created, UTC))


class _DroppingQueueHandler(logging.handlers.QueueHandler):
    """Never waits: when the writer cannot keep up, records are dropped and counted."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The message is fixed now, since what it is made of may change; its exception is left to the writer."""
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class _Writer(logging.handlers.QueueListener):
    """Ends although its queue is full: then the oldest waiting record makes room for the end mark."""

    def __init__(self, waiting: queue.Queue[Any], handler: logging.Handler) -> None:
        super().__init__(waiting, handler)
        self._waiting = waiting

    def enqueue_sentinel(self) -> None:
        while True:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._waiting.get_nowait()
            else:
                return


@contextlib.contextmanager
def logging_to(settings: Log, *, stream: TextIO = sys.stderr) -> Iterator[None]:
    """Log to `stream` for the length of the block; what waits is written before it ends."""
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING_RECORDS)
    writer = logging.StreamHandler(stream)
    writer.setFormatter(JsonFormatter() if settings.format == "json" else ConsoleFormatter())
    listener = _Writer(waiting, writer)
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
        if handler.dropped:
            stream.write(f"{handler.dropped} log records were dropped: the log could not be written fast enough\n")
        root.removeHandler(handler)
        root.setLevel(level)
