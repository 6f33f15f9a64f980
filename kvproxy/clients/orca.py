"""What an engine says of its load in the headers of one response: ORCA's report. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

#: Ask for the report with this request header.
ORCA_REQUEST_HEADER = (b"endpoint-load-metrics-format", b"JSON")
ORCA_RESPONSE_HEADER = b"endpoint-load-metrics"

_MAX_ORCA_BYTES, _ORCA_PREFIX = 4096, "named_metrics."


@dataclass(frozen=True, slots=True)
class OrcaLoad:
    """Load at the time of one response. None: not reported."""

    waiting: float | None
    kv_usage: float | None  # 0..1


class _Report(msgspec.Struct):
    named_metrics: dict[str, float]


_ORCA_DECODER = msgspec.json.Decoder(_Report)


def parse_orca(value: bytes) -> OrcaLoad | None:
    """The load in a header value, `JSON {...}` or `TEXT name=value, ...`; None when it is neither."""
    form, _, rest = value.strip()[:_MAX_ORCA_BYTES].partition(b" ")
    if form == b"JSON":
        metrics = _from_json(rest)
    elif form == b"TEXT":
        metrics = _from_text(rest.decode("latin-1"))
    else:
        return None
    if metrics is None:
        return None
    return OrcaLoad(waiting=metrics.get("num_requests_waiting"), kv_usage=metrics.get("kv_cache_usage_perc"))


def _from_json(text: bytes) -> dict[str, float] | None:
    try:
        return _ORCA_DECODER.decode(text).named_metrics
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _from_text(text: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for pair in text.split(","):
        name, _, number = pair.strip().partition("=")
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            metrics[name.removeprefix(_ORCA_PREFIX)] = value
    return metrics
