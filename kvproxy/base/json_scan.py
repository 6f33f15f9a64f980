"""Finds the members of a JSON object and the items of an array in their bytes, in steps of about a millisecond. Pure.

For bodies that a decoder would hold the event loop with (nothing releases the interpreter's lock for it), for those
that it refuses although engines read them (NaN, a lone surrogate, a field of an unexpected type), and for cutting out
what an engine must not see. Every name is seen that any parser would see, whatever its spelling; whether a number is
one, and what is inside of a value, is left to the engine.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import sys
from collections.abc import Callable, Generator, Iterable
from io import BytesIO
from typing import NamedTuple, TypeVar

import msgspec

#: Strings and brackets of one text; beyond it the text is unreadable. A quarter of a second in all.
MAX_MARKS = 1_000_000
#: A longer text is scanned: a decoder takes up to 5 ms a MiB, in one go.
MAX_DECODED_BYTES = 2 * 1024 * 1024
#: Python's own parser, which engines use, goes no deeper.
MAX_DEPTH = 1000
#: A text with more members of the wanted names is unreadable.
MAX_FOUND = 1000
#: Bytes compared of a longer name's spelling.
MAX_NAME_BYTES = 4096

T = TypeVar("T")
#: Yields wherever other tasks may have their turn, and returns its result.
Steps = Generator[None, None, T]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_QUOTE, _BACKSLASH, _BRACE, _BRACKET = b'"\\{['
_CLOSING = {_BRACE: b"}"[0], _BRACKET: b"]"[0]}
_STEP_MARKS = 4096
# cost of a run of backslashes, a member and an item, in marks
_RUN_MARKS = 8
_MEMBER_MARKS = 16
_ITEM_MARKS = 8
# bytes without a mark that are skipped at once, and their cost
_WINDOW_BYTES = 65536
_WINDOW_MARKS = 512
_SEARCHED_BYTES = 8 * 1024 * 1024  # searched at once for the end of a string
_COPIED_BYTES = 4 * 1024 * 1024
_MARK = re.compile(rb'["\[\]{}]')
_SPACE = re.compile(rb"[ \t\r\n]{0,65536}+")
_SCALAR = re.compile(rb'[^"\\{}\[\],:\s]{0,65536}+')
_WHOLE_ESCAPES = re.compile(rb'(?:[^"\\]|\\u.{4}|\\[^u])*+', re.DOTALL)


#: A name is searched for by an expression over so many bytes at first; what has no quote behind them is passed a
#: hundred times as fast.
_FIRST_SPAN_BYTES = 512
#: A text that is no longer is searched at once.
_SHORT_BYTES = 4096
_LONGEST_NAME_BYTES = 32


def has_quoted(
    search: Callable[[bytes, int, int], object], text: bytes, start: int = 0, end: int = sys.maxsize
) -> bool:
    """Return whether `search`, of a pattern that begins with a quote and is at most 32 bytes long, finds something.

    Long strings without quotes, as most texts and all pictures are, cost next to nothing.
    """
    if len(text) <= _SHORT_BYTES:
        return search(text, start, end) is not None
    span_bytes = _FIRST_SPAN_BYTES
    at = text.find(b'"', start, end)
    while at >= 0:
        searched_to = at + span_bytes
        if search(text, at, min(searched_to, end)) is not None:
            return True
        at = text.find(b'"', searched_to - _LONGEST_NAME_BYTES, end)
        if at - searched_to < span_bytes:  # many quotes: fewer and longer searches
            span_bytes *= 2
    return False


class Unreadable(ValueError):
    """Not JSON of the expected form, or too much of it."""


class NotAnObject(Unreadable):
    """JSON text whose outermost value is not an object."""


class Span(NamedTuple):
    """Where a text stands, without the space around it."""

    start: int
    end: int


class Member(NamedTuple):
    """One `"name": value` of an object."""

    name: str  # without escapes
    place: int  # among all members of the object
    start: int
    value: Span
    before: int  # where the member before it ends; the first: where it starts
    after: int  # where the member after it starts; the last: where it ends


class Members(NamedTuple):
    """The wanted members of an object, in order and with all duplicates."""

    found: list[Member]
    opening: int  # position of the object's brace
    total: int  # of all members


class Edit(NamedTuple):
    """Replaces what stands there."""

    start: int
    end: int
    text: bytes = b""


async def run_in_turns(steps: Steps[T], pace: asyncio.Lock) -> T:
    """Return the result, with a turn for others before, between and after the steps; of those that share a `pace` one
    goes on at a time."""
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


def run_at_once(steps: Steps[T]) -> T:
    """Return the result, where no other task has to wait."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            result: T = over.value
            return result


