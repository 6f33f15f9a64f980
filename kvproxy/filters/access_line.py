"""One line of the access log: what was asked (never bodies, queries or credentials) and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache

import msgspec

from kvproxy.log_lines import format_time
from kvproxy.request.exchange import Exchange

_MAX_TEXT = 512
#: A field of a line.
Value = str | int | float


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
    """What is known of one request, in the order it is written. `path` is the raw one, without the query; what is
    longer than a line shows does not go into a memory of words.

    `word` makes one word of a text that others chose (`printable`, or a memory of it for texts that come again).
    """
    outcome = exchange.outcome
    line: dict[str, Value] = {
        "method": word(method),
        "path": word(path[: _MAX_TEXT + 1].decode("latin-1")),
        "status": status,
        "bytes": sent_bytes,
        "duration_ms": round(duration_s * 1000, 1),
    }
    if outcome.ttft_s is not None:
        line["ttft_ms"] = round(outcome.ttft_s * 1000, 1)
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


def printable(text: str) -> str:
    """`text` as one visible ASCII word of bounded length: it can forge no field, no line and no terminal code."""
    if len(text) > _MAX_TEXT:
        text = text[:_MAX_TEXT] + "..."
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return text.encode("unicode_escape").decode("ascii").replace(" ", "\\x20")
