"""Note of sessions admitted by memory in receipts."""

from __future__ import annotations

import msgspec

NOTE = "session_turn"


class SessionTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Turn of a session, and how long it waited for room in the engines' memory."""

    turn: int  # from 1
    resident: bool  # its context is kept for the next turn
    room_wait_s: float = 0.0
