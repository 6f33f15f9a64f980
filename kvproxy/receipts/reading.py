"""Receipts from files, the rotated ones included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvproxy.errors import KvproxyError
from kvproxy.filters.access_log import printable
from kvproxy.receipts.files import existing
from kvproxy.receipts.receipt import Receipt, decode

_MAX_SIMILAR = 20
_MAX_SHOWN = 4


class Ambiguous(KvproxyError):
    """Several ids begin as the wanted one does."""

    def __init__(self, ids: list[str]) -> None:
        shown = ", ".join(printable(one) for one in ids[:_MAX_SHOWN])
        more = ", ..." if len(ids) > _MAX_SHOWN else ""
        super().__init__(f"several requests begin so: {shown}{more}: give more of the id")


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
        """Those of one request id, or of the only one that begins so, the newest first: clients may use an id twice.

        Raises Ambiguous when several ids begin so and none is it.
        """
        wanted = msgspec.json.encode(request_id)[:-1]
        found: dict[str, list[Receipt]] = {}
        for path in existing(self.path):
            with path.open("rb") as lines:
                here = [one for one in self._receipts(line for line in lines if wanted in line)
                        if one.request_id.startswith(request_id)]  # fmt: skip
            for one in reversed(here):
                if one.request_id in found or one.request_id == request_id or len(found) < _MAX_SIMILAR:
                    found.setdefault(one.request_id, []).append(one)
        if request_id in found:
            return found[request_id]
        if len(found) > 1:
            raise Ambiguous(list(found))
        return next(iter(found.values()), [])

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
