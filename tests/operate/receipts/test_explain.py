"""A receipt in words, case by case."""

from __future__ import annotations

import msgspec
import pytest

from kvproxy.base.types import EndpointId, Tier
from kvproxy.cluster.routing.policy import PRECISE, Overlap
from kvproxy.operate.receipts.explain import explain_decision, explain_receipt
from kvproxy.operate.receipts.receipt import Attempt, Receipt, ReceiptCandidate, decode_receipt, encode_receipt

A, B = EndpointId("a"), EndpointId("b")
IDLE = (0.0, 0.0, 0.0, 0.0)
BUSY = (1.0, 2000.0, 0.0, 0.0)


def candidate(endpoint: EndpointId, **fields: object) -> ReceiptCandidate:
    """Return a candidate, idle except for these fields."""
    return msgspec.structs.replace(ReceiptCandidate(endpoint, 0, 0, 0, 0, IDLE, IDLE, 0.0), **fields)


def receipt(*attempts: Attempt, **fields: object) -> Receipt:
    """Of a request that went well."""
    plain = Receipt(
        time="2026-01-02T12:00:00+00:00", request_id="r", end="completed", duration_s=2.0, attempts=attempts
    )
    return msgspec.structs.replace(plain, **{"status": 200, **fields})


def attempt(endpoint: EndpointId, *candidates: ReceiptCandidate, **fields: object) -> Attempt:
    """By kv_aware."""
    return msgspec.structs.replace(Attempt(0.001, endpoint, "kv_aware", "load", candidates), **fields)


def test_a_choice_against_the_cache_is_explained() -> None:
    """The numbers of both, and by how much the other was dearer."""
    seconds = (0.0, 0.001, 0.0, 0.0)
    busy = candidate(A, pending_requests=1, work=BUSY, head=BUSY, wait_s=2.0, cost=2.2, slowness=1.0, in_flight=7)
    idle = candidate(B, wait_s=0.0, cost=1.0, slowness=1.0)
    text = explain_receipt(
        receipt(
            attempt(B, busy, idle, seconds=seconds),
            endpoint=B,
            prompt_tokens=1000,
            ttft_s=1.101,
            facts={A: Overlap(500, ((Tier.HOST, 300),), PRECISE, 2.5)},
            hot_tokens=64,
            engine_prompt_tokens=1000,
            engine_media_tokens=600,
            cached_tokens=0,
        )
    )
    assert "prompt of about 1000 tokens, the first 64 of them hot" in text
    assert "another endpoint holds more of this prompt, but it would cost more there" in text
    rows = {line.split()[-7 if "old" in line else 0]: line for line in text.splitlines() if " tokens" in line}
    assert any("2.00 s" in row and "800 (300 host)" in row and "precise, 2.5 s old" in row
               for row in rows.values())  # fmt: skip
    assert "The next best, a, would have cost 1.2 more." in text
    assert "Predicted: 0 of 1000 tokens cached, first token 1.00 s after the decision." in text
    assert "first byte after 1.10 s (1.10 s after the decision), over after 2.00 s" in text
    assert "600 of its prompt's tokens are those of pictures" in text
    assert "0 of 1000 tokens (predicted 0)" in text


def test_the_first_byte_is_told_from_the_latest_decision() -> None:
    """An attempt that failed before it is not the engine's that answered."""
    later = attempt(B, candidate(B), at_s=3.0)
    text = explain_receipt(receipt(attempt(A, candidate(A), failure="connect"), later, endpoint=B, ttft_s=3.5))
    assert "first byte after 3.50 s (500.0 ms after the decision)" in text


def test_a_cheaper_alternative_is_named() -> None:
    """A preference, or a draw, may go against the costs."""
    text = explain_receipt(receipt(attempt(A, candidate(A, cost=3.0), candidate(B, cost=1.0), reason="sampled")))
    assert "b would have cost 2 less." in text


def test_every_attempt_is_told_with_what_went_wrong() -> None:
    """A preference that was followed, its failure, and the second try."""
    text = explain_receipt(
        receipt(
            attempt(A, candidate(A), reason="preferred", preference="followed", failure="connect_error"),
            attempt(B, candidate(B), left_out=3, at_s=0.5),
            end="upstream_died",
            endpoint=B,
        )
    )
    assert "an earlier filter's preference was followed" in text
    assert "It failed: connect_error." in text
    assert "Attempt 2, 500.0 ms after it was received: b" in text
    assert "and 3 more" in text
    assert "b, status 200, upstream_died, after 2 attempts" in text
    assert "the engine did not report its cached tokens" in text
    assert "would have cost" not in text


def test_a_remembered_decision_names_the_cause_of_a_local_reply() -> None:
    """At an outage, when no receipts are kept."""
    failed = {"request_id": "r", "endpoint": "a", "status": 502, "end": "local_reply", "local_reason": "connect_error"}
    assert "status 502, local_reply (connect_error), after 1 attempt" in explain_decision(failed)


def test_nobody_could_take_it() -> None:
    """The reasons, each once."""
    text = explain_receipt(receipt(refusals=("saturated", "saturated"), status=503, end="local_reply"))
    assert "No endpoint could take it 2 time(s): saturated." in text
    assert "status 503, local_reply, after 0 attempts" in text


def test_client_text_forges_no_log_line() -> None:
    """Ids and model names come from outside; a terminal sees them escaped."""
    text = explain_receipt(receipt(request_id="x\x1b[31m", model="m\nWhat happened: nothing", kind="chat"))
    assert "\x1b" not in text
    assert sum(line.startswith("What happened") for line in text.splitlines()) == 1


@pytest.mark.parametrize("reason", ["overlap", "session", "round_robin", "least_request", "some_new_reason"])
def test_every_reason_has_a_sentence_or_stands_for_itself(reason: str) -> None:
    """Other people's policies have reasons of their own."""
    text = explain_receipt(receipt(attempt(A, candidate(A), reason=reason)))
    assert f"reason {reason}" in text


def test_a_receipt_survives_its_line() -> None:
    """Written and read again it is the same; unknown fields of a later version are passed over."""
    one = receipt(attempt(A, candidate(A, cost=1.5)), facts={A: Overlap(5)}, cached_tokens=0)
    line = encode_receipt(one)
    assert encode_receipt(decode_receipt(line)) == line
    assert decode_receipt(line.replace(b'{"time"', b'{"later":1,"time"')) == decode_receipt(line)
    with pytest.raises(ValueError, match="not a receipt"):
        decode_receipt(b'{"time": 5}')


@pytest.mark.parametrize(
    ("reason", "words"), [("cleared", "it dropped the cache on request"), ("new_reason", "new_reason")]
)
def test_a_cache_that_was_lost_just_before_is_named(reason: str, words: str) -> None:
    """Why nothing was reused; a reason of a later version by its name."""
    text = explain_receipt(receipt(attempt(A, candidate(A)), endpoint=A, cached_tokens=0, cache_loss=reason))
    assert f"it had lost its cache less than a minute before: {words}" in text
    assert "lost its cache" not in explain_receipt(receipt(attempt(A, candidate(A)), endpoint=A, cached_tokens=0))
