"""From what was noted of a request to its receipt. Runs in the writer's thread: reads only what no longer changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b

from kvproxy.receipts.forecast import wait_s
from kvproxy.receipts.observed import AttemptLog, Placed
from kvproxy.receipts.receipt import Attempt, Receipt
from kvproxy.request.exchange import Outcome
from kvproxy.types import RequestKind

#: Hides a session key or a prompt's head behind a key that dies with the proxy: the hash of a name is easily guessed.
Hash = Callable[[bytes], str]


def keyed_hash(key: bytes) -> Hash:
    """A hash that nobody without `key` can reproduce; "" of nothing."""
    return lambda data: blake2b(data, digest_size=8, key=key).hexdigest() if data else ""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is over. Holds neither its body nor its prompt."""

    request_id: str
    tenant: str
    model: str
    kind: RequestKind | None
    stream: bool
    session_key: str | None
    received_at: float
    ended_at: float
    outcome: Outcome
    observed: AttemptLog


def compose(over: Finished, *, ended: datetime, hashed: Hash) -> Receipt:
    """Its receipt; `ended` is the wall clock's time of its end."""
    outcome, observed = over.outcome, over.observed
    facts = observed.facts
    return Receipt(
        time=ended.astimezone(UTC).isoformat(timespec="milliseconds"),
        request_id=over.request_id,
        end=outcome.end,
        duration_s=_rounded(over.ended_at - over.received_at),
        kind="" if over.kind is None else over.kind.value,
        model=over.model,
        tenant=over.tenant,
        session=hashed((over.session_key or "").encode("utf-8", "surrogatepass")),
        head=hashed(observed.head),
        stream=over.stream,
        cluster=outcome.cluster,
        prompt_tokens=facts.prompt_tokens or None,
        hot_tokens=facts.hot_tokens,
        facts=facts.by_endpoint,
        attempts=tuple([_attempt(placed, over.received_at) for placed in observed.decisions]),
        refusals=tuple(observed.refusals),
        endpoint=outcome.endpoint,
        status=outcome.status,
        ttft_s=None if outcome.ttft_s is None else _rounded(outcome.ttft_s),
        engine_prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        completion_tokens=outcome.completion_tokens,
    )


def _attempt(placed: Placed, received_at: float) -> Attempt:
    if placed.seconds is not None:
        for candidate in placed.candidates:
            candidate.wait_s = _rounded(wait_s(candidate, placed.seconds, candidate.slowness or 1.0))
    return Attempt(
        at_s=_rounded(placed.at - received_at),
        endpoint=placed.endpoint,
        policy=placed.policy,
        reason=placed.reason,
        candidates=tuple(placed.candidates),
        left_out=placed.left_out,
        preference=placed.preference,
        seconds=placed.seconds,
        failure=placed.failure,
    )


def _rounded(seconds: float) -> float:
    """Microseconds are enough, and half as long on the line."""
    return round(seconds, 6)
