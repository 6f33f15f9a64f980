"""Note of prefill apart from decode in receipts."""

from __future__ import annotations

import msgspec

from kvproxy.base.types import EndpointId

#: Its name.
NOTE = "disaggregation"


#: Its results: the decoder pulled the KV; it computed the prompt itself, since no prefill succeeded or its handle could
#: not be used, or since it refused the handle; it failed with the handle; it answered with an error that is not about
#: the handle.
PULLED = "pulled"
LOCAL = "local"
REFUSED = "refused"
FAILED = "failed"
ERROR = "error"


class Legs(msgspec.Struct, omit_defaults=True):
    """Legs of one request: the latest prefill, and what became of it."""

    prefill: EndpointId
    tokens: int  # of the prompt, that the decoder was to pull
    expected_s: float  # of the two legs, up to the first token
    local_s: float  # the same at the decoder alone
    result: str = ""
    prefill_s: float = 0.0
    prefills: int = 0  # that were tried


_RESULTS = {
    PULLED: "and its KV pulled from there",
    LOCAL: "in vain, so that the endpoint computed it itself",
    REFUSED: "but its KV was refused, so that the endpoint computed it itself",
    FAILED: "and the endpoint failed with it",
    ERROR: "and the endpoint answered with an error",
}


def explain(legs: Legs) -> str:
    """Return a sentence about the legs."""
    became = _RESULTS.get(legs.result, "when the client left")
    expected = f"; expected first token after {legs.expected_s:.3f} s, alone {legs.local_s:.3f} s"
    tried = f", the last of {legs.prefills} that were tried" if legs.prefills > 1 else ""
    return f"{legs.tokens} tokens of its prompt were computed at {legs.prefill}{tried}, {became}{expected}"
