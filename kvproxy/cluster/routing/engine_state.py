"""Memory and occupancy of an engine, as its own metrics report them. Pure."""

from __future__ import annotations

import msgspec


class EngineState(msgspec.Struct, frozen=True):
    """One scrape at `read_at`. None: this engine does not report the number."""

    read_at: float
    capacity_tokens: int | None = None  # KV memory
    used_share: float | None = None  # of it, held by running requests; a block that several share counts once
    running: int | None = None  # requests it has admitted
    waiting: int | None = None  # requests it has not admitted yet
