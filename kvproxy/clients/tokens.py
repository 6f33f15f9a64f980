"""Token ids as compact arrays: four bytes a token in memory, plain JSON numbers on the wire."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

#: Unsigned 32-bit token ids (`array("I")`).
TokenIds: TypeAlias = "array[int]"

#: One token id as JSON may show it; anything else makes the whole answer a bad one.
WireTokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


_STEP_BYTES = 128 * 1024


def token_array(ids: list[int]) -> TokenIds:
    """`ids` as an array; raises OverflowError for an id that is negative or over 32 bits."""
    return array("I", ids)


async def read_tokens(raw: bytes) -> TokenIds:
    """The ids of a JSON array of them, a long one in steps of about a millisecond. Raises what a decoder raises."""
    tokens: TokenIds = array("I")
    start = raw.find(b"[") + 1
    while len(raw) - start > _STEP_BYTES and (end := raw.find(b",", start + _STEP_BYTES)) >= 0:
        tokens.extend(_decode(b"".join((b"[", raw[start:end], b"]"))))
        start = end + 1
        await asyncio.sleep(0)
    tokens.extend(_decode(raw if start == 1 else b"[" + raw[start:]))
    return tokens


_decode = msgspec.json.Decoder(list[WireTokenId]).decode


def body_with_tokens(field: str, tokens: TokenIds, others: Mapping[str, Any]) -> bytes:
    """A JSON object with `tokens` under `field`, then `others`."""
    return msgspec.json.encode({field: tokens.tolist(), **others})
