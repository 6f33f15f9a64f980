"""Receipts from files, the rotated ones included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvproxy.receipts.files import existing
from kvproxy.receipts.receipt import Receipt, decode


@dataclass(slots=True)
class Reading:
    """All receipts of a file and its predecessors. `broken` counts lines that are none (a disk that was full)."""

    path: Path
    broken: int = 0

    def oldest_first(self) -> Iterator[Receipt]:
        """In the order they were written. FileNotFoundError when there is no such file."""
        for path in reversed(list(existing(self.path))):
            with path.open("rb") as lines:
                yield from self._receipts(lines)

    def find(self, request_id: str) -> list[Receipt]:
        """Those of one request id, the newest first: clients may use an id twice."""
        wanted = msgspec.json.encode(request_id)
        found: list[Receipt] = []
        for path in existing(self.path):
            with path.open("rb") as lines:
                here = [one for one in self._receipts(line for line in lines if wanted in line)
                        if one.request_id == request_id]  # fmt: skip
            found += reversed(here)
        return found

    def _receipts(self, lines: Iterable[bytes]) -> Iterator[Receipt]:
        for line in lines:
            if line.isspace():
                continue
            try:
                receipt = decode(line)
            except ValueError:
                self.broken += 1
            else:
                yield receipt
