"""How a line of the log looks, whichever part of kvproxy writes it: one form of time, and fields beside the words."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

#: Where a record keeps its fields, for logs that are JSON.
FIELDS = "fields"
#: Characters of a foreign text that a line shows.
MAX_TEXT = 512


def format_time(moment: datetime) -> str:
    """RFC 3339 in UTC with milliseconds: 2026-11-22T00:42:53.123+00:00."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")


def format_console_line(time: str, level: str, message: str) -> str:
    """Return a line for people; `level` as logging names it."""
    return f"{time} {level:<7} {message}"


def printable(text: str) -> str:
    """`text` as one visible ASCII word of bounded length: it can forge no field, no line and no terminal code."""
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + "..."
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return text.encode("unicode_escape").decode("ascii").replace(" ", "\\x20")


def align_columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return lines with columns of equal width: the first `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.ljust if column < left else str.rjust for column in range(len(widths))]
    places = [list(zip(aligned, row, widths, strict=True)) for row in rows]
    return ["  ".join(align(cell, width) for align, cell, width in line).rstrip() for line in places]


def log_fields(logger: logging.Logger, event: str, fields: Mapping[str, object]) -> None:
    """Write `event` with its fields: `event name=value ...` for people, members of the object where the log is JSON."""
    text = " ".join([event, *(f"{name}={_word(value)}" for name, value in fields.items())])
    logger.info("%s", text, extra={FIELDS: {"event": event, **fields}})


def _word(value: object) -> str:
    """One visible ASCII word, or a JSON text: it forges no field and no line."""
    text = str(value)
    plain = isinstance(value, str | int | float) and text.isascii() and text.isprintable()
    return text if plain and text and not set(text) & set(' ="') else json.dumps(value, default=str)
