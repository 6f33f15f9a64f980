"""Finds the members of a JSON object and the items of an array in their bytes, in steps of about a millisecond. Pure.

For bodies that a decoder would hold the event loop with (nothing releases the interpreter's lock for it), and for those
that it refuses although engines read them (NaN, a lone surrogate, a field of an unexpected type). Only strings and
brackets are looked at: whether a number is one is left to the engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Generator, Iterator
from io import BytesIO
from typing import NamedTuple, TypeVar

import msgspec

#: Strings and brackets of one text; beyond it the text is unreadable. A quarter of a second in all.
MAX_MARKS = 1_000_000
#: A longer text is scanned: a decoder takes up to 5 ms a MiB, in one go.
MAX_DECODED_BYTES = 2 * 1024 * 1024
#: Python's own parser, which engines use, goes no deeper.
MAX_DEPTH = 1000

T = TypeVar("T")
#: Yields wherever other tasks may have their turn, and returns its result.
Steps = Generator[None, None, T]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_QUOTE, _BACKSLASH, _COMMA, _BRACE, _BRACKET = b'"\\,{['
_CLOSING = {_BRACE: b"}"[0], _BRACKET: b"]"[0]}
_STEP_MARKS = 4096
_RUN_MARKS, _CHILD_MARKS = 8, 4  # what a run of backslashes and a child count for besides
_WINDOW_BYTES, _WINDOW_MARKS = 65536, 512  # bytes without a mark that are passed at once, and what that counts for
_MARK = re.compile(rb'["\[\]{}]')
_MARK_OR_COMMA = re.compile(rb'["\[\]{},]')
_MOST_REPEATED = 1000
_MOST_SPACE = 1024  # more of it around a text stays with the text
_SPACE = re.compile(rb"[ \t\r\n]{0,1024}")
_KEY = re.compile(rb'[ \t\r\n]{0,1024}("(?:[^"\\]|\\.){0,64}")[ \t\r\n]{0,1024}:[ \t\r\n]{0,1024}')
_COPIED_BYTES = 4 * 1024 * 1024
_SPACES = b" \t\r\n"


class Unreadable(ValueError):
    """Not JSON of the expected form, or too much of it."""


class Span(NamedTuple):
    """Where a text stands, without the space around it."""

    start: int
    end: int


class Members(NamedTuple):
    """The wanted members of an object: where the values of each name are, as often as it has some."""

    values: dict[str, list[Span]]
    opening: int  # position of the object's brace
    empty: bool


async def in_turns(steps: Steps[T], pace: asyncio.Lock) -> T:
    """The result, with a turn for others before, between and after the steps; of those that share a `pace` one goes on
    at a time."""
    async with pace:
        while True:
            await asyncio.sleep(0)
            try:
                next(steps)
            except StopIteration as over:
                result: T = over.value
                break
    await asyncio.sleep(0)
    return result


def at_once(steps: Steps[T]) -> T:
    """The result, where no other task has to wait."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            result: T = over.value
            return result


def members(data: bytes, names: Collection[str]) -> Steps[Members]:
    """The members of the object that `data` is. Raises Unreadable."""
    opening = start = _after_space(data, len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0)
    if data[opening : opening + 1] != b"{":
        raise Unreadable("not an object")
    values: dict[str, list[Span]] = {}
    empty = True
    for end in _ends(data, opening):
        if end is None:
            yield
            continue
        key = _KEY.match(data, start + 1, end)
        empty = empty and key is None and _trimmed(data, start + 1, end).start == end
        start = end
        if key is not None and (name := _name(key[1])) in names:
            spans = values.setdefault(name, [])
            if len(spans) == _MOST_REPEATED:
                raise Unreadable(f"{name} again and again")
            spans.append(_trimmed(data, key.end(), end))
    for at in range(start + 1, len(data), _WINDOW_BYTES):
        if not data[at : at + _WINDOW_BYTES].isspace():
            raise Unreadable("something follows the object")
        yield
    return Members(values, opening, empty)


def items(data: bytes, array: Span, most: int) -> Steps[list[Span]]:
    """The items of the array at that place; if there are more than `most`, one more that is all the rest. Raises
    Unreadable."""
    if data[array.start] != _BRACKET:
        raise Unreadable("not an array")
    found: list[Span] = []
    start = array.start
    for end in _ends(data, start):
        if end is None:
            yield
            continue
        if len(found) == most and end < array.end - 1:
            return [*found, _trimmed(data, start + 1, array.end - 1)]
        item = _trimmed(data, start + 1, end)
        if item.start < item.end:
            found.append(item)
        start = end
    return found


