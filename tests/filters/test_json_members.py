"""Walking through the members of a JSON object in its bytes."""

from __future__ import annotations

import json
import random

import pytest

from kvproxy.filters import json_members
from kvproxy.filters.json_members import NotReadable, members


def walked(body: bytes, at: int = 0) -> list[tuple[str, bytes]]:
    return [(one.name, body[one.value : one.end]) for one in members(body, at) if one is not None]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", []),
        (b" { } trailing", []),
        (b'{"a":1}', [("a", b"1")]),
        (b'{ "a" : -1.5e3 , "b":null}', [("a", b"-1.5e3"), ("b", b"null")]),
        (b'{"a":1,"a":2}', [("a", b"1"), ("a", b"2")]),
        (b'{"\\u0061\\"":"}\\\\","b":"\\""}', [('a"', b'"}\\\\"'), ("b", b'"\\""')]),
        (b'{"a":[{"b":"]}"},[]],"c":{"d":{}}}', [("a", b'[{"b":"]}"},[]]'), ("c", b'{"d":{}}')]),
        (b'{"a":NaN,"b":"\xff","c":-Infinity}', [("a", b"NaN"), ("b", b'"\xff"'), ("c", b"-Infinity")]),
        (b'{"a":"' + b"\\n" * 30_000 + b'"}', [("a", b'"' + b"\\n" * 30_000 + b'"')]),
        (b'{"a":["' + b"\\n" * 30_000 + b'",1]}', [("a", b'["' + b"\\n" * 30_000 + b'",1]')]),
    ],
)
def test_members_are_found_with_their_exact_values(body: bytes, expected: list[tuple[str, bytes]]) -> None:
    """Duplicates and escapes included; what a value says does not matter."""
    assert walked(body) == expected


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"a"', b'{"a":', b'{"a":}', b'{"a":1', b'{"a":1,}', b'{"a" 1}', b"{a:1}", b'{"a":"x}',
     b'{"a":"x\\"}', b'{"a":[1}', b'{"a":["x]}', b'{"\\x":1}', b'{"\xff":1}', b'{"a":1 "b":2}'],
)  # fmt: skip
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(NotReadable, match="malformed"):
        walked(body)


def test_too_many_members_or_values_are_refused() -> None:
    """A walk costs time for each of them."""
    many = b"{" + b",".join(b'"%d":1' % n for n in range(json_members.MAX_MEMBERS + 1)) + b"}"
    with pytest.raises(NotReadable, match="too many members"):
        walked(many)
    with pytest.raises(NotReadable, match="too many values"):
        walked(b'{"a":[' + b"[]," * json_members.MAX_PARTS + b"1]}")


def test_whatever_json_writes_is_read_alike() -> None:
    """Ten thousand documents, against Python's own parser."""
    rng = random.Random(7)
    pieces: list[object] = [1, -2.5, None, True, "x", 'q"\\', "é\n{[", [], {}, [1, {"a": "]"}], {"k": [[]]}, "\ud800"]
    for _ in range(10_000):
        pairs = [(f"k{n}" + rng.choice(["", '"', "\\", "ü", "{"]), rng.choice(pieces)) for n in range(rng.randrange(5))]
        text = json.dumps(dict(pairs), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        body = text.encode("utf-8", "surrogatepass")
        found = {name: json.loads(value.decode("utf-8", "surrogatepass")) for name, value in walked(body)}
        assert found == dict(pairs)


@pytest.mark.parametrize(
    ("body", "pauses"),
    [
        (b'{"a":"' + b"x" * 8_000_000 + b'"}', 6),
        (b'{"a":"' + b'\\"' * 4_000_000 + b'"}', 199),
        (b'{"a":["' + b'\\"' * 4_000_000 + b'"]}', 199),
        (b'{"a":["' + b'\\"' * 4_000_000 + b"]}", 199),
        (b'{"a":[' + b"[]," * 100_000 + b"1]}", 40),
        (b"{" + b'"a":1,' * 9_000 + b'"b":2}', 18),
    ],
)
def test_a_long_walk_pauses_often(body: bytes, pauses: int) -> None:
    """No step holds the event loop: a pause for every 1.3 MB of a string, 20,000 escapes, 5,000 parts, 500 members."""
    seen = 0
    try:
        for member in members(body):
            seen += member is None
    except NotReadable:
        pass
    assert seen >= pauses
