"""The `date` field of responses that have none, made once a second for all connections of a listener."""

from __future__ import annotations

import math
from collections.abc import Callable
from email.utils import formatdate


class HttpDate:
    """Field line for the present second (RFC 9110 6.6.1). `now_s`: seconds of any clock that does not step back."""

    __slots__ = ("_line", "_make", "_until_s")

    def __init__(self, make: Callable[[], str] = lambda: formatdate(usegmt=True)) -> None:
        self._make = make
        self._line = b""
        self._until_s = -math.inf

    def line(self, now_s: float) -> bytes:
        """Return `date: Sun, 06 Nov 1994 08:49:37 GMT`."""
        if now_s >= self._until_s:
            self._line = b"date: " + self._make().encode("ascii")
            self._until_s = now_s + 1.0
        return self._line
