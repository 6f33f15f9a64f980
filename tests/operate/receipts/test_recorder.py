"""A recorder over a request whose receipt is written some time after its end."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kvproxy.base.metrics.groups import Metrics
from kvproxy.operate.config.schema import ReceiptSettings
from kvproxy.operate.receipts.files import ReceiptReader
from kvproxy.operate.receipts.recorder import Recorder
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from tests.support.clock import FakeClock


async def test_a_receipt_tells_when_its_request_ended(tmp_path: Path, clock: FakeClock) -> None:
    """Not when its line was written, by both clocks; how long it took is from its arrival to its end."""
    noon = datetime(2026, 3, 29, 12, 0, tzinfo=UTC)
    begun = clock()
    settings = ReceiptSettings(path=str(tmp_path / "receipts.jsonl"))
    recorder = Recorder(
        settings,
        metrics=Metrics(),
        clock=clock,
        wall_clock=lambda: noon + timedelta(seconds=clock() - begun),
        rng=random.Random(1),
    )
    exchange = Exchange(received_at=clock())
    recorder.received(exchange, clock())
    clock.advance(2.5)
    notify(RequestObserver.finished, exchange, clock())
    clock.advance(90.0)
    async with recorder:
        pass
    (receipt,) = ReceiptReader(tmp_path / "receipts.jsonl").oldest_first()
    assert (receipt.time, receipt.duration_s) == ("2026-03-29T12:00:02.500+00:00", 2.5)
