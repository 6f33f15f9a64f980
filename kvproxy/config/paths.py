"""Where something stands in a configuration file: dotted paths, and the way back from canonical to written ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Path = tuple[str | int, ...]

#: Dotted text of a path, as the person who wrote the file knows it.
Where = Callable[[Path], str]


def dotted(path: Path) -> str:
    """`clusters.default.endpoints[0].url`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def inside(path: str, outer: str) -> bool:
    """Whether a dotted path is `outer` or lies below it."""
    return not outer or path == outer or (path.startswith(outer) and path[len(outer)] in ".[")


class Origins:
    """Written paths of canonical ones, by longest known prefix: shorthands move values, messages must not."""

    def __init__(self, moves: Iterable[tuple[Path, Path]] = ()) -> None:
        self._written = dict(moves)

    def add(self, canonical: Path, written: Path) -> None:
        """What now stands at `canonical` was written at `written`."""
        self._written[canonical] = written

    def written(self, canonical: Path) -> Path:
        """Where it was written; the same path where nothing moved."""
        for length in range(len(canonical), -1, -1):
            written = self._written.get(canonical[:length])
            if written is not None:
                return written + canonical[length:]
        return canonical

    def __call__(self, canonical: Path) -> str:
        return dotted(self.written(canonical))
