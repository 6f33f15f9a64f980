"""Progress of long commands: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from typing import TextIO

_WIDTH = 30


def announce_part(what: str, out: TextIO) -> None:
    """Announce a part without figures; on a terminal the bar overwrites the line."""
    out.write(f"\r\033[K{what} ..." if out.isatty() else f"{what} ...\n")
    out.flush()


class ProgressBar:
    """One line, redrawn at most a hundred times."""

    def __init__(self, total: int, *, out: TextIO) -> None:
        self._total = max(1, total)
        self._out = out if out.isatty() else None
        self._plain = None if out.isatty() else out
        self._drawn = -1
        self._label = ""
        self._before = 0

    def begin(self, label: str) -> None:
        """Begin a part of the work; `advance` counts within it."""
        self._label = label
        self._drawn = -1
        if self._plain is not None:
            announce_part(label, self._plain)
        self.advance(0)

    def advance(self, done: int) -> None:
        """`done` of this part is finished."""
        percent = min(100, 100 * (self._before + done) // self._total)
        if self._out is None or percent == self._drawn:
            return
        self._drawn = percent
        filled = percent * _WIDTH // 100
        self._out.write(f"\r\033[K[{'#' * filled}{'.' * (_WIDTH - filled)}] {percent:3d} %  {self._label}")
        self._out.flush()

    def end(self, done: int) -> None:
        """End the part."""
        self._before += done

    def close(self) -> None:
        """Take the bar away."""
        if self._out is not None:
            self._out.write("\r\033[K")
            self._out.flush()
