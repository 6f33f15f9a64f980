"""Where the members of a JSON object stand in its bytes, so that one can be cut out and every other byte stays.

Values are skipped, not read: `NaN` or bytes that are not UTF-8 inside of them do not matter, since engines may accept
what strict parsers refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import NamedTuple

#: Objects of more members are not walked through, nor values of more parts: each costs Python a fraction of a us.
MAX_MEMBERS = 10_000
MAX_PARTS = 300_000

#: Members and parts between two pauses: a few milliseconds.
_PAUSE_MEMBERS, _PAUSE_PARTS = 500, 5_000

#: Piece of a string passed over at once, in escapes and what stands between them.
_RUN = rb'(?:[^"\\]{1,64}+|\\.){0,20000}+'
_SPACE = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb'[^"\\{}\[\],:\s]++')
_REST = re.compile(_RUN, re.DOTALL)
_STRING = re.compile(rb'"' + _RUN + rb'"', re.DOTALL)
#: What counts inside of a container: strings (a long one by its opening quote alone), and brackets.
_NESTED = re.compile(_STRING.pattern + rb'|["{}\[\]]', re.DOTALL)
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")


class NotReadable(Exception):
    """Not an object in JSON's form, or one of too many values; the text says which."""


class Member(NamedTuple):
    """One `"name": value` of an object: its name without escapes, and where name, value and end stand."""

    name: str
    start: int
    value: int
    end: int


Walk = Generator[Member | None, None, None]


def members(body: bytes, at: int = 0) -> Walk:
    """The members of the object that begins at `at`, duplicates included; None now and then, where a caller of a long
    walk may pause. Raises NotReadable, after the members before the fault."""
    at = _after(b"{", body, at)
    if body[at : at + 1] == b"}":
        return
    for count in range(1, MAX_MEMBERS + 1):
        key = _STRING.match(body, at)
        if key is None:
            raise NotReadable("malformed JSON")
        value = _after(b":", body, key.end())
        end = yield from _end_of_value(body, value)
        yield Member(_name(key[0]), at, value, end)
        if not count % _PAUSE_MEMBERS:
            yield None
        at = skip_space(body, end)
        if body[at : at + 1] == b"}":
            return
        at = _after(b",", body, at)
    raise NotReadable("JSON of too many members")


def skip_space(body: bytes, at: int) -> int:
    """Where the next thing begins, from `at` on."""
    space = _SPACE.match(body, at)
    assert space is not None
    return space.end()


def _after(mark: bytes, body: bytes, at: int) -> int:
    """Where the next thing begins after `mark`, which must stand at `at`, spaces aside."""
    at = skip_space(body, at)
    if body[at : at + 1] != mark:
        raise NotReadable("malformed JSON")
    return skip_space(body, at + 1)


def _name(quoted: bytes) -> str:
    try:
        return str(json.loads(quoted.decode("utf-8", "surrogatepass")))
    except ValueError:
        raise NotReadable("malformed JSON") from None


def _end_of_value(body: bytes, at: int) -> Generator[None, None, int]:
    first = body[at : at + 1]
    if first in (b"{", b"["):
        return (yield from _end_of_container(body, at))
    if first == b'"':
        return (yield from _end_of_string(body, at))
    scalar = _SCALAR.match(body, at)
    if scalar is None:
        raise NotReadable("malformed JSON")
    return scalar.end()


def _end_of_container(body: bytes, at: int) -> Generator[None, None, int]:
    depth = 0
    for count in range(1, MAX_PARTS + 1):
        part = _NESTED.search(body, at)
        if part is None:
            raise NotReadable("malformed JSON")
        at, mark = part.end(), body[part.start()]
        if mark in _OPENING:
            depth += 1
        elif mark in _CLOSING:
            depth -= 1
            if not depth:
                return at
        elif at - part.start() == 1:  # only the quote
            at = yield from _end_of_string(body, part.start())
        if not count % _PAUSE_PARTS:
            yield None
    raise NotReadable("JSON of too many values")


def _end_of_string(body: bytes, at: int) -> Generator[None, None, int]:
    at += 1
    while True:
        run = _REST.match(body, at)
        assert run is not None
        if body[run.end() : run.end() + 1] == b'"':
            return run.end() + 1
        if run.end() == at:
            raise NotReadable("malformed JSON")
        at = run.end()
        yield None
