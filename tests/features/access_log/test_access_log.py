"""Filter access_log: what is logged, when, and that no client can write into it."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.features.access_log.access_log import LOGGER, AccessLogFilter, build, fields, printable
from kvproxy.features.access_log.settings import AccessLogSettings
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.settings import LogSettings
from tests.support.asgi import Inner, call, http_scope
from tests.support.clock import FakeClock
from tests.support.filter_context import NOON, filter_context


class Lines(logging.Handler):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Collect the lines of the access logger."""
    logger, handler = logging.getLogger(LOGGER), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


class Served:
    """A terminal app that took its time and filled in the outcome as the router does."""

    def __init__(self, clock: FakeClock, **outcome: Any) -> None:
        self._clock = clock
        self._outcome = outcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope, now=0.0)
        exchange.request_id, exchange.tenant = "r-1", "alice"
        for name, value in self._outcome.items():
            setattr(exchange.outcome, name, value)
        self._clock.advance(1.5)
        await Inner(chunks=(b"12345", b"678"))(scope, receive, send)


async def test_a_line_for_people(clock: FakeClock, lines: list[str]) -> None:
    """Everything known about the request, and neither query, headers nor body."""
    served = Served(
        clock, endpoint=EndpointId("a"), ttft_s=0.25, prompt_tokens=100, cached_tokens=64, completion_tokens=9,
        attempts=2, end="completed",
    )  # fmt: skip
    scope = http_scope("/v1/completions", method="POST", query_string=b"api_key=sk-1")
    scope["headers"] = [(b"authorization", b"Bearer sk-2")]
    await call(build(served, AccessLogSettings(), filter_context(clock=clock)), scope, body=b"sk-3")
    assert lines == [
        f"{NOON.isoformat(timespec='milliseconds')} INFO    POST /v1/completions 200 bytes=8 duration_ms=1500.0 "
        "ttft_ms=250.0 endpoint=a attempts=2 prompt_tokens=100 "
        "cached_tokens=64 completion_tokens=9 request_id=r-1 tenant=alice end=completed"
    ]


def logging_as(form: str, **parts: Any) -> FilterContext:
    """Return a context whose process log has this format."""
    return filter_context(log=LogSettings.model_validate({"format": form}), **parts)


async def test_a_line_for_machines(clock: FakeClock, lines: list[str]) -> None:
    """One JSON object with the time; what is unknown is left out."""
    await call(build(Served(clock), AccessLogSettings(), logging_as("json", clock=clock)), http_scope())
    assert [json.loads(line) for line in lines] == [
        {
            "time": NOON.isoformat(timespec="milliseconds"),
            "level": "info",
            "logger": "kvproxy.access",
            "method": "GET",
            "path": "/v1/models",
            "status": 200,
            "bytes": 8,
            "duration_ms": 1500.0,
            "request_id": "r-1",
            "tenant": "alice",
            "end": "completed",
        }
    ]


@pytest.mark.parametrize("log", ["console", "json"])
async def test_lines_are_as_the_log_is(log: str, clock: FakeClock, lines: list[str]) -> None:
    """A line of text has time and level, as those of the log."""
    await call(build(Served(clock), AccessLogSettings(), logging_as(log, clock=clock)), http_scope())
    [line] = lines
    assert line.startswith("{") is (log == "json")
    assert ("INFO" in line) is (log == "console")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("plain-1.2:3/@", "plain-1.2:3/@"),
        ("a b", r"a\x20b"),
        ("a\nGET / 200", r"a\nGET\x20/\x20200"),
        ("\x1b[31m", r"\x1b[31m"),
        ("é\u2028\u202e", r"\xe9\u2028\u202e"),
        ("x" * 600, "x" * 512 + "..."),
    ],
)
def test_printable(text: str, written: str) -> None:
    """No new line, no terminal code, no second field, no end of the world in length."""
    assert printable(text) == written


