"""Token ids on the wire, few or a million."""

from __future__ import annotations

import asyncio
from array import array

import msgspec
import pytest

from kvproxy.cache.clients.tokens import tokens_from_json


@pytest.mark.parametrize("count", [0, 1, 2, 9_999, 40_000])
@pytest.mark.parametrize("separator", [b",", b" ,\n"])
async def test_ids_become_an_array(count: int, separator: bytes) -> None:
    """However the list is written, and wherever it is cut to be read."""
    text = b" [" + separator.join(b"%d" % (number * 7919 % 2**32) for number in range(count)) + b"] "
    assert await tokens_from_json(msgspec.Raw(text)) == array("I", [number * 7919 % 2**32 for number in range(count)])


@pytest.mark.parametrize(
    "text",
    [b"null", b"{}", b"1", b"[-1]", b"[4294967296]", b"[1.5]", b'["1"]', b"[1,]", b"[[1],[2]]", b"[1", b"[null]",
     b"[" + b"1," * 40_000 + b"]", b"[" + b"1," * 40_000 + b"[]]", b"[" + b"[1]," * 40_000 + b"[1]]"],
)  # fmt: skip
async def test_anything_else_is_refused(text: bytes) -> None:
    """Also where the fault is beyond the first piece."""
    with pytest.raises(msgspec.DecodeError):
        await tokens_from_json(msgspec.Raw(text))


async def test_others_run_while_a_long_list_is_read() -> None:
    """A million ids are read a few thousand at a time."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count_turns())
    await tokens_from_json(msgspec.Raw(b"[" + b",".join([b"100000"] * 200_000) + b"]"))
    other.cancel()
    assert turns >= 20
