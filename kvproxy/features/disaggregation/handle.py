"""The right to pull a prompt's KV: used once, with the body that it was made for, within the engine's lease."""

from __future__ import annotations

from typing import NoReturn

from xxhash import xxh3_128_digest

#: Share of the lease that is left for the way to the decoder and its queue.
MARGIN = 0.2


class HandleRefused(Exception):
    """The handle may not be used; the text is a metric label."""


class Handle:
    """Parameters of one prefill, whole and opaque. They name blocks by address: used twice, late or with another prompt
    they give another prompt's text, with status 200. There is no way to read them but `take`."""

    __slots__ = ("_digest", "_expires_at", "_member")

    def __init__(self, member: bytes, body: bytes, *, lease_s: float, now: float) -> None:
        """`member` is that of the decoder's body, `body` the client's, which was prefilled."""
        self._member: bytes | None = member
        self._digest = xxh3_128_digest(body)
        self._expires_at = now + lease_s * (1.0 - MARGIN)

    def take(self, body: bytes, now: float) -> bytes:
        """Return the member, once. Raises HandleRefused; the handle is void either way."""
        member = self._member
        self._member = None
        if member is None:
            raise HandleRefused("used")
        if now >= self._expires_at:
            raise HandleRefused("expired")
        if xxh3_128_digest(body) != self._digest:
            raise HandleRefused("other_body")
        return member

    def __copy__(self) -> NoReturn:
        raise TypeError("a handle cannot be copied")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a handle cannot be copied")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a handle cannot be copied")
