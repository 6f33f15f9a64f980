"""An alias replaces one value and nothing else."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvproxy.base.json_scan import MAX_DECODED_BYTES
from kvproxy.proxy.forward import body_guard as alias


async def with_model(body: bytes, model: str, *, named: str = "a") -> bytes:
    return await alias.with_model(body, model, named=named, pace=asyncio.Lock())


async def test_every_other_byte_stays() -> None:
    """Spaces, escapes and number forms stay as the client wrote them."""
    body = b'{"messages": [ {"content":"\\u00e9 1.50"} ], "model" : "a", "temperature": 1.50 }'
    assert await with_model(body, 'b"') == body.replace(b'"a"', b'"b\\""')


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"x":{"model":"a"},"model":"a"}', b'{"x":{"model":"a"},"model":"b"}'),
        (b'{"model":"a","x":{"model":"a"}}', b'{"model":"b","x":{"model":"a"}}'),
        (b'{"model":"a","x":"\\"model\\":"}', b'{"model":"b","x":"\\"model\\":"}'),
        (b'{"model":"a", "x":1, "model":"a"}', b'{"model":"b", "x":1, "model":"b"}'),
        (b'{"mod\\u0065l":"a"}', b'{"mod\\u0065l":"b"}'),
        (b'{"model":"\\u0061"}', b'{"model":"b"}'),
        (b'{"model":"a","x":NaN}', b'{"model":"b","x":NaN}'),
        (b'{"model":"a","\xff":1}', b'{"model":"b","\xff":1}'),
        (b'{"model":null}', b'{"model":"b"}'),
        (b'{"x":1}', b'{"model":"b","x":1}'),
        (b'{"' + b"k" * 100 + b'":1}', b'{"model":"b","' + b"k" * 100 + b'":1}'),
        (b" { } ", b' {"model":"b" } '),
    ],
)
async def test_only_the_top_level_counts(body: bytes, expected: bytes) -> None:
    """Wherever the name stands, however it is written, and however often."""
    replaced = await with_model(body, "b")
    assert replaced == expected or json.loads(replaced) == json.loads(expected)
    assert (b'"x":{"model":"a"}' in replaced) == (b'"x":{"model":"a"}' in body)


async def test_a_long_body_is_scanned() -> None:
    """Beyond what is decoded at once."""
    long = b'{"messages":["' + b"m" * MAX_DECODED_BYTES + b'"],"model":"a"}'
    assert await with_model(long, "b") == long.replace(b'"a"', b'"b"')


async def test_a_model_that_is_called_so_already_stays() -> None:
    """Nothing to do."""
    body = b'{"model":"b"}'
    assert await with_model(body, "b", named="b") is body


@pytest.mark.parametrize("body", [b"", b"[1]", b"{bad", b'"model"', b'{"model":"a"'])
async def test_bodies_other_than_objects_go_up_unchanged(body: bytes) -> None:
    """The engine's own error is what the client should see."""
    assert await with_model(body, "b") == body