def with_model(data: bytes, model: str, *, named: str) -> bytes | None:
    """The object with its top-level `model`, which is `named`, replaced and every other byte as it was; None if that
    takes `scan_with_model`."""
    if named == model:
        return data
    key = _KEY.match(data, max(0, data.rfind(b'"model"')))
    if key is None or len(data) > MAX_DECODED_BYTES:
        return None
    start, end = key.end() + 1, data.find(b'"', key.end() + 1)
    if end < 0 or data[start - 1] != _QUOTE or data.find(b"\\", start, end) >= 0:
        return None
    value = msgspec.json.encode(model)
    replaced = b"".join((data[: start - 1], value, data[end + 1 :]))
    try:
        return replaced if bytes(_named(replaced).model) == value else None  # that was not the top level's
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def scan_with_model(data: bytes, model: str) -> Steps[bytes]:
    """The same for any object. Raises Unreadable."""
    found = yield from members(data, ("model",))
    value, whole, replaced, done = msgspec.json.encode(model), memoryview(data), BytesIO(), 0
    for span in found.values.get("model", ()):
        yield from _copy(whole[done : span.start], replaced)
        replaced.write(value)
        done = span.end
    if not done:
        done = found.opening + 1
        replaced.write(data[:done] + b'"model":' + value + (b"" if found.empty else b","))
    yield from _copy(whole[done:], replaced)
    return replaced.getvalue()


def _copy(text: memoryview, to: BytesIO) -> Steps[None]:
    """New memory costs more than copying to it: 31 MiB take 20 ms."""
    for start in range(0, len(text), _COPIED_BYTES):
        to.write(text[start : start + _COPIED_BYTES])
        yield


class _Named(msgspec.Struct, gc=False):
    model: msgspec.Raw = msgspec.Raw()


_named = msgspec.json.Decoder(_Named).decode


def _ends(data: bytes, opening: int) -> Iterator[int | None]:
    """Positions where a child of the bracket at `opening` ends, the last one its closing bracket's; None between steps.

    Strings are passed by their quotes alone, so a long one costs next to nothing.
    """
    closing = bytearray((_CLOSING[data[opening]],))
    position, left, turn = opening + 1, MAX_MARKS, _STEP_MARKS
    find, at_top, below = data.find, _MARK_OR_COMMA.search, _MARK.search
    while left > 0:
        left -= 1
        turn -= 1
        if turn < 0:
            turn = _STEP_MARKS
            yield None
        found = (at_top if len(closing) == 1 else below)(data, position, position + _WINDOW_BYTES)
        if found is None:
            position += _WINDOW_BYTES
            turn -= _WINDOW_MARKS
            if position >= len(data):
                raise Unreadable("it ends too early")
            continue
        at = found.start()
        position, mark = at + 1, data[at]
        if mark == _QUOTE:
            position = find(b'"', position) + 1
            while position and data[position - 2] == _BACKSLASH and left > 0:
                left -= 1
                turn -= 1
                if data[position - 3] == _BACKSLASH:
                    turn -= _RUN_MARKS
                    if not _escaped(data, position - 1):
                        break
                if turn < 0:
                    turn = _STEP_MARKS
                    yield None
                position = find(b'"', position) + 1
            if not position:
                raise Unreadable("a string does not end")
        elif mark == _COMMA:
            turn -= _CHILD_MARKS
            yield at
        elif mark in _CLOSING:
            closing.append(_CLOSING[mark])
            if len(closing) > MAX_DEPTH:
                raise Unreadable("nested too deep")
        elif mark != closing.pop():
            raise Unreadable("brackets do not match")
        elif not closing:
            yield at
            return
    raise Unreadable("too many strings and brackets")


def _escaped(data: bytes, quote: int) -> bool:
    """Whether an odd number of backslashes is before that quote."""
    for look in (16, 1024, 65536):
        before = data[max(0, quote - look) : quote]
        backslashes = len(before) - len(before.rstrip(b"\\"))
        if backslashes < len(before):
            return backslashes % 2 == 1
    raise Unreadable("backslashes without end")


def _after_space(data: bytes, start: int) -> int:
    space = _SPACE.match(data, start)
    return start if space is None else space.end()


def _trimmed(data: bytes, start: int, end: int) -> Span:
    start = min(_after_space(data, start), end)
    tail = data[max(start, end - _MOST_SPACE) : end]
    return Span(start, end - len(tail) + len(tail.rstrip(_SPACES)))


def _name(key: bytes) -> str:
    try:
        return msgspec.json.decode(key, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
