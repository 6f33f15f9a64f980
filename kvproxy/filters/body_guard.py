"""What bodies of clients may hold, before an engine gets them: no control fields of engines, and the tenant's salt."""

from __future__ import annotations

from kvproxy.filters.body_bounds import BodyUnchecked
from kvproxy.filters.exchange import Exchange
from kvproxy.filters.guarded_body import Unchecked, needs_no_change, with_salt, without_control_fields
from kvproxy.types import Headers


class BodyGuard:
    """Bodies of clients that are not trusted hold nothing that is between proxies and engines."""

    def looks_at(self, exchange: Exchange, headers: Headers) -> bool:
        """Whether the whole body is needed. A form with files is no JSON, whatever is in it: such uploads stream."""
        return (exchange.isolated or not exchange.trusted) and not _is_form(headers)

    async def checked(self, body: bytes, exchange: Exchange, headers: Headers) -> bytes:
        """The body as an engine may get it. Raises BodyUnchecked."""
        if not exchange.isolated and (exchange.trusted or needs_no_change(body)):
            return body
        if exchange.body is None and _is_form(headers):
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


def _is_form(headers: Headers) -> bool:
    return any(
        name == b"content-type" and value.strip().lower().startswith(b"multipart/form-data") for name, value in headers
    )
