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


def token_array(ids: list[int]) -> TokenIds:
    """`ids` as an array; raises OverflowError for an id that is negative or over 32 bits."""
    return array("I", ids)


#: Bytes of token ids in JSON decoded at a time.
_PIECE_BYTES = 1 << 16
_IDS = msgspec.json.Decoder(list[WireTokenId])


async def tokens_from_json(raw: msgspec.Raw) -> TokenIds:
    """Return a JSON list of token ids, however long, without holding the event loop. Raises msgspec.DecodeError."""
    if len(memoryview(raw)) > _PIECE_BYTES:
        await asyncio.sleep(0)  # the answer was just read as a whole
    text = bytes(raw).strip()
    if text[:1] != b"[" or text[-1:] != b"]":
        raise msgspec.DecodeError("not a list of token ids")
    inner = text[1:-1]
    tokens: TokenIds = array("I")
    start = 0
    while (comma := inner.find(b",", start + _PIECE_BYTES)) >= 0:
        tokens.extend(_IDS.decode(b"[%b]" % inner[start:comma]))
        start = comma + 1
        await asyncio.sleep(0)
    rest = _IDS.decode(b"[%b]" % inner[start:])
    if start and not rest:
        raise msgspec.DecodeError("a list of token ids ends with a comma")
    tokens.extend(rest)
    return tokens


def body_with_tokens(field: str, tokens: TokenIds, others: Mapping[str, Any]) -> bytes:
    """Return a JSON object with `tokens` under `field`, then `others`."""
    return msgspec.json.encode({field: tokens.tolist(), **others})
