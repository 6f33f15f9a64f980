"""Note of leases in receipts."""

from __future__ import annotations

import msgspec


class LeaseResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A conversation came back to a prompt under a lease: what was promised of it and what the engine reused."""

    #: kept, broken, elsewhere (another endpoint answered), unverified (the engine does not say), early (before the
    #: engine was told to keep it)
    result: str
    why: str  # it was made: tool_call, client
    tokens: int  # promised
    reused: int = 0
    seconds: float = 0.0  # that computing what was reused would have taken, by the learned speeds
