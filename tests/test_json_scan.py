"""Members and items are found in the bytes, in steps that end."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproxy import json_scan
from kvproxy.json_scan import MAX_DEPTH, MAX_MARKS, Span, Unreadable, at_once, in_turns, items, members

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:é\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def texts(data: bytes, *names: str) -> dict[str, bytes]:
    found = at_once(members(data, names)).values
    return {name: data[spans[-1].start : spans[-1].end] for name, spans in found.items()}


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(alphabet='abc"\\é', min_size=1, max_size=4), _values), st.sampled_from([None, 1]))
def test_members_are_those_of_a_decoder(value: dict[str, object], indent: int | None) -> None:
    """Whatever the strings hold and however it is spaced."""
    data = json.dumps(value, indent=indent).encode()
    assert {name: json.loads(text) for name, text in texts(data, *value).items()} == value


@settings(max_examples=50, deadline=None)
@given(st.lists(_values, max_size=8), st.integers(1, 9))
def test_items_are_those_of_a_decoder(value: list[object], most: int) -> None:
    """The first ones, and all others as one."""
    data = json.dumps(value).encode()
    found = [data[span.start : span.end] for span in at_once(items(data, Span(0, len(data)), most))]
    assert [json.loads(text) for text in found[:most]] == value[:most]
    assert json.loads(b"[" + b"".join(found[most:]) + b"]") == value[most:]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"[]",
        b"{",
        b'{"a":1',
        b'{"a":"b}',
        b'{"a":[}]',
        b"{} x",
        b"{}" + b" " * 100_000 + b"x",
        b'{"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}",
        b'{"a":"' + b"\\" * 200_000 + b'"}',
        b'{"a":[' + b"{}," * MAX_MARKS + b"1]}",
        b"{" + b'"a":1,' * 2_000 + b'"b":1}',
    ],
    ids=lambda data: str(data[:12]),
)
def test_what_is_unreadable(data: bytes) -> None:
    """Not an object, cut off, or more of one than is looked at."""
    with pytest.raises(Unreadable):
        at_once(members(data, ["a"]))


@pytest.mark.parametrize("backslashes", [*range(5), 15, 16, 17, 18, 1023, 1024, 1025, 5000])
def test_an_escaped_quote_ends_no_string(backslashes: int) -> None:
    """An odd number of backslashes escapes it."""
    data = b'{"a":"' + b"\\" * backslashes + b'"' + (b'"' if backslashes % 2 else b"") + b',"b":7}'
    assert texts(data, "b") == {"b": b"7"}


def test_the_last_of_equal_names_wins() -> None:
    """As with every decoder."""
    assert texts(b'{"a":1,"\\u0061":2}', "a") == {"a": b"2"}


@pytest.mark.parametrize(
    "piece", [b"1,", b"{},", b'"a",', b'"\\"",', b'"' + b"\\" * 64 + b'",', b"1" * 1000 + b",", b'{"a":[{"b":""}]},']
)
def test_a_step_looks_at_a_bounded_number_of_marks(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings, brackets and long stretches without any all count, so that no body holds a step for longer."""
    size = 400_000
    data = b'{"a":[' + piece * (size // len(piece)) + b"1]}"
    marks = data.count(b'"') + data.count(b"{") * 2 + data.count(b"[") * 2
    monkeypatch.setattr(json_scan, "MAX_MARKS", 10 * size)
    steps = sum(1 for _ in members(data, ["a"]))
    assert (
        steps
        >= max(marks / 2, size / json_scan._WINDOW_BYTES * json_scan._WINDOW_MARKS) / (json_scan._STEP_MARKS + 1) - 1
    )


async def test_others_have_their_turn_between_steps() -> None:
    """And of those that share a pace one goes on at a time."""
    data = b'{"a":[' + b"{}," * 100_000 + b"1]}"
    pace = asyncio.Lock()
    order: list[str] = []

    async def scan(name: str) -> None:
        await in_turns(members(data, ["a"]), pace)
        order.append(name)

    async def others() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        order.append("others")

    await asyncio.gather(scan("first"), scan("second"), others())
    assert order == ["others", "first", "second"]
