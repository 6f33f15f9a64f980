"""Memory and occupancy of an engine, as its own metrics report them. Pure."""

from __future__ import annotations

import msgspec


class EngineState(msgspec.Struct, frozen=True):
    """One scrape at `read_at`. None: this engine does not report the number."""

    read_at: float
    capacity_tokens: int | None = None  # tokens of KV memory
    used_share: float | None = None  # share of it held by running requests; a shared block counts once
    running: int | None = None  # admitted requests
    waiting: int | None = None  # requests not admitted yet
