"""Filter `request_id`: one id per request, from the client or new, known to the engine, the logs and the client."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.config.filter_schema import RequestIdSettings
from kvproxy.filters.chain import FilterContext
from kvproxy.request.exchange import SCOPE_KEY, Exchange
from kvproxy.request.random_hex import RandomHex
from kvproxy.types import Clock

_SANE = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIdFilter:
    """Puts the id into the exchange, the request's headers and the response's, replacing what was there."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        header: str,
        trust_client: bool,
        clock: Clock,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        self._app = app
        self._header = header.lower().encode("latin-1")
        self._trust_client = trust_client
        self._clock = clock
        self._make_id = partial(RandomHex().take, 32) if make_id is None else make_id  # 128 bits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope.get(SCOPE_KEY) or Exchange.of(scope, now=self._clock())
        header, headers = self._header, scope["headers"]
        given = [value for name, value in headers if name == header]
        if self._trust_client and len(given) == 1 and _SANE.fullmatch(given[0]):
            pair = (header, given[0])
            request_id = given[0].decode("ascii")
        else:
            request_id = self._make_id()
            pair = (header, request_id.encode("latin-1"))
            if given:
                headers = [item for item in headers if item[0] != header]
            scope = {**scope, "headers": [*headers, pair]}
        exchange.request_id = request_id

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = [item for item in message.get("headers", ()) if item[0] != header]
                headers.append(pair)
                message = {**message, "headers": headers}
            return send(message)

        await self._app(scope, receive, send_with_id)


def build(app: ASGIApp, settings: RequestIdSettings, context: FilterContext) -> ASGIApp:
    """The filter around `app`."""
    return RequestIdFilter(app, header=settings.header, trust_client=settings.trust_client, clock=context.clock)
