"""Members and items are found in the bytes, in steps that end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproxy.base import json_scan
from kvproxy.base.json_scan import (
    MAX_DEPTH,
    MAX_FOUND,
    MAX_MARKS,
    MAX_NAME_BYTES,
    Members,
    Span,
    Unreadable,
    apply_edits,
    cut_members,
    find_items,
    find_members,
    run_at_once,
    run_in_turns,
)
from tests.support.examples import examples

_letters = st.text(alphabet='a"\\[]{},:é\n\x7f\ud800😀 ', max_size=6)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _letters,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)
_space = st.text(alphabet=" \t\r\n", max_size=2).map(str.encode)
_pairs = st.lists(st.tuples(st.sampled_from(["a", "b", "kv"]) | _letters, _values), max_size=6)


def every(name: str) -> bool:
    return True


def scanned(data: bytes, wanted: Callable[[str], bool] = every) -> Members:
    return run_at_once(find_members(data, wanted))


def pairs(data: bytes, wanted: Callable[[str], bool] = every) -> list[tuple[str, bytes]]:
    return [(each.name, data[each.value.start : each.value.end]) for each in scanned(data, wanted).found]


def loaded(data: bytes) -> list[tuple[str, object]]:
    """Return the reference: an object's members in order, duplicates included; objects inside are lists of pairs."""
    found: list[tuple[str, object]] = json.loads(data.decode("utf-8", "surrogatepass"), object_pairs_hook=list)
    return found


@st.composite
def spellings(draw: st.DrawFn) -> bytes:
    """Return an object as some client may write it: any escapes, any space, duplicates, NaN."""
    written = []
    for name, value in draw(_pairs):
        escaped = draw(st.booleans())
        plain = json.dumps(name, ensure_ascii=False)
        key = '"' + "".join(f"\\u{ord(c):04X}" if ord(c) < 0x10000 else c for c in name) + '"' if escaped else plain
        text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        parts = [draw(_space), key.encode("utf-8", "surrogatepass"), draw(_space), b":", draw(_space)]
        written.append(b"".join([*parts, text.encode("utf-8", "surrogatepass"), draw(_space)]))
    mark = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    return mark + draw(_space) + b"{" + (b",".join(written) or draw(_space)) + b"}" + draw(_space)


def _same(a: object, b: object) -> bool:
    return repr(a) == repr(b)  # NaN is not equal to itself


@settings(max_examples=examples(300))
@given(spellings())
def test_members_are_those_of_a_decoder(data: bytes) -> None:
    """Names, order, duplicates and values, whatever the strings hold and however it is spaced and spelt."""
    reference = loaded(data.removeprefix(b"\xef\xbb\xbf"))
    found = [(name, json.loads(f"[{text}]", object_pairs_hook=list)[0]) for name, text in _decodable(data)]
    assert _same(found, reference)
    assert scanned(data).total == len(reference)


def _decodable(data: bytes) -> list[tuple[str, str]]:
    return [(name, text.decode("utf-8", "surrogatepass")) for name, text in pairs(data)]


@settings(max_examples=examples(300))
@given(spellings(), st.sets(st.integers(0, 5)))
def test_a_cut_removes_its_field_alone(data: bytes, cut: set[int]) -> None:
    """As an encoder would write the object without those members, but in the client's own bytes."""
    found = scanned(data).found
    gone = [each for each in found if each.place in cut]
    left = run_at_once(apply_edits(data, cut_members(gone)))
    reference = loaded(data.removeprefix(b"\xef\xbb\xbf"))
    assert _same(
        loaded(left.removeprefix(b"\xef\xbb\xbf")), [pair for at, pair in enumerate(reference) if at not in cut]
    )
    kept = [data[each.start : each.value.end] for each in found if each.place not in cut]
    again = [left[each.start : each.value.end] for each in scanned(left).found]
    assert again == kept
    if not gone:
        assert left == data


@settings(max_examples=examples(500))
@given(
    st.binary(max_size=40)
    | st.lists(
        st.sampled_from([*(bytes([mark]) for mark in b'"\\{}[],:a '), b"\\u00", b"\xff", b'"a":']),
        max_size=30,
    ).map(b"".join)
)
def test_it_never_raises_anything_else(data: bytes) -> None:
    """And what it reads although Python does not, is at most a value that is none."""
    for text in (data, b"{" + data + b"}"):
        try:
            found = pairs(text)
        except Unreadable:
            with pytest.raises((ValueError, AssertionError)):
                assert isinstance(json.loads(text.removeprefix(b"\xef\xbb\xbf")), dict)
        else:
            assert all(value.strip() == value and value for _, value in found)


@settings(max_examples=examples(100))
@given(st.lists(_values, max_size=8), st.integers(1, 9))
def test_items_are_those_of_a_decoder(value: list[object], most: int) -> None:
    """The first ones, and all others as one."""
    data = json.dumps(value).encode()
    found = [data[span.start : span.end] for span in run_at_once(find_items(data, Span(0, len(data)), most))]
    assert _same([json.loads(text) for text in found[:most]], value[:most])
    assert _same(json.loads(b"[" + b"".join(found[most:]) + b"]"), value[most:])


