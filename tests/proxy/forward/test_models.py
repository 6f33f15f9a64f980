"""Lists of models that an engine may send."""

from __future__ import annotations

import pytest

from kvproxy.proxy.forward.models import _rows


def test_rows_are_read() -> None:
    """As the engine wrote them."""
    assert _rows(b'{"object": "list", "data": [{"id": "m", "permission": [{}]}]}') == [{"id": "m", "permission": [{}]}]


@pytest.mark.parametrize(
    "body",
    [
        b'{"data": [' + b"[" * 20_000 + b"]" * 20_000 + b"]}",
        b'{"data": [' + b"[" * 5000 + b"]" * 5000 + b"]}",
        b'{"data": [{"id": "m", "x": [' + b"[]," * 200_000 + b"[]]}]}",
        b'{"data": [{"id": "\xff"}]}',
        b"nonsense",
        b"{}",
    ],
    ids=["deepest", "deep", "many", "bytes", "nonsense", "none"],
)
def test_a_list_that_cannot_be_read_quickly_is_empty(body: bytes) -> None:
    """One engine's answer spoils nothing for the others."""
    assert _rows(body) == []