def find_members(data: bytes, wanted: Callable[[str], bool], *, inside: Span | None = None) -> Steps[Members]:
    """Return the members of the object that `data` is, or of the one `inside`, whose names are wanted. Raises
    Unreadable."""
    walk = _Walk(data)
    start = inside.start if inside else len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0
    opening = yield from walk.skip_space(start)
    if data[opening : opening + 1] != b"{":
        raise NotAnObject("not an object")
    found: list[Member] = []
    at = yield from walk.skip_space(opening + 1)
    end = at
    count = 0
    closed = data[at : at + 1] == b"}"
    while not closed:
        before = end if count else at
        start = at
        if walk.spend(_MEMBER_MARKS):
            yield
        if data[start : start + 1] != b'"':
            raise Unreadable("malformed JSON")
        key_end = yield from walk.end_of_string(start)
        value = yield from walk.after(b":", key_end)
        end = yield from walk.end_of_value(value)
        at = yield from walk.skip_space(end)
        closed = data[at : at + 1] == b"}"
        if not closed:
            at = yield from walk.after(b",", at)
        if wanted(name := _name(data, start + 1, key_end - 1)):
            if len(found) == MAX_FOUND:
                raise Unreadable(f"{name[:100]} and its like again and again")
            found.append(Member(name, count, start, Span(value, end), before, end if closed else at))
        count += 1
    if inside is None and (yield from walk.skip_space(at + 1)) < len(data):
        raise Unreadable("something follows the object")
    return Members(found, opening, count)


def find_items(data: bytes, array: Span, most: int) -> Steps[list[Span]]:
    """Return the items of the array at that place; if there are more than `most`, one more that is all the rest. Raises
    Unreadable."""
    if data[array.start : array.start + 1] != b"[":
        raise Unreadable("not an array")
    walk = _Walk(data)
    found: list[Span] = []
    at = yield from walk.skip_space(array.start + 1)
    if data[at : at + 1] == b"]":
        return found
    while True:
        if walk.spend(_ITEM_MARKS):
            yield
        end = yield from walk.end_of_value(at)
        found.append(Span(at, end))
        at = yield from walk.skip_space(end)
        if data[at : at + 1] == b"]":
            return found
        at = yield from walk.after(b",", at)
        if len(found) == most:
            return [*found, Span(at, array.end - 1)]


def cut_members(found: Iterable[Member]) -> list[Edit]:
    """Return what cuts those members of one object out, each with a comma and the space beside it."""
    edits: list[Edit] = []
    for cut, member in enumerate(found):
        if member.place == cut:  # all members before it are cut
            edits.append(Edit(member.start, member.after))
        else:
            edits.append(Edit(member.before, member.value.end))
    return edits


def apply_edits(data: bytes, edits: Iterable[Edit]) -> Steps[bytes]:
    """Return the text with those changes, which are in order. New memory costs more than copying to it: 31 MiB take 20
    ms."""
    whole = memoryview(data)
    result = BytesIO()
    done = 0
    for start, end, text in (*edits, Edit(len(data), len(data))):
        for at in range(done, start, _COPIED_BYTES):
            result.write(whole[at : min(at + _COPIED_BYTES, start)])
            if start - at > _COPIED_BYTES:
                yield
        result.write(text)
        done = end
    return result.getvalue()


def replace_model(data: bytes, model: str, *, named: str) -> bytes | None:
    """Return the object with its top-level `model`, which is `named`, replaced and every other byte as it was; None if
    that takes `scan_to_replace_model`."""
    if named == model:
        return data
    if len(data) > MAX_DECODED_BYTES:
        return None
    key = _MODEL.match(data, max(0, data.rfind(b'"model"')))
    if key is None:
        return None
    start = key.end() + 1
    end = data.find(b'"', key.end() + 1)
    if end < 0 or data[start - 1] != _QUOTE or data.find(b"\\", start, end) >= 0:
        return None
    value = msgspec.json.encode(model)
    replaced = b"".join((data[: start - 1], value, data[end + 1 :]))
    try:
        return replaced if bytes(_named(replaced).model) == value else None  # and it was the top level's model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def scan_to_replace_model(data: bytes, model: str) -> Steps[bytes]:
    """Return the same for any object. Raises Unreadable."""
    object_ = yield from find_members(data, "model".__eq__)
    value = msgspec.json.encode(model)
    edits = [Edit(*member.value, value) for member in object_.found]
    if not edits:
        start = object_.opening + 1
        edits.append(Edit(start, start, b'"model":' + value + (b"," if object_.total else b"")))
    return (yield from apply_edits(data, edits))


class _Named(msgspec.Struct, gc=False):
    model: msgspec.Raw = msgspec.Raw()


_named = msgspec.json.Decoder(_Named).decode
_MODEL = re.compile(rb'"model"[ \t\r\n]{0,1024}:[ \t\r\n]{0,1024}')