@pytest.mark.parametrize(
    "data",
    [b"", b" ", b"[]", b"{", b'{"a"', b'{"a":', b'{"a":}', b'{"a":1', b'{"a":1,}', b'{"a" 1}', b"{a:1}", b'{"a":"x}',
     b'{"a":"x\\"}', b'{"a":[1}', b'{"a":["x]}', b'{"a":[}]', b'{"\\x":1}', b'{"\xff":1}', b'{"a":1 "b":2}', b"{} x",
     b"{,}", b'{"a":1}}', b'{"a":1/*"*/,"b":2}', b"{'a':1}", b'{"a":1,,"b":2}', b'{"\n":1}',
     b"{}" + b" " * 100_000 + b"x",
     b'{"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}",
     b'{"a":"' + b"\\" * 200_000 + b'"}',
     b'{"a":[' + b"{}," * MAX_MARKS + b"1]}",
     b"{" + b'"a":1,' * MAX_FOUND + b'"a":1}',
     b"{" + b'"b":1,' * (MAX_MARKS // 16) + b'"a":1}'],
    ids=lambda data: str(data[:12]),
)  # fmt: skip
def test_unreadable_bodies(data: bytes) -> None:
    """Not an object, cut off, not JSON's form, or more of one than is looked at: nothing is guessed."""
    with pytest.raises(Unreadable):
        scanned(data, "a".__eq__)


@pytest.mark.parametrize("backslashes", [*range(5), 15, 16, 17, 18, 1023, 1024, 1025, 5000])
def test_an_escaped_quote_ends_no_string(backslashes: int) -> None:
    """An odd number of backslashes escapes it."""
    data = b'{"a":"' + b"\\" * backslashes + b'"' + (b'"' if backslashes % 2 else b"") + b',"b":7}'
    assert pairs(data, "b".__eq__) == [("b", b"7")]


def test_no_name_is_too_long_to_be_seen() -> None:
    """Not by its escapes, and one that begins like a wanted one has that beginning however long it is."""
    escaped = "".join(f"\\u{ord(c):04x}" for c in "kv_transfer_params")
    assert pairs(f'{{"{escaped}":1}}'.encode()) == [("kv_transfer_params", b"1")]
    for tail in ("x" * 100_000, "\\u0041" * 50_000, "é" * 50_000, "\\\\" * 30_000, "\\ud83d\\ude00" * 9_000):
        for shift in range(7):
            start = "remote_" + "y" * shift
            (name, value), *others = pairs(f'{{"{start}{tail}":1,"b":2}}'.encode())
            assert json.loads(f'"{start}{tail}"').startswith(name.removesuffix("\ud83d"))
            assert (value, others) == (b"1", [("b", b"2")])
            assert len(name) > MAX_NAME_BYTES // 13


def test_values_are_not_read() -> None:
    """Engines may accept what strict parsers refuse."""
    data = b'{"a":NaN,"b":"\xff","c":-Infinity,"d":' + b"9" * 200_000 + b"}"
    assert pairs(data, "abc".__contains__) == [("a", b"NaN"), ("b", b'"\xff"'), ("c", b"-Infinity")]


@pytest.mark.parametrize(
    "piece", [b"1,", b"{},", b'"a",', b'"\\"",', b'"' + b"\\" * 64 + b'",', b"1" * 1000 + b",", b'{"a":[{"b":""}]},']
)
def test_a_step_looks_at_a_bounded_number_of_marks(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings, brackets and long stretches without any all count, so that no body holds a step for longer."""
    size = 400_000
    data = b'{"a":[' + piece * (size // len(piece)) + b"1]}"
    marks = data.count(b'"') + data.count(b"{") * 2 + data.count(b"[") * 2
    monkeypatch.setattr(json_scan, "MAX_MARKS", 10 * size)
    steps = sum(1 for _ in find_members(data, "a".__eq__))
    windows = size / json_scan._WINDOW_BYTES * json_scan._WINDOW_MARKS
    assert steps >= max(marks / 2, windows) / (json_scan._STEP_MARKS + 1) - 1


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        (b'{"a":"' + b"x" * 32_000_000 + b'"}', 3),  # found by the quote alone
        (b'{"a":"' + b'\\"' * 400_000 + b'"}', 97),
        (b'{"' + b'\\"' * 400_000 + b'":1}', 97),
        (b'{"a":["' + b'\\"' * 400_000 + b'"]}', 97),
        (b'{"a":["' + b'\\"' * 400_000 + b"]}", 97),
        (b'{"a":"' + (b"\\" * 60_000 + b"a") * 100 + b'"}', 0),
        (b'{"a":"' + (b"\\" * 60_001 + b'"') * 100 + b'"}', 11),
        (b"{" + b'"b":1,' * 9_000 + b'"b":2}', 35),
        (b"{" + b" " * 8_000_000 + b"}", 13),
        (b'{"a"' + b" " * 8_000_000 + b":1}", 13),
        (b'{"a":' + b"9" * 8_000_000 + b"}", 13),
        (b"{}" + b" " * 8_000_000, 13),
    ],
)
def test_a_long_scan_pauses_often(body: bytes, steps: int) -> None:
    """No step holds the event loop: a pause for every 4096 quotes and brackets, 250 members, 512 KiB of space."""
    seen = 0
    try:
        for _ in find_members(body, "a".__eq__):
            seen += 1
    except Unreadable:
        pass
    assert seen >= steps


def test_copies_are_made_in_steps() -> None:
    """New memory costs more than copying to it."""
    body = b'{"a":"' + b"x" * 32_000_000 + b'","b":1}'
    steps = apply_edits(body, cut_members(scanned(body, "b".__eq__).found))
    assert sum(1 for _ in steps) >= 7


async def test_others_have_their_turn_between_steps() -> None:
    """And of those that share a pace one goes on at a time."""
    data = b'{"a":[' + b"{}," * 100_000 + b"1]}"
    pace = asyncio.Lock()
    order: list[str] = []

    async def scan(name: str) -> None:
        await run_in_turns(find_members(data, "a".__eq__), pace)
        order.append(name)

    async def others() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        order.append("others")

    await asyncio.gather(scan("first"), scan("second"), others())
    assert order == ["others", "first", "second"]
