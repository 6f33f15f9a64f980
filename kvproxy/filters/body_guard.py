"""The body of a request as an engine may get it: read where it has to be looked at, checked, and salted."""

from __future__ import annotations

from starlette.types import Receive, Scope

from kvproxy.filters.body_reader import BodyReader, BodyTooLarge, BodyTooSlow, ClientLeft
from kvproxy.filters.exchange import Exchange
from kvproxy.filters.guarded_body import Unchecked, needs_no_change, with_salt, without_control_fields
from kvproxy.filters.request_body import ClientGone
from kvproxy.types import Headers


class BodyRefused(Exception):
    """The request is answered here with this status and reason; the text is for the client."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class BodyGuard:
    """Bodies of clients that are not trusted hold nothing that is between proxies and engines."""

    def __init__(self, *, limit_bytes: int, timeout_s: float) -> None:
        self._reader = BodyReader(limit_bytes=limit_bytes, timeout_s=timeout_s)

    async def body_of(self, exchange: Exchange, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None: it may stream as it comes. Raises BodyRefused and ClientGone.

        A form with files is no JSON, whatever is in it: such uploads stream. Everything else is read within the limits.
        """
        body = exchange.body
        if exchange.trusted and not exchange.isolated:
            return body
        if body is not None and not exchange.isolated and needs_no_change(body):
            return body
        encoded, streams = _framing(scope["headers"])
        if body is None:
            if not streams:
                return None
            body = await self._read(receive)
        try:
            if not exchange.trusted:
                body = await without_control_fields(body, encoded=encoded)
            if exchange.isolated:
                own = exchange.inference.cache_salt if exchange.inference is not None else None
                body = await with_salt(body, tenant=exchange.tenant, own=own, encoded=encoded)
        except Unchecked as error:
            status = 415 if encoded else 400
            raise BodyRefused(status, "body_unchecked", f"The request body is refused: {error}.") from None
        return body

    async def _read(self, receive: Receive) -> bytes:
        reader = self._reader
        try:
            return await reader.read(receive)
        except ClientLeft:
            raise ClientGone from None
        except BodyTooLarge:
            message = f"The request body is larger than {reader.limit_bytes} bytes."
            raise BodyRefused(413, "body_too_large", message) from None
        except BodyTooSlow:
            message = f"The request body did not arrive within {reader.timeout_s:g} seconds."
            raise BodyRefused(408, "body_timeout", message) from None


def _framing(headers: Headers) -> tuple[bool, bool]:
    """Whether the body has a content coding, and whether there is one that may be JSON."""
    encoded = has_body = is_form = False
    for name, value in headers:
        if name == b"content-encoding":
            encoded = encoded or value.strip().lower() not in (b"", b"identity")
        elif name == b"content-type":
            is_form = value.strip().lower().startswith(b"multipart/form-data")
        elif name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            has_body = True
    return encoded, has_body and not is_form
