"""Recorded decisions decided again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import Overlap
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.recorded_decisions import FeedbackSample, _DelayedFeedback, decide_again
from kvproxy.lab.replay.report import Review
from kvproxy.operate.receipts.files import ReceiptReader
from kvproxy.operate.receipts.receipt import Attempt, Receipt, ReceiptCandidate, encode_receipt

A, B = EndpointId("a"), EndpointId("b")
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
IDLE = (0.0, 0.0, 0.0, 0.0)


def candidate(endpoint: EndpointId, pending_tokens: int = 0) -> ReceiptCandidate:
    """With this much to prefill before it."""
    pending = int(pending_tokens > 0)
    work = (float(pending), float(pending_tokens), 0.0, 0.0)
    return ReceiptCandidate(endpoint, pending, pending, pending_tokens, pending_tokens, work, work, 0.0)


def receipt(number: int, endpoint: EndpointId, *candidates: ReceiptCandidate, **fields: object) -> Receipt:
    """Return a streamed request each second, of 1000 tokens at 1000 tokens a second, of which `a` holds 900."""
    attempt = Attempt(0.0, endpoint, "round_robin", "round_robin", candidates)
    known: dict[str, object] = {
        "end": "completed", "stream": True, "prompt_tokens": 1000, "facts": {A: Overlap(900)},
        "ttft_s": 0.1 if endpoint == A else 1.0,
        "cached_tokens": 900 if endpoint == A else 0, "endpoint": endpoint, "duration_s": 1.0, "attempts": (attempt,),
        **fields,
    }  # fmt: skip
    time = (NOON + timedelta(seconds=number)).isoformat()
    return Receipt(time=time, request_id=str(number), **known)  # type: ignore[arg-type]


def review(tmp_path: Path, receipts: list[Receipt], *policies: str, limit: int = 0) -> Review:
    """Decided again from a file."""
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(b"".join(map(encode_receipt, receipts)))
    return decide_again(ReceiptReader(path), [PolicySpec.parse(name) for name in policies], limit=limit)


def test_regret_is_what_the_recorded_choices_cost_more(tmp_path: Path) -> None:
    """Round robin took turns; kv_aware would have followed the cache each time."""
    receipts = [receipt(n, (A, B)[n % 2], candidate(A), candidate(B)) for n in range(40)]
    found = review(tmp_path, receipts, "kv_aware", "lmetric", "round_robin")
    assert (found.recorded.decisions, found.recorded.requests, found.recorded.policies) == (40, 40, ("round_robin",))
    kv_aware, lmetric, turns = (found.policies[name] for name in ("kv_aware", "lmetric", "round_robin"))
    assert kv_aware.differs == lmetric.differs == 0.5
    assert lmetric.regret_mean == pytest.approx(450)  # half of them computed 900 tokens more
    assert lmetric.regret_p99 == 900
    assert (turns.different, turns.regret_mean) == (0, None)
    assert kv_aware.hit_rate == pytest.approx(0.9)
    assert found.recorded.hit_rate == pytest.approx(0.45)
    assert kv_aware.ttft_difference_mean_s == pytest.approx(-0.45, rel=0.25)


def test_speeds_are_learned_from_the_receipts(tmp_path: Path) -> None:
    """Expected times are near those that were, though the prior is eight times off."""
    receipts = [receipt(n, (A, B)[n % 2], candidate(A), candidate(B)) for n in range(200)]
    found = review(tmp_path, receipts, "kv_aware")
    assert found.recorded.real_ttft_mean_s == pytest.approx(0.55)
    assert found.recorded.ttft_mean_s == pytest.approx(0.55, rel=0.2)


def test_loads_at_the_pick_count(tmp_path: Path) -> None:
    """Where the cache is, there may be a queue."""
    receipts = [receipt(n, B, candidate(A, 50_000), candidate(B)) for n in range(20)]
    found = review(tmp_path, receipts, "kv_aware", "least_request", "dynamo", "llm_d", "session", "consistent_hash")
    assert found.policies["kv_aware"].different == 0
    assert found.policies["least_request"].different == 0
    assert found.policies["dynamo"].different == 0


def test_live_blocks_are_decided_by_where_they_were_counted(tmp_path: Path) -> None:
    """Both hold as many tokens for as many requests, but those at A share most of them, and this prompt's too: Dynamo
    goes there past B's cache. A receipt that does not say so has each request's tokens for its own."""
    shared = replace(candidate(A), resident_tokens=64_000, live_blocks=2400, shared_blocks=200)
    apart = replace(candidate(B), resident_tokens=64_000, live_blocks=12_800)
    told = receipt(0, A, shared, apart, facts={B: Overlap(900)}, prompt_blocks=200, block_tokens=5.0)
    untold = receipt(1, A, replace(shared, live_blocks=None), replace(apart, live_blocks=None), facts=told.facts)
    assert review(tmp_path, [told], "dynamo").policies["dynamo"].different == 0
    assert review(tmp_path, [untold], "dynamo").policies["dynamo"].different == 1


def test_an_adapter_is_decided_by_what_it_cost_where(tmp_path: Path) -> None:
    """Without a note of it the request asked for none."""
    loaded, full = replace(candidate(A), adapter_s=0.0), replace(candidate(B), adapter_s=30.0)
    found = review(tmp_path, [receipt(n, A, loaded, full) for n in range(20)], "kv_aware")
    assert found.policies["kv_aware"].different == 0
    found = review(tmp_path, [receipt(n, B, loaded, full) for n in range(20)], "kv_aware")
    assert found.policies["kv_aware"].different == 20


def test_failed_attempts_are_decisions_that_teach_nothing(tmp_path: Path) -> None:
    """Each placement is decided again; only the one that answered shows a time."""
    failed = Attempt(0.0, A, "kv_aware", "overlap", (candidate(A), candidate(B)), failure="connect_error")
    second = Attempt(0.2, B, "kv_aware", "no_overlap", (candidate(B),))
    lost = Attempt(0.0, A, "kv_aware", "overlap", (candidate(B),))  # its endpoint is not among those noted
    receipts = [receipt(0, B, attempts=(failed, second)), receipt(1, A, attempts=(lost,))]
    found = review(tmp_path, receipts, "least_request")
    assert (found.recorded.decisions, found.recorded.requests) == (2, 1)
    assert found.recorded.real_ttft_mean_s == pytest.approx(0.8)


def test_hidden_first_tokens_are_no_times(tmp_path: Path) -> None:
    """An answer that is not streamed, or never came, says nothing about a first token."""
    receipts = [
        receipt(0, A, candidate(A), stream=False),
        receipt(1, A, candidate(A), ttft_s=None, cached_tokens=None, end="client_disconnected"),
    ]
    found = review(tmp_path, receipts, "kv_aware", "least_ttft")
    assert found.recorded.real_ttft_mean_s is None
    assert "really it was" not in found.render_table()


def test_nothing_is_learned_before_it_was_seen() -> None:
    """A policy decides by what the proxy knew at that moment."""
    policy = PolicySpec.parse("kv_aware").make(rng=Random(1))
    learned: list[float] = []
    policy.observe_reuse = lambda endpoint, predicted, cached, now: learned.append(now)  # type: ignore[method-assign]
    feedback = _DelayedFeedback(policy)
    for at in (30.0, 10.0, 20.0):
        feedback.schedule(FeedbackSample(at, A, None, 0.1, 10, 5))
    feedback.apply_until(9.9)
    assert learned == []
    feedback.apply_until(20.0)
    assert learned == [10.0, 20.0]
    feedback.apply_until(40.0)
    assert learned == [10.0, 20.0, 30.0]


def test_tokens_of_media_are_reported_apart(tmp_path: Path) -> None:
    """As engines counted them; a summary of text alone does not mention them."""
    receipts = [
        receipt(n, A, candidate(A), candidate(B), engine_prompt_tokens=1000, engine_media_tokens=250 * (n % 2))
        for n in range(4)
    ]
    found = review(tmp_path, receipts, "kv_aware")
    assert found.recorded.media_share == pytest.approx(0.125)
    assert "12% of their prompt tokens are those of pictures, audio or video" in found.render_table()
    assert "pictures" not in review(tmp_path, receipts[:1], "kv_aware").render_table()


def test_the_first_so_many_requests(tmp_path: Path) -> None:
    """`--requests` bounds it; lines that are no receipts are counted."""
    path = tmp_path / "receipts.jsonl"
    good = encode_receipt(receipt(0, A, candidate(A)))
    path.write_bytes(b"broken\n\n" + good + good)
    found = decide_again(ReceiptReader(path), [PolicySpec.parse("random")], limit=1)
    assert found.recorded.decisions == 1
    assert "1 lines are no receipts" in found.render_table()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="no decisions"):
        decide_again(ReceiptReader(path), [])
