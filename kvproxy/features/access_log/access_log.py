"""Filter `access_log`: one line per request on the logger `kvproxy.access`: what was asked (never bodies, queries or
credentials) and what came of it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache, partial

import msgspec
from starlette.types import ASGIApp

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.features.access_log.settings import AccessLogSettings
from kvproxy.operate.log_lines import MAX_TEXT, format_console_line, format_time, printable
from kvproxy.proxy.filters.chain import FilterContext, WallClock
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import FAILED, Exchange, result_of

LOGGER = "kvproxy.access"

#: Methods, paths, endpoints and tenants repeat.
_REMEMBERED_WORDS = 1024
#: Longest wait of a line, and most lines that wait.
DELAY_S = 0.1
MAX_LINES = 256
#: A field of a line.
Value = str | int | float


class AccessLogFilter(Step):
    """Logs a share of the requests, and every one that failed (`result_of`), once each has ended."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        sample: float,
        json: bool,
        metrics: Metrics,
        clock: Clock,
        wall_clock: WallClock,
        rng: random.Random,
        lines: LineBatch | None = None,
    ) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._sample = sample
        self._json = json
        self._wall_clock = wall_clock
        self._rng = rng
        self._lines = LineBatch(logging.getLogger(LOGGER)) if lines is None else lines
        self._word = lru_cache(_REMEMBERED_WORDS)(printable)
        self._time = ""
        self._time_ends_at = float("-inf")

    def after(self, exchange: Exchange, downstream: Downstream) -> None:
        """Write the line of a request that is to be logged."""
        outcome = exchange.outcome
        status = downstream.status or outcome.status
        end = outcome.end or ("completed" if downstream.complete else "aborted")
        passed_over = self._sample < 1.0 and self._rng.random() >= self._sample and result_of(end, status) != FAILED
        if passed_over or not self._lines.is_wanted():
            return
        scope = downstream.scope
        now = self.clock()
        line = fields(
            exchange,
            method=scope["method"],
            path=scope.get("raw_path") or scope["path"].encode(),
            status=status,
            sent_bytes=downstream.sent_bytes,
            duration_s=now - exchange.received_at,
            end=end,
            word=self._word,
        )
        if self._json:
            self._lines.add_line(as_json(line, self._wall_clock()))
        else:
            self._lines.add_line(format_console_line(self._time_at(now), "INFO", as_text(line)))

    def _time_at(self, now: float) -> str:
        """Return the time as text, worked out once for all lines of a millisecond."""
        if now >= self._time_ends_at:
            self._time = format_time(self._wall_clock())
            self._time_ends_at = now + 0.001
        return self._time


class LineBatch:
    """Entered, it gathers lines; before and after, each goes out at once."""

    def __init__(self, logger: logging.Logger, *, delay_s: float = DELAY_S) -> None:
        self._logger = logger
        self._delay_s = delay_s
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Returns True if lines are written anywhere.
        self.is_wanted = partial(logger.isEnabledFor, logging.INFO)

    async def __aenter__(self) -> LineBatch:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop = None
        self.flush_lines()

    def add_line(self, line: str) -> None:
        """One line, without line breaks in it."""
        self._lines.append(line)
        if self._loop is None or len(self._lines) >= MAX_LINES:
            self.flush_lines()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._delay_s, self.flush_lines)

    def flush_lines(self) -> None:
        """Write the waiting lines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            text = "\n".join(self._lines)
            self._lines.clear()
            # Logger.info would search for its caller, which is always this line.
            record = self._logger.makeRecord(self._logger.name, logging.INFO, __file__, 0, text, (), None)
            self._logger.handle(record)


def fields(
    exchange: Exchange,
    *,
    method: str,
    path: bytes,
    status: int,
    sent_bytes: int,
    duration_s: float,
    end: str,
    word: Callable[[str], str],
) -> dict[str, Value]:
    """Collect the facts of one request in the order they are written. `path` is the raw one, without the query; texts
    longer than a line shows are not cached.

    `word` makes one word of a foreign text (`printable`, or a cache of it for texts that repeat)."""
    outcome = exchange.outcome
    line: dict[str, Value] = {
        "method": word(method),
        "path": word(path[: MAX_TEXT + 1].decode("latin-1")),
        "status": status,
        "bytes": sent_bytes,
        "duration_ms": int(duration_s * 10_000 + 0.5) / 10,  # (`round` takes ten times as long)
    }
    if outcome.ttft_s is not None:
        line["ttft_ms"] = int(outcome.ttft_s * 10_000 + 0.5) / 10
    if outcome.endpoint:
        line["endpoint"] = word(outcome.endpoint)
    if outcome.attempts > 1:
        line["attempts"] = outcome.attempts
    if outcome.prompt_tokens is not None:
        line["prompt_tokens"] = outcome.prompt_tokens
    if outcome.cached_tokens is not None:
        line["cached_tokens"] = outcome.cached_tokens
    if outcome.completion_tokens is not None:
        line["completion_tokens"] = outcome.completion_tokens
    if exchange.request_id:
        line["request_id"] = printable(exchange.request_id)
    if exchange.trace_id:
        line["trace_id"] = exchange.trace_id
    if exchange.tenant:
        line["tenant"] = word(exchange.tenant)
    line["end"] = end
    return line


def as_text(line: Mapping[str, Value]) -> str:
    """`POST /v1/completions 200 bytes=12 ...`: method, path and status bare, the rest `name=value`."""
    return _form(tuple(line)) % tuple(line.values())


@lru_cache(64)
def _form(names: tuple[str, ...]) -> str:
    """Places for the values; what a line names is the same for nearly all requests."""
    return " ".join(["%s %s %s", *(f"{name}=%s" for name in names[3:])])


def as_json(line: Mapping[str, Value], now: datetime) -> str:
    """One JSON object: first what every line of the log has, then the line's own."""
    every = {"time": format_time(now), "level": "info", "logger": "kvproxy.access"}
    return msgspec.json.encode({**every, **line}).decode()


def build(app: ASGIApp, settings: AccessLogSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`, and its lines among the context's lifetimes."""
    lines = LineBatch(logging.getLogger(LOGGER))
    context.lifetimes.append(lines)
    return AccessLogFilter(
        app,
        sample=settings.sample,
        json=context.config.log.format == "json",
        metrics=context.metrics,
        clock=context.clock,
        wall_clock=context.wall_clock,
        rng=context.rng,
        lines=lines,
    )
