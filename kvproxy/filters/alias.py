"""Replaces the model name in a body without touching a byte of anything else's value."""

from __future__ import annotations

import msgspec

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_model(body: bytes, model: str) -> bytes:
    """`body` (a JSON object) with its top-level `model` set; every other value keeps its own bytes and order.

    A body that is not a JSON object is returned as it is: the engine's own error is what the client should see.
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)
