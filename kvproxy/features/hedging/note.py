"""Note of hedging in receipts."""

from __future__ import annotations

import msgspec

from kvproxy.base.types import EndpointId

#: Name of the note.
NOTE = "hedge"
WON = "won"
LOST = "lost"
FAILED = "failed"
LEFT = "left"
REFUSED = "refused"


class HedgeNote(msgspec.Struct, omit_defaults=True):
    """The second endpoint, when it got the request, and when the first one was expected to answer, both in seconds
    since that got it."""

    endpoint: EndpointId
    after_s: float
    expected_s: float
    result: str = LEFT


_RESULTS = {
    WON: "answered first",
    LOST: "was slower and was cancelled",
    FAILED: "failed as well",
    LEFT: "had not answered when the client left",
}


def explain(note: HedgeNote) -> str:
    """Return a sentence about the second sending."""
    late = f"after {note.after_s:.3f} s without a first byte ({note.expected_s:.3f} s expected)"
    return f"{late} it was sent to {note.endpoint} as well, which {_RESULTS.get(note.result, note.result)}"