@pytest.mark.parametrize("form", ["console", "json"])
async def test_a_path_cannot_forge_a_line(form: str, lines: list[str]) -> None:
    """Also where a server hands over raw bytes or none at all."""
    app = build(Inner(), AccessLogSettings(), logging_as(form))
    evil = "/v1\r\n200 end=completed\u2028\x1b[2J"
    await call(app, http_scope(evil, raw_path=evil.encode()))
    await call(app, http_scope(evil, raw_path=None))
    assert len(lines) == 2
    assert all(line.isascii() and line.isprintable() and "200 end" not in line for line in lines)


async def test_a_long_path_is_not_remembered_whole(lines: list[str], clock: FakeClock) -> None:
    """Words are remembered by what a line shows of them."""
    seen: list[str] = []

    def word(text: str) -> str:
        seen.append(text)
        return text

    fields(Exchange(received_at=0.0), method="GET", path=b"/" * 60_000, status=200, sent_bytes=0, duration_s=0.0,
           end="completed", word=word)  # fmt: skip
    assert max(map(len, seen)) < 1_000
    await call(sampled(Inner(), 1.0, clock), http_scope("/" * 60_000))
    assert lines[0].split()[3] == "/" * 512 + "..."


def sampled(inner: ASGIApp, sample: float, clock: FakeClock) -> ASGIApp:
    return AccessLogFilter(
        inner, sample=sample, json=False, metrics=Metrics(), clock=clock, wall_clock=lambda: NOON, rng=random.Random(7)
    )


async def test_a_share_of_the_successes_is_logged(clock: FakeClock, lines: list[str]) -> None:
    """About the share asked for; none at 0."""
    app = sampled(Inner(), 0.25, clock)
    for _ in range(400):
        await call(app, http_scope())
    assert 60 <= len(lines) <= 140
    lines.clear()
    await call(sampled(Inner(), 0.0, clock), http_scope())
    assert lines == []


@pytest.mark.parametrize(
    ("status", "outcome", "logged"),
    [
        (200, {}, False),
        (404, {}, False),
        (500, {"end": "completed"}, True),
        (503, {"end": "local_reply"}, True),
        (200, {"end": "upstream_died"}, True),
        (200, {"end": "client_disconnected"}, False),
    ],
)
async def test_failures_are_logged_whatever_the_sample(
    status: int, outcome: dict[str, Any], logged: bool, clock: FakeClock, lines: list[str]
) -> None:
    """Errors and broken streams always; a client that left is no failure, nor is one's own mistake."""

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in outcome.items():
            setattr(Exchange.of(scope, now=0.0).outcome, name, value)
        await Inner(status=status)(scope, receive, send)

    await call(sampled(inner, 0.0, clock), http_scope())
    assert bool(lines) is logged


async def test_a_crash_is_logged_and_goes_on(clock: FakeClock, lines: list[str]) -> None:
    """The line says that the response never ended; the error is the server's to report."""

    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        await call(sampled(crash, 0.0, clock), http_scope())
    assert [line.rpartition(" ")[2] for line in lines] == ["end=aborted"]


async def test_nothing_is_written_below_the_level(clock: FakeClock, lines: list[str]) -> None:
    """The logger's level turns the log off."""
    logging.getLogger(LOGGER).setLevel(logging.WARNING)
    await call(sampled(Inner(), 1.0, clock), http_scope())
    assert lines == []


async def test_other_scope_types_pass(clock: FakeClock, lines: list[str]) -> None:
    """The lifespan is no request."""
    await call(sampled(Inner(), 1.0, clock), {"type": "lifespan"})
    assert lines == []


async def test_the_trace_is_named_where_the_request_has_one(lines: list[str], clock: FakeClock) -> None:
    """So that a line leads to its trace."""

    class Traced(Served):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            Exchange.of(scope, now=0.0).trace_id = "0af7651916cd43dd8448eb211c80319c"
            await super().__call__(scope, receive, send)

    served = Traced(clock, end="completed", status=200)
    for form in ("console", "json"):
        await call(build(served, AccessLogSettings(), logging_as(form, clock=clock)), http_scope())
    assert "request_id=r-1 trace_id=0af7651916cd43dd8448eb211c80319c tenant=alice" in lines[0]
    assert json.loads(lines[1])["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
