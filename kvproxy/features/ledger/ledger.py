"""The ledger: one JSON line an answered request, with its tokens by what they cost, and the price by the configured
rules. Counts are the engines' own or none, and what was predicted is marked; no text, no credential, no session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.features.ledger.metrics import LedgerMetrics
from kvproxy.features.ledger.settings import LedgerPrice, LedgerSettings
from kvproxy.operate.receipts.files import RotatingFile, list_files, list_workers
from kvproxy.operate.receipts.writer import WritingObserver
from kvproxy.proxy.filters.chain import WallClock
from kvproxy.proxy.request.exchange import Exchange, Outcome

QUEUE = "ledger"
#: Entries waiting to be written; further ones are dropped and counted.
MAX_WAITING = 100_000
DAY_S = 86_400.0
_PER = 1_000_000.0  # tokens that a price is for


class LedgerEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Record of one request. None: not reported by the engine; then nothing is billed as cached, and without a count of
    the prompt there is no price."""

    time: str  # of its end, UTC
    request_id: str
    tenant: str
    model: str
    cluster: str
    end: str
    uncached: int | None
    cached: int | None
    output: int | None
    price: float | None  # None: no rule for this model, or no counts
    #: Cached tokens as predicted by kvproxy and reported to its client, since the engine reported none. They are among
    #: those `cached` only if they are billed.
    predicted: int | None = None


def price_of(prices: Sequence[LedgerPrice], model: str, uncached: int, cached: int, output: int) -> float | None:
    """By the first rule for the model; None: there is none."""
    for rule in prices:
        if rule.model == model or (rule.model.endswith("*") and model.startswith(rule.model[:-1])):
            return round((uncached * rule.uncached + cached * rule.cached + output * rule.output) / _PER, 9)
    return None


@dataclass(frozen=True, slots=True)
class _Over:
    """A request that is over, as the writer's thread gets it."""

    request_id: str
    tenant: str
    model: str
    ended_at: float
    outcome: Outcome


class Ledger(WritingObserver[_Over]):
    """One line for each request that an engine answered well."""

    def __init__(self, settings: LedgerSettings, *, metrics: Metrics, clock: Clock, wall_clock: WallClock) -> None:
        self._prices = settings.prices
        self._bill_predicted = settings.bill_predicted
        self._clock = clock
        self._wall_clock = wall_clock
        file = RotatingFile(
            Path(settings.path),
            max_bytes=settings.max_file,
            max_files=settings.max_files,
            period_s=DAY_S,
            wall_clock=lambda: wall_clock().timestamp(),
        )
        results = metrics.group(LedgerMetrics).ledger
        super().__init__(file, queue=QUEUE, limit=MAX_WAITING, results=results, metrics=metrics)

    def finished(self, exchange: Exchange, now: float) -> None:
        """Entered is what an engine answered well, whole or in part; what it refused costs nothing."""
        inference = exchange.inference
        outcome = exchange.outcome
        if inference is not None and outcome.prefilled:
            self._writer.put_item(_Over(exchange.request_id, exchange.tenant, inference.model, now, outcome))

    def _line(self, over: _Over) -> bytes:
        outcome = over.outcome
        ended = self._wall_clock() - timedelta(seconds=self._clock() - over.ended_at)
        prompt = outcome.prompt_tokens
        cached = outcome.cached_tokens
        output = outcome.completion_tokens
        if cached is None and self._bill_predicted:
            cached = outcome.predicted_tokens
        uncached = None if prompt is None else prompt - (cached or 0)
        price = None if uncached is None else price_of(self._prices, over.model, uncached, cached or 0, output or 0)
        entry = LedgerEntry(
            time=ended.astimezone(UTC).isoformat(timespec="milliseconds"),
            request_id=over.request_id,
            tenant=over.tenant,
            model=over.model,
            cluster=outcome.cluster,
            end=outcome.end,
            uncached=uncached,
            cached=cached,
            output=output,
            price=price,
            predicted=outcome.predicted_tokens,
        )
        return msgspec.json.encode(entry) + b"\n"


@dataclass(slots=True)
class LedgerSum:
    """Sums of one tenant and model."""

    requests: int = 0
    uncached: int = 0
    cached: int = 0
    output: int = 0
    price: float = 0.0
    uncounted: int = 0  # requests without a count of the prompt, such as those whose client left
    unpriced: int = 0
    predicted: int = 0  # cached tokens that no engine counted, whether billed as cached or not

    def add(self, entry: LedgerEntry) -> None:
        """One more request."""
        self.requests += 1
        self.uncached += entry.uncached or 0
        self.cached += entry.cached or 0
        self.output += entry.output or 0
        self.price += entry.price or 0.0
        self.uncounted += entry.uncached is None
        self.unpriced += entry.price is None
        self.predicted += entry.predicted or 0


@dataclass(slots=True)
class LedgerReader:
    """Sums over a ledger, its predecessors and other workers' files beside it. `broken` counts lines that are none."""

    path: Path
    broken: int = 0
    sums: dict[tuple[str, str], LedgerSum] = field(default_factory=dict)

    def read(self, *, since: datetime | None = None, until: datetime | None = None) -> dict[tuple[str, str], LedgerSum]:
        """By tenant and model, of requests that ended in this time. FileNotFoundError when there is no such file."""
        for newest in list_workers(self.path):
            for path in reversed(list(list_files(newest))):
                with path.open("rb") as lines:
                    for ended, entry in self._entries(lines):
                        if (since is None or ended >= since) and (until is None or ended < until):
                            self.sums.setdefault((entry.tenant, entry.model), LedgerSum()).add(entry)
        return self.sums

    def _entries(self, lines: Iterable[bytes]) -> Iterator[tuple[datetime, LedgerEntry]]:
        for line in lines:
            if line.isspace():
                continue
            try:
                entry = _decoder.decode(line)
                ended = datetime.fromisoformat(entry.time).astimezone(UTC)
            except (msgspec.DecodeError, ValueError, OverflowError):
                self.broken += 1
            else:
                yield ended, entry


_decoder = msgspec.json.Decoder(LedgerEntry)
