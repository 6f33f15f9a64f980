"""Receipts of requests: chosen by chance, followed, composed and handed to the writer once a request is over."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from pathlib import Path

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, RequestKind
from kvproxy.operate.config.schema import ReceiptSettings
from kvproxy.operate.metrics.process import ReceiptMetrics
from kvproxy.operate.receipts.files import RotatingFile
from kvproxy.operate.receipts.observed import AttemptLog, Placed
from kvproxy.operate.receipts.receipt import Attempt, Receipt, encode_prefixes, encode_receipt, receipt_type, wait_s
from kvproxy.operate.receipts.writer import WritingObserver
from kvproxy.operate.runtime.operated import AdminTarget
from kvproxy.proxy.filters.chain import WallClock
from kvproxy.proxy.request.exchange import Exchange, Outcome

#: Hides a session key or a prompt's head behind a key that dies with the proxy: the hash of a name is easily guessed.
Hash = Callable[[bytes], str]
QUEUE = "receipts"
#: Receipts waiting to be written; further ones are dropped and counted.
MAX_WAITING = 10_000


def keyed_hash(key: bytes) -> Hash:
    """Return a hash that cannot be reproduced without `key`; "" of nothing."""
    return lambda data: blake2b(data, digest_size=8, key=key).hexdigest() if data else ""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that is over. Holds neither its body nor its prompt."""

    request_id: str
    tenant: str
    model: str
    kind: RequestKind | None
    stream: bool
    session_key: str | None
    parent_session: str | None
    client: str
    received_at: float
    ended_at: float
    outcome: Outcome
    observed: AttemptLog


def compose_receipt(over: FinishedRequest, *, ended: datetime, hashed: Hash, key: bytes | None = None) -> Receipt:
    """Its receipt; `ended` is the wall clock's time of its end. Prefixes are hashed with `key`; None: not noted."""
    outcome = over.outcome
    observed = over.observed
    facts = observed.facts
    prefixes = "" if key is None else encode_prefixes(facts.blocks, key=key)
    made: Callable[..., Receipt] = receipt_type()
    return made(
        time=ended.astimezone(UTC).isoformat(timespec="milliseconds"),
        request_id=over.request_id,
        end=outcome.end,
        duration_s=_rounded(over.ended_at - over.received_at),
        kind="" if over.kind is None else over.kind.value,
        model=over.model,
        tenant=over.tenant,
        session=hashed((over.session_key or "").encode("utf-8", "surrogatepass")),
        parent=hashed((over.parent_session or "").encode("utf-8", "surrogatepass")),
        client=over.client,
        head=hashed(observed.head),
        stream=over.stream,
        cluster=outcome.cluster,
        prompt_tokens=facts.prompt_tokens or None,
        hot_tokens=facts.hot_tokens,
        prompt_blocks=len(facts.blocks),
        block_tokens=facts.block_tokens,
        prefixes=prefixes,
        searched=facts.searched,
        facts=facts.by_endpoint,
        attempts=tuple([_attempt(placed, over.received_at) for placed in observed.decisions]),
        refusals=tuple(observed.refusals),
        endpoint=outcome.endpoint,
        status=outcome.status,
        ttft_s=None if outcome.ttft_s is None else _rounded(outcome.ttft_s),
        engine_prompt_tokens=outcome.prompt_tokens,
        engine_media_tokens=outcome.media_tokens,
        cached_tokens=outcome.cached_tokens,
        completion_tokens=outcome.completion_tokens,
        cache_loss=outcome.cache_loss,
        **outcome.notes,
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


class Recorder(WritingObserver[FinishedRequest]):
    """Entered before the first request and left after the last."""

    wants_facts = True

    def __init__(
        self,
        settings: ReceiptSettings,
        *,
        metrics: Metrics,
        clock: Clock,
        wall_clock: WallClock,
        rng: random.Random,
        key: bytes | None = None,
    ) -> None:
        self._sample = settings.sample
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng
        key = os.urandom(16) if key is None else key
        self._hash = keyed_hash(key)
        self._key = key if settings.prefixes else None
        file = RotatingFile(Path(settings.path), max_bytes=settings.max_file, max_files=settings.max_files)
        results = metrics.group(ReceiptMetrics).receipts
        super().__init__(file, queue=QUEUE, limit=MAX_WAITING, results=results, metrics=metrics)

    def received(self, exchange: Exchange, now: float) -> None:
        """Follow the request if it is in the sample."""
        if self._sample >= 1.0 or self._rng.random() < self._sample:
            exchange.attach(AttemptLog(self._write))

    def _write(self, exchange: Exchange, log: AttemptLog, now: float) -> None:
        inference = exchange.inference
        self._writer.put_item(
            FinishedRequest(
                request_id=exchange.request_id,
                tenant=exchange.tenant,
                model="" if inference is None else inference.model,
                kind=None if inference is None else inference.kind,
                stream=inference is not None and inference.stream,
                session_key=None if inference is None else inference.session_key,
                parent_session=None if inference is None else inference.parent_session,
                client="" if inference is None else inference.client,
                received_at=exchange.received_at,
                ended_at=now,
                outcome=exchange.outcome,
                observed=log,
            )
        )

    def _line(self, over: FinishedRequest) -> bytes:
        ended = self._wall_clock() - timedelta(seconds=self._clock() - over.ended_at)
        return encode_receipt(compose_receipt(over, ended=ended, hashed=self._hash, key=self._key))


def make_recorder(proxy: AdminTarget, settings: ReceiptSettings, *, key: bytes | None = None) -> Recorder | None:
    """Return the recorder these settings ask for. `key` hides names: one of its own unless several proxies share it."""
    if not settings.path:
        return None
    rng = random.Random()
    return Recorder(settings, metrics=proxy.metrics, clock=proxy.clock, wall_clock=proxy.wall_clock, rng=rng, key=key)
