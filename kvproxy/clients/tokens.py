"""Token ids as compact arrays: four bytes a token in memory, plain JSON numbers on the wire."""

from __future__ import annotations

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


def body_with_tokens(field: str, tokens: TokenIds, others: Mapping[str, Any]) -> bytes:
    """A JSON object with `tokens` under `field`, then `others`."""
    return msgspec.json.encode({field: tokens.tolist(), **others})
