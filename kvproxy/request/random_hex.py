"""Unguessable hexadecimal digits, drawn from the system many at a time: a system call for each id costs more than the
rest of it."""

from __future__ import annotations

import os
from collections.abc import Callable

_DRAWN_BYTES = 2048


class RandomHex:
    """A stock of random digits; none is handed out twice."""

    __slots__ = ("_at", "_draw", "_stock")

    def __init__(self, draw: Callable[[int], bytes] = os.urandom) -> None:
        self._draw = draw
        self._stock = ""
        self._at = 0

    def take(self, digits: int) -> str:
        """The next `digits` (at most 4096)."""
        at, end = self._at, self._at + digits
        if end > len(self._stock):
            self._stock = self._draw(_DRAWN_BYTES).hex()
            at, end = 0, digits
        self._at = end
        return self._stock[at:end]
