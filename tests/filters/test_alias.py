"""An alias replaces one value and nothing else."""

from __future__ import annotations

import pytest

from kvproxy.filters.alias import with_model


def test_every_other_value_keeps_its_bytes() -> None:
    """Spaces inside values, escapes and number forms stay as the client wrote them."""
    body = b'{"messages": [ {"content":"\\u00e9 1.50"} ], "model":"a", "temperature": 1.50}'
    assert with_model(body, 'b"') == b'{"messages":[ {"content":"\\u00e9 1.50"} ],"model":"b\\"","temperature":1.50}'


def test_a_nested_model_is_not_the_model() -> None:
    """Only the top level counts."""
    assert with_model(b'{"x":{"model":"inner"},"model":"a"}', "b") == b'{"x":{"model":"inner"},"model":"b"}'


@pytest.mark.parametrize("body", [b"", b"[1]", b"{bad", b'"model"'])
def test_what_is_not_an_object_goes_up_unchanged(body: bytes) -> None:
    """The engine's own error is what the client should see."""
    assert with_model(body, "b") == body
