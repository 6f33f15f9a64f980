"""Note of the breaks of a stream, and its words."""

from __future__ import annotations

import msgspec

NOTE = "resume"


class ResumedLeg(msgspec.Struct, frozen=True, omit_defaults=True):
    """One break: where the stream broke, and how it went on."""

    broke_at: str  # endpoint
    error: str  # reason of the failure
    tokens: int  # of the answer that had come
    grade: str = ""  # exact, text, restart; "": it did not go on
    refusal: str = ""  # why not
    gap_s: float | None = None  # without a token; None: no further token came


class ResumeNote(msgspec.Struct, frozen=True):
    """All breaks of one stream, in order."""

    legs: tuple[ResumedLeg, ...]


def describe_leg(leg: ResumedLeg) -> str:
    """Return a line about it."""
    if leg.error == "moved":
        return _describe_move(leg)
    broke = f"the stream broke at {leg.broke_at} ({leg.error}) after {leg.tokens} tokens"
    if leg.refusal:
        return f"{broke} and could not go on: {leg.refusal}"
    if leg.gap_s is None:
        return f"{broke}; the rest was requested ({leg.grade}), and nothing more came"
    return f"{broke} and went on elsewhere after {leg.gap_s:.3g} s ({leg.grade})"


def _describe_move(leg: ResumedLeg) -> str:
    moved = f"the stream was moved off {leg.broke_at} after {leg.tokens} tokens ({leg.grade})"
    return f"{moved}; nothing more came" if leg.gap_s is None else f"{moved} and went on after {leg.gap_s:.3g} s"
