"""Note of prefix breaks in receipts."""

from __future__ import annotations

import msgspec

NOTE = "prefix_break"


class PrefixBreak(msgspec.Struct, frozen=True, omit_defaults=True):
    """Break of a returning session's prefix: the first part that changed, the cause, and the tokens computed again."""

    cause: str  # a Cause; in a receipt of a later version, maybe another one
    part: str  # "system block 1, line 14", "tool 3", "message 5", "template", "model"; "engine": nothing changed
    tokens: int
    seconds: float | None = None  # of prefill, at the speeds learned; None: none were learned
