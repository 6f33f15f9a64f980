"""Lines in a file that is renamed when it is full: `receipts.jsonl`, then `receipts.jsonl.1`, ... the oldest last."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path


class RotatingFile:
    """At most `max_files` files of about `max_bytes` each (a line is never cut). Appends to what is there already.

    Not safe for two writers: each proxy has a path of its own. Any method may raise OSError; the next call tries again.
    """

    def __init__(self, path: Path, *, max_bytes: int, max_files: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file: int | None = None
        self._size = 0
        self._torn = False  # a write failed in the middle of a line

    def open(self) -> None:
        """Open it now, so that a path that cannot be written is noticed at once. Readable by its owner alone."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._file).st_size
            self._prune()

    def write(self, lines: Sequence[bytes]) -> None:
        """Append all of these whole lines, in as few writes as the bound of a file allows."""
        batch: list[bytes] = []
        held = 0
        for line in lines:
            self.open()
            if self._size + held and self._size + held + len(line) > self._max_bytes:
                self._append(b"".join(batch))
                self._rotate()
                batch, held = [], 0
            batch.append(line)
            held += len(line)
        self._append(b"".join(batch))

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
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

    def _rotate(self) -> None:
        self.close()
        for number in range(self._max_files - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        if self._max_files == 1:
            self._path.unlink(missing_ok=True)
        self.open()

    def _prune(self) -> None:
        """An earlier run may have been allowed more files."""
        number = self._max_files
        while (beyond := self._numbered(number)).exists():
            beyond.unlink()
            number += 1

    def _numbered(self, number: int) -> Path:
        return numbered(self._path, number)


def numbered(path: Path, number: int) -> Path:
    """The file of this age; 0 is the one being written."""
    return path.with_name(f"{path.name}.{number}") if number else path


def existing(path: Path) -> Iterator[Path]:
    """The file and its predecessors, the newest first; FileNotFoundError when there is none."""
    number, found = 0, False
    while (each := numbered(path, number)).exists() or number == 0:
        if each.exists():
            found = True
            yield each
        number += 1
    if not found:
        raise FileNotFoundError(f"no receipts at {path}")
