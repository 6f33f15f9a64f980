"""Paths in a configuration: where a value was written, and what is wrong there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path as FilePath
from typing import NamedTuple

from kvproxy.base.errors import Severity

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


_BOUNDARY = re.compile(r"[.\[]")
#: Keys may contain dots; for a key with more dots only its parent is found.
_MAX_DOTS = 32


@dataclass(slots=True)
class Place:
    """A value's line and column (from 1) and the places of its parts: by key, or by `[index]`."""

    line: int = 0
    column: int = 0
    below: dict[str, Place] = field(default_factory=dict)

    def find_place(self, path: str) -> Place:
        """Return the place of a dotted path, else of its nearest parent that was written."""
        here = self
        while path:
            end = here._longest_key(path)
            if not end:
                break
            here = here.below[path[:end]]
            path = path[end:].removeprefix(".")
        return here

    def _longest_key(self, path: str) -> int:
        if path in self.below:
            return len(path)
        ends = [match.start() for match in islice(_BOUNDARY.finditer(path, 1), _MAX_DOTS)]
        return next((end for end in reversed(ends) if path[:end] in self.below), 0)


class Finding(NamedTuple):
    """A problem at a path of the model."""

    path: Path
    message: str
    hint: str
    severity: Severity
    absence: bool = False
    """Reports a missing part below the path, which is untrue if that part was only wrong."""
    follows: tuple[Path, ...] = ()
    """Other settings it depends on: not reported if one of them is wrong itself."""


def error_at(
    path: Path, message: str, hint: str = "", *, absence: bool = False, follows: tuple[Path, ...] = ()
) -> Finding:
    """Refuses the configuration."""
    return Finding(path, message, hint, "error", absence, follows)


def warning_at(path: Path, message: str, hint: str = "", *, follows: tuple[Path, ...] = ()) -> Finding:
    """Usable, but probably not what was meant."""
    return Finding(path, message, hint, "warning", False, follows)


def missing_file(path: Path, name: str) -> Iterator[Finding]:
    """Yield an error when `name` is no file."""
    if not FilePath(name).is_file():
        yield error_at(path, f"no such file: {name!r}")
