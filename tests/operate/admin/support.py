"""The admin listener of a proxy that is not entered, spoken to without a socket."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx

from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config
from tests.support.clock import FakeClock

NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
BASE = "http://127.0.0.1:8889"


def proxy_of(*, clock: FakeClock | None = None, **config: Any) -> Proxy:
    """Return a proxy over one endpoint `a` without probes, on a clock that stands still; None takes a key out."""
    raw = {"endpoints": {"a": "http://127.0.0.1:9"}, "health": {"active": False}, **config}
    raw = {key: value for key, value in raw.items() if value is not None}
    return Proxy(load_config(raw), clock=clock or FakeClock(), wall_clock=lambda: NOON)


@contextlib.asynccontextmanager
async def admin_of(proxy: Proxy, *, base: str = BASE, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of its admin listener that sends JSON."""
    transport = httpx.ASGITransport(app=proxy.admin)  # type: ignore[arg-type]
    sent = {"content-type": "application/json", **headers}
    async with httpx.AsyncClient(transport=transport, base_url=base, headers=sent) as client:
        yield client


@contextlib.contextmanager
def audited() -> Iterator[list[dict[str, Any]]]:
    """Yield the audit lines written inside the block."""
    lines: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.getMessage().isprintable()
            lines.append(json.loads(json.dumps(record.fields)))  # type: ignore[attr-defined]

    logger, handler = logging.getLogger("kvproxy.audit"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def problems_of(answer: httpx.Response) -> dict[str, tuple[str, str]]:
    """Return fault and fix of an error answer, by place."""
    return {one["where"]: (one["what"], one["fix"]) for one in answer.json()["problems"]}
