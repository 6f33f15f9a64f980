"""A table of a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Its lines, with an empty one before it."""
    return ["", _line(heads), "|" + "---|" * len(heads), *map(_line, rows)]


def _line(cells: Sequence[object]) -> str:
    return "|" + "|".join(f" {cell} " if cell != "" else " " for cell in cells) + "|"
