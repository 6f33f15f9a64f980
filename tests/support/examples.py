"""The number of examples that property tests try: a quarter in the fast suite, all under FULL_EXAMPLES=1."""

from __future__ import annotations

import os

FULL = os.environ.get("FULL_EXAMPLES") == "1"


def examples(full: int) -> int:
    """Return the number to try where `full` are wanted."""
    return full if FULL else max(10, full // 4)
