"""What the proxy could expect of an endpoint, by the numbers on a receipt."""

from __future__ import annotations

from kvproxy.receipts.receipt import Receipt, ReceiptCandidate
from kvproxy.routing.load import Backlog
from kvproxy.routing.work import Features, features_of, seconds_of
from kvproxy.types import EndpointId


def matched_tokens(receipt: Receipt, endpoint: EndpointId) -> int:
    """Leading tokens it was believed to hold, never more than the prompt has."""
    held = receipt.facts.get(endpoint)
    return 0 if held is None else min(held.device_tokens + held.lower_tokens, receipt.prompt_tokens or 0)


def own_work(receipt: Receipt, endpoint: EndpointId) -> Features:
    """The prefill this request would add there."""
    matched = matched_tokens(receipt, endpoint)
    held = receipt.facts.get(endpoint)
    lower = 0 if held is None else min(held.lower_tokens, matched)
    return features_of((receipt.prompt_tokens or 0) - matched, matched, lower)


def first_token_s(receipt: Receipt, candidate: ReceiptCandidate, seconds: Features, slowness: float) -> float:
    """From the decision to the first token there, at these speeds."""
    return wait_s(candidate, seconds, slowness) + prefill_s(receipt, candidate.id, seconds, slowness)


def wait_s(candidate: ReceiptCandidate, seconds: Features, slowness: float) -> float:
    """Until it would begin."""
    if not candidate.pending_requests:
        return 0.0
    return Backlog(candidate.work, candidate.head, candidate.elapsed_s, candidate.room_s).wait_s(seconds, slowness)


def prefill_s(receipt: Receipt, endpoint: EndpointId, seconds: Features, slowness: float) -> float:
    """The request's own prefill there."""
    return slowness * seconds_of(own_work(receipt, endpoint), seconds)
