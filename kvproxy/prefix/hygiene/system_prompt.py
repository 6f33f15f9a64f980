"""The lines of a system prompt in which a difference may be, when it is known to within a block of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.prefix.hygiene.parts import items_of

_END_OF_LINE = b"\\n"  # as JSON spells it


class Line(NamedTuple):
    """A line of a system block, both counted from 1."""

    block: int
    number: int
    text: bytes
    start: int  # in all of it


def lines_of(system: bytes) -> Iterator[Line]:
    """All lines of all blocks of a system prompt."""
    at = 0
    for block, item in enumerate(items_of(system), 1):
        at = system.index(item, at)
        for number, text in enumerate(item.split(_END_OF_LINE), 1):
            yield Line(block, number, text, at)
            at += len(text) + len(_END_OF_LINE)
        at -= len(_END_OF_LINE)


def lines_behind(system: bytes, at: int) -> tuple[list[Line], list[Line]]:
    """The lines that a difference may be in which begins at that byte of it, or up to a block of text behind
    it; and all lines after these."""
    near: list[Line] = []
    after: list[Line] = []
    for line in lines_of(system):
        if line.start + len(line.text) + len(_END_OF_LINE) > at:
            (near if line.start < at + TEXT_BLOCK_BYTES else after).append(line)
    return near, after
