"""Files of receipts: written with rotation, read with the rotated ones."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from operator import attrgetter
from pathlib import Path

import msgspec

from kvproxy.base.errors import KvproxyError
from kvproxy.operate.log_lines import printable
from kvproxy.operate.receipts.receipt import Receipt, decode_receipt

_MAX_SIMILAR = 20
_MAX_SHOWN = 4


class RotatingFile:
    """At most `max_files` files of about `max_bytes` each (a line is never cut). Appends to what is there already. With
    `period_s` a file also holds no more than one period of the wall clock, such as one day of UTC.

    Not safe for two writers: each proxy, and each of its workers, has a path of its own. Any method may raise OSError;
    the next call tries again.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        max_files: int,
        period_s: float = 0.0,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self.path = path
        self._period_s = period_s if wall_clock is not None else 0.0
        self._wall_clock = wall_clock
        self._period = 0  # that the last line was written in
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file: int | None = None
        self._size = 0
        self._torn = False  # a write failed in the middle of a line

    def open(self) -> None:
        """Open it now, so that a path that cannot be written is noticed at once. Readable by its owner alone."""
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            found = os.fstat(self._file)
            self._size = found.st_size
            self._period = int(found.st_mtime // self._period_s) if self._period_s else 0
            self._prune()

    def write_lines(self, lines: Sequence[bytes]) -> None:
        """Append all of these whole lines, in as few writes as the bound of a file allows."""
        batch: list[bytes] = []
        held = 0
        if self._wall_clock is not None and self._period_s:
            self._begin_period(int(self._wall_clock() // self._period_s))
        for line in lines:
            self.open()
            if self._size + held and self._size + held + len(line) > self._max_bytes:
                self._append(b"".join(batch))
                self._rotate()
                batch = []
                held = 0
            batch.append(line)
            held += len(line)
        self._append(b"".join(batch))

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            file = self._file
            self._file = None
            os.close(file)

    def _append(self, data: bytes) -> None:
        self.open()
        assert self._file is not None
        view = memoryview(b"\n" + data if self._torn else data)
        self._torn = True
        while view:
            written = os.write(self._file, view)
            self._size += written
            view = view[written:]
        self._torn = False

    def _begin_period(self, period: int) -> None:
        self.open()
        if self._size and period != self._period:
            self._rotate()
        self._period = period

    def _rotate(self) -> None:
        self.close()
        for number in range(self._max_files - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        if self._max_files == 1:
            self.path.unlink(missing_ok=True)
        self.open()

    def _prune(self) -> None:
        """Remove surplus files: an earlier run may have had a larger limit."""
        number = self._max_files
        while (beyond := self._numbered(number)).exists():
            beyond.unlink()
            number += 1

    def _numbered(self, number: int) -> Path:
        return rotated_path(self.path, number)


def rotated_path(path: Path, number: int) -> Path:
    """Return the file of this age; 0 is the one being written."""
    return path.with_name(f"{path.name}.{number}") if number else path


def worker_path(path: Path, index: int) -> Path:
    """Return the file of one of several workers; the first one's is `path` itself."""
    return path.with_name(f"{path.name}.worker-{index}") if index else path


def list_workers(path: Path) -> list[Path]:
    """Return the present file of every worker that wrote to `path`, the first one's before the others'."""
    beside = re.compile(rf"{re.escape(path.name)}\.worker-\d+")
    names = {match[0] for one in path.parent.iterdir() if (match := beside.match(one.name))}
    return [path, *(path.with_name(name) for name in sorted(names))]


def list_files(path: Path) -> Iterator[Path]:
    """Yield the file and its predecessors, the newest first; FileNotFoundError when there is none."""
    number = 0
    found = False
    while (each := rotated_path(path, number)).exists() or number == 0:
        if each.exists():
            found = True
            yield each
        number += 1
    if not found:
        raise FileNotFoundError(f"no receipts at {path}")


class Ambiguous(KvproxyError):
    """Several ids begin as the wanted one does."""

    def __init__(self, ids: list[str]) -> None:
        shown = ", ".join(printable(one) for one in ids[:_MAX_SHOWN])
        more = ", ..." if len(ids) > _MAX_SHOWN else ""
        super().__init__(f"several requests begin so: {shown}{more}: give more of the id")


@dataclass(slots=True)
class ReceiptReader:
    """All receipts of a file and its predecessors, and of other workers' files beside it. `broken` counts lines that
    are none (a disk that was full)."""

    path: Path
    broken: int = 0

    def oldest_first(self) -> Iterator[Receipt]:
        """In the order they were written. FileNotFoundError when there is no such file."""
        yield from merge(*map(self._of_one_worker, list_workers(self.path)), key=attrgetter("time"))

    def _of_one_worker(self, newest: Path) -> Iterator[Receipt]:
        for path in reversed(list(list_files(newest))):
            with path.open("rb") as lines:
                yield from self._receipts(lines)

    def find_receipts(self, request_id: str) -> list[Receipt]:
        """Those of one request id, or of the only one that begins so, the newest first: clients may use an id twice.

        Raises Ambiguous when several ids begin so and none is it.
        """
        wanted = msgspec.json.encode(request_id)[:-1]
        found: dict[str, list[Receipt]] = {}
        for path in chain(*map(list_files, list_workers(self.path))):
            with path.open("rb") as lines:
                here = [
                    one
                    for one in self._receipts(line for line in lines if wanted in line)
                    if one.request_id.startswith(request_id)
                ]
            for one in reversed(here):
                if one.request_id in found or one.request_id == request_id or len(found) < _MAX_SIMILAR:
                    found.setdefault(one.request_id, []).append(one)
        if request_id not in found and len(found) > 1:
            raise Ambiguous(list(found))
        chosen = found.get(request_id) or next(iter(found.values()), [])
        return sorted(chosen, key=attrgetter("time"), reverse=True)  # several workers may have had it

    def _receipts(self, lines: Iterable[bytes]) -> Iterator[Receipt]:
        for line in lines:
            if line.isspace():
                continue
            try:
                receipt = decode_receipt(line)
            except ValueError:
                self.broken += 1
            else:
                yield receipt
