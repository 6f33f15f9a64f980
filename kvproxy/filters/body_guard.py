"""What bodies of clients may hold, before an engine gets them: no control fields of engines, and the tenant's salt."""

from __future__ import annotations

import re

from kvproxy.filters.body_bounds import BodyUnchecked
from kvproxy.filters.exchange import Exchange
from kvproxy.filters.guarded_body import Unchecked, needs_no_change, with_salt, without_control_fields
from kvproxy.filters.request_body import START_BYTES
from kvproxy.types import Headers

#: How a body begins that may hold a JSON object, in UTF-16 and UTF-32 too. A form begins with its boundary's `--`.
_MAY_BE_OBJECT = re.compile(rb"[ \t\r\n\0\xef\xbb\xbf\xfe\xff]*+(?:\{|\Z)")


class BodyGuard:
    """Bodies of clients that are not trusted hold nothing that is between proxies and engines."""

    def looks_at(self, start: bytes, exchange: Exchange, headers: Headers) -> bool:
        """Whether all of a body that begins so is needed. A form with files is no JSON: such uploads stream."""
        return (exchange.isolated or not exchange.trusted) and not _is_form(start, headers)

    async def checked(self, body: bytes, exchange: Exchange, headers: Headers) -> bytes:
        """The body as an engine may get it. Raises BodyUnchecked."""
        if not exchange.isolated and (exchange.trusted or needs_no_change(body)):
            return body
        if exchange.body is None and _is_form(body, headers):
            return body
        encoded = _is_encoded(headers)
        try:
            if not exchange.trusted:
                body = await without_control_fields(body, encoded=encoded)
            if exchange.isolated:
                own = exchange.inference.cache_salt if exchange.inference is not None else None
                body = await with_salt(body, tenant=exchange.tenant, own=own, encoded=encoded)
        except Unchecked as error:
            raise BodyUnchecked(f"The request body is refused: {error}.", encoded=encoded) from None
        return body


def _is_encoded(headers: Headers) -> bool:
    return any(
        name == b"content-encoding" and value.strip().lower() not in (b"", b"identity") for name, value in headers
    )


def _is_form(body: bytes, headers: Headers) -> bool:
    """By its first bytes too: engines that read JSON whatever the header says would find what was not looked at."""
    if _MAY_BE_OBJECT.match(body[:START_BYTES]):
        return False
    return any(
        name == b"content-type" and value.strip().lower().startswith(b"multipart/form-data") for name, value in headers
    )
