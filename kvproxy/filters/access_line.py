"""One line of the access log: what was asked (never bodies, queries or credentials) and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from kvproxy.filters.exchange import Exchange

_MAX_TEXT = 512
_BARE = frozenset({"method", "path", "status"})

#: A field of a line; None is left out.
Value = str | int | float | None


def fields(
    exchange: Exchange, *, method: str, path: bytes, status: int, sent_bytes: int, duration_s: float, end: str
) -> dict[str, Value]:
    """The fields of one request in the order they are written. `path` is the raw one, without the query."""
    outcome = exchange.outcome
    return {
        "method": printable(method),
        "path": printable(path.decode("latin-1")),
        "status": status,
        "bytes": sent_bytes,
        "duration_ms": round(duration_s * 1000, 1),
        "ttft_ms": None if outcome.ttft_s is None else round(outcome.ttft_s * 1000, 1),
        "endpoint": printable(outcome.endpoint) if outcome.endpoint else None,
        "attempts": outcome.attempts if outcome.attempts > 1 else None,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": outcome.completion_tokens,
        "request_id": printable(exchange.request_id) if exchange.request_id else None,
        "tenant": printable(exchange.tenant) if exchange.tenant else None,
        "end": end,
    }


def as_text(line: Mapping[str, Value]) -> str:
    """`POST /v1/completions 200 bytes=12 ...`: method, path and status bare, the rest `name=value`."""
    return " ".join(
        str(value) if name in _BARE else f"{name}={value}" for name, value in line.items() if value is not None
    )


def as_json(line: Mapping[str, Value], now: datetime) -> str:
    """One JSON object with the time in UTC first."""
    time = now.astimezone(UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"time": time, **{k: v for k, v in line.items() if v is not None}}).decode()


def printable(text: str) -> str:
    """`text` as one visible ASCII word of bounded length: it can forge no field, no line and no terminal code."""
    if len(text) > _MAX_TEXT:
        text = text[:_MAX_TEXT] + "..."
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return text.encode("unicode_escape").decode("ascii").replace(" ", "\\x20")
