"""Where something stands: dotted paths, the way back from canonical to written ones, and lines of the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from kvproxy.errors import Problem

Path = tuple[str | int, ...]

#: Dotted text of a path, as its file shows it.
Where = Callable[[Path], str]


def dotted_path(path: Path) -> str:
    """`clusters.default.endpoints[0].url`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def is_inside(path: str, outer: str) -> bool:
    """Whether a dotted path is `outer` or lies below it."""
    return not outer or path == outer or (path.startswith(outer) and path[len(outer)] in ".[")


class Origins:
    """Written paths of canonical ones, by longest known prefix: shorthands move values, messages must not."""

    def __init__(self, moves: Iterable[tuple[Path, Path]] = ()) -> None:
        self._written = dict(moves)

    def add_move(self, canonical: Path, written: Path) -> None:
        """What now stands at `canonical` was written at `written`."""
        self._written[canonical] = written

    def find_written(self, canonical: Path) -> Path:
        """Where it was written; the same path where nothing moved."""
        for length in range(len(canonical), -1, -1):
            written = self._written.get(canonical[:length])
            if written is not None:
                return written + canonical[length:]
        return canonical

    def __call__(self, canonical: Path) -> str:
        return dotted_path(self.find_written(canonical))


_BOUNDARY = re.compile(r"[.\[]")
#: Keys may hold dots themselves; more of them than this in one key and only its parent is found.
_MAX_DOTS = 32


@dataclass(slots=True)
class Place:
    """A value's line and column (from 1) and the places of what it holds: by key, or by `[index]`."""

    line: int = 0
    column: int = 0
    below: dict[str, Place] = field(default_factory=dict)

    def find_place(self, path: str) -> Place:
        """The place of a dotted path, else of its nearest parent that was written."""
        here = self
        while path:
            end = here._longest_key(path)
            if not end:
                break
            here, path = here.below[path[:end]], path[end:].removeprefix(".")
        return here

    def _longest_key(self, path: str) -> int:
        if path in self.below:
            return len(path)
        ends = [match.start() for match in islice(_BOUNDARY.finditer(path, 1), _MAX_DOTS)]
        return next((end for end in reversed(ends) if path[:end] in self.below), 0)


def sort_in_file_order(problems: Iterable[Problem], root: Place) -> list[Problem]:
    """The problems with their lines and columns, from the top of the file to its end."""
    placed = []
    for problem in problems:
        if not problem.line:
            place = root.find_place(problem.path)
            problem = replace(problem, line=place.line, column=place.column)
        placed.append(problem)
    return sorted(placed, key=lambda one: (one.line, one.column))
