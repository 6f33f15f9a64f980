"""The priority a client asks for, within bounds; what cannot be read is no priority."""

from __future__ import annotations

from kvproxy.types import Headers

_MOST = 100


def priority_of(headers: Headers, name: bytes) -> int:
    """The integer in header `name`, from -100 to 100; 0 when there is none."""
    value = next((value for header, value in headers if header == name), b"0")
    try:
        return max(-_MOST, min(_MOST, int(value)))
    except ValueError:
        return 0
