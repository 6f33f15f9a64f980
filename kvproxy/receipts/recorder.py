"""Follows a share of the requests and hands their receipts to the writer: what the application puts in place."""

from __future__ import annotations

import asyncio
import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Protocol, Self

from kvproxy.config.schema import ReceiptSettings
from kvproxy.filters.chain import WallClock
from kvproxy.metrics.catalog import Metrics
from kvproxy.receipts.compose import Finished, compose, keyed_hash
from kvproxy.receipts.files import RotatingFile
from kvproxy.receipts.observed import AttemptLog
from kvproxy.receipts.receipt import encode
from kvproxy.receipts.writer import Writer
from kvproxy.request.exchange import Exchange
from kvproxy.request.observer import RequestObserver
from kvproxy.types import Clock

QUEUE = "receipts"

#: Shutdown waits no longer for a slow disk.
_CLOSE_S = 5.0


class Recorder(RequestObserver):
    """Entered before the first request and left after the last."""

    def __init__(
        self, settings: ReceiptSettings, *, metrics: Metrics, clock: Clock, wall_clock: WallClock, rng: random.Random
    ) -> None:
        self._sample = settings.sample
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng
        self._hash = keyed_hash(os.urandom(16))
        file = RotatingFile(Path(settings.path), max_bytes=settings.max_file, max_files=settings.max_files)
        written, dropped, failed = (
            metrics.bounds.receipts.labels(result) for result in ("written", "dropped", "failed")
        )
        self._writer: Writer[Finished] = Writer(
            file, self._line, limit=settings.max_queue, written=written, dropped=dropped, failed=failed
        )
        metrics.bounds.queue_depth.labels(QUEUE).set_function(lambda: self._writer.waiting)
        metrics.bounds.queue_limit.labels(QUEUE).set(settings.max_queue)

    async def __aenter__(self) -> Self:
        self._writer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._writer.close, _CLOSE_S)

    def received(self, exchange: Exchange, now: float) -> None:
        """Follow the request if chance says so."""
        if self._sample >= 1.0 or self._rng.random() < self._sample:
            exchange.attach(AttemptLog(self._write))

    def _write(self, exchange: Exchange, log: AttemptLog, now: float) -> None:
        inference = exchange.inference
        self._writer.put(
            Finished(
                request_id=exchange.request_id,
                tenant=exchange.tenant,
                model="" if inference is None else inference.model,
                kind=None if inference is None else inference.kind,
                stream=inference is not None and inference.stream,
                session_key=None if inference is None else inference.session_key,
                received_at=exchange.received_at,
                ended_at=now,
                outcome=exchange.outcome,
                observed=log,
            )
        )

    def _line(self, over: Finished) -> bytes:
        ended = self._wall_clock() - timedelta(seconds=self._clock() - over.ended_at)
        return encode(compose(over, ended=ended, hashed=self._hash))


class Composed(Protocol):
    """The application, as far as a recorder needs it."""

    @property
    def metrics(self) -> Metrics: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def wall_clock(self) -> WallClock: ...


def recorder_of(proxy: Composed, settings: ReceiptSettings) -> Recorder | None:
    """The recorder these settings ask for."""
    if not settings.path:
        return None
    rng = random.Random()
    return Recorder(settings, metrics=proxy.metrics, clock=proxy.clock, wall_clock=proxy.wall_clock, rng=rng)