class _Walk:
    """Passes over the parts of one text and counts what that costs.

    Strings are passed by their quotes alone, so a long one costs next to nothing.
    """

    __slots__ = ("_data", "_left", "_turn")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = MAX_MARKS
        self._turn = _STEP_MARKS

    def spend(self, marks: int, uncounted: int = 0) -> bool:
        """Charge the values looked at and return True if the step ends here. `uncounted` is bounded by the text's
        length."""
        self._left -= marks
        self._turn -= marks + uncounted
        if self._left < 0:
            raise Unreadable("JSON of too many values")
        if self._turn >= 0:
            return False
        self._turn = _STEP_MARKS
        return True

    def skip_space(self, at: int) -> Steps[int]:
        """Where the next thing begins, from `at` on."""
        return (yield from self._pass(_SPACE, at))

    def after(self, mark: bytes, at: int) -> Steps[int]:
        """Where the next thing begins after `mark`, which must stand at `at`, spaces aside."""
        at = yield from self._pass(_SPACE, at)
        if self._data[at : at + 1] != mark:
            raise Unreadable("malformed JSON")
        return (yield from self._pass(_SPACE, at + 1))

    def _pass(self, kind: re.Pattern[bytes], at: int) -> Steps[int]:
        while True:
            passed = kind.match(self._data, at)
            assert passed is not None
            if passed.end() - at < _WINDOW_BYTES:
                return passed.end()
            at = passed.end()
            if self.spend(0, _WINDOW_MARKS):
                yield

    def end_of_value(self, at: int) -> Steps[int]:
        """Where the value that begins there ends."""
        first = self._data[at : at + 1]
        if first == b'"':
            return (yield from self.end_of_string(at))
        if first in (b"{", b"["):
            return (yield from self._end_of_container(at))
        end = yield from self._pass(_SCALAR, at)
        if end == at:
            raise Unreadable("malformed JSON")
        return end

    def end_of_string(self, at: int) -> Steps[int]:
        """Where the string whose opening quote is there ends."""
        data = self._data
        at = at + 1
        while True:
            end = data.find(b'"', at, at + _SEARCHED_BYTES) + 1
            if not end:
                at += _SEARCHED_BYTES
                if at >= len(data):
                    raise Unreadable("malformed JSON: a string does not end")
                if self.spend(0, _STEP_MARKS + 1):
                    yield
                continue
            backslashes = uncounted = 0
            if data[end - 2] == _BACKSLASH:
                backslashes = 1
                if data[end - 3] == _BACKSLASH:
                    backslashes = _backslashes(data, end - 1)
                    uncounted = _RUN_MARKS + backslashes // (_WINDOW_BYTES // _WINDOW_MARKS)
            if self.spend(1, uncounted):
                yield
            if backslashes % 2 == 0:
                return end
            at = end

    def _end_of_container(self, at: int) -> Steps[int]:
        data = self._data
        left = self._left
        turn = self._turn
        closing = bytearray()
        search = _MARK.search
        find = data.find
        while left > 0:
            left -= 1
            turn -= 1
            if turn < 0:
                turn = _STEP_MARKS
                yield
            found = search(data, at, at + _WINDOW_BYTES)
            if found is None:
                at += _WINDOW_BYTES
                turn -= _WINDOW_MARKS
                if at >= len(data):
                    raise Unreadable("malformed JSON: it ends too early")
                continue
            start = found.start()
            at = start + 1
            mark = data[start]
            if mark == _QUOTE:
                at = find(b'"', at, at + _SEARCHED_BYTES) + 1
                if not at or data[at - 2] == _BACKSLASH:
                    self._left = left
                    self._turn = turn
                    at = yield from self.end_of_string(start)
                    left = self._left
                    turn = self._turn
            elif mark in _CLOSING:
                closing.append(_CLOSING[mark])
                if len(closing) > MAX_DEPTH:
                    raise Unreadable("JSON nested too deep")
            elif mark != closing.pop():
                raise Unreadable("malformed JSON: brackets do not match")
            elif not closing:
                self._left = left
                self._turn = turn
                return at
        raise Unreadable("JSON of too many values")


def _backslashes(data: bytes, quote: int) -> int:
    for look in (16, 1024, 65536):
        before = data[max(0, quote - look) : quote]
        backslashes = len(before) - len(before.rstrip(b"\\"))
        if backslashes < len(before):
            return backslashes
    raise Unreadable("backslashes without end")


def _name(data: bytes, start: int, end: int) -> str:
    """Return the name without escapes; of a very long one its beginning, which is longer than any name that is looked
    for."""
    name = data[start : min(end, start + MAX_NAME_BYTES)]
    whole = end - start == len(name)
    if not whole:
        cut = _WHOLE_ESCAPES.match(name)
        assert cut is not None
        name = cut[0]
    try:
        if whole:
            text = name.decode("utf-8", "surrogatepass")
        else:
            text = codecs.getincrementaldecoder("utf-8")("surrogatepass").decode(name)
        return text if "\\" not in text and text.isprintable() else str(json.loads(f'"{text}"'))
    except ValueError:
        raise Unreadable("malformed JSON: a name") from None
