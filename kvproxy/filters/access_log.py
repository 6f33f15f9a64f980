"""Filter `access_log`: one line per request on the logger `kvproxy.access`."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.config.filter_schema import AccessLogSettings
from kvproxy.filters.access_line import Value, as_json, as_text, fields, printable
from kvproxy.filters.chain import FilterContext, WallClock
from kvproxy.filters.line_batch import LineBatch
from kvproxy.log_lines import format_console_line, format_time
from kvproxy.request.exchange import FAILED, SCOPE_KEY, Exchange, result_of
from kvproxy.types import Clock

LOGGER = "kvproxy.access"

#: Methods, paths, endpoints and tenants come again and again.
_REMEMBERED_WORDS = 1024


class AccessLogFilter:
    """Logs a share of the requests, and every one that failed (`result_of`), once each has ended."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        sample: float,
        json: bool,
        stamped: bool = True,
        clock: Clock,
        wall_clock: WallClock,
        rng: random.Random,
        lines: LineBatch | None = None,
    ) -> None:
        self._app = app
        self._sample = sample
        self._json = json
        self._stamped = stamped  # a text line begins with time and level; False where its writer adds them
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng
        self._lines = LineBatch(logging.getLogger(LOGGER)) if lines is None else lines
        self._word = lru_cache(_REMEMBERED_WORDS)(printable)
        self._time, self._time_ends_at = "", float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope.get(SCOPE_KEY) or Exchange.of(scope, now=self._clock())
        response = _Response(send)
        try:
            await self._app(scope, receive, response.send)
        finally:
            self._ended(exchange, scope, response)

    def _ended(self, exchange: Exchange, scope: Scope, response: _Response) -> None:
        status = response.status or exchange.outcome.status
        end = exchange.outcome.end or ("completed" if response.complete else "aborted")
        if (result_of(end, status) != FAILED and self._rng.random() >= self._sample) or not self._lines.wanted:
            return
        line = fields(
            exchange,
            method=scope["method"],
            path=scope.get("raw_path") or scope["path"].encode(),
            status=status,
            sent_bytes=response.sent_bytes,
            duration_s=self._clock() - exchange.received_at,
            end=end,
            word=self._word,
        )
        self._lines.add(self._written(line))

    def _written(self, line: Mapping[str, Value]) -> str:
        if self._json:
            return as_json(line, self._wall_clock())
        return format_console_line(self._now(), "INFO", as_text(line)) if self._stamped else as_text(line)

    def _now(self) -> str:
        """The time as text, worked out once for all lines of a millisecond."""
        now = self._clock()
        if now >= self._time_ends_at:
            self._time, self._time_ends_at = format_time(self._wall_clock()), now + 0.001
        return self._time


class _Response:
    """Passes a response on and remembers its status and its body's size."""

    __slots__ = ("_send", "complete", "sent_bytes", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.sent_bytes = 0
        self.complete = False

    async def send(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.sent_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)


def build(app: ASGIApp, settings: AccessLogSettings, context: FilterContext) -> ASGIApp:
    """The filter around `app`, and its lines among the context's lifetimes."""
    lines, log_is_json = LineBatch(logging.getLogger(LOGGER)), context.config.log.format == "json"
    context.lifetimes.append(lines)
    return AccessLogFilter(
        app,
        sample=settings.sample,
        json=log_is_json if settings.format is None else settings.format == "json",
        stamped=not log_is_json,
        clock=context.clock,
        wall_clock=context.wall_clock,
        rng=context.rng,
        lines=lines,
    )
