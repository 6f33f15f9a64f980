"""Recorded requests, read from receipts: what came when, where it went, what it shared, how long it took; and how full
engines were meanwhile.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from statistics import median

from kvproxy.base.types import EndpointId, RequestKind
from kvproxy.operate.receipts.files import ReceiptReader
from kvproxy.operate.receipts.receipt import Receipt, decode_prefixes, matched_tokens

#: The latest receipts read: hours of most fleets, and 100 MB of memory.
MAX_RECEIPTS = 20_000
#: More tokens of a prompt or an answer are an engine's mistake, and make the recording useless.
MAX_TOKENS = 4 * 1024 * 1024
_OK = 200
_ANSWERED = frozenset({"completed", "client_disconnected"})


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One answered request. Times are seconds since the epoch; None: unknown."""

    arrived_at: float
    ended_at: float
    first_token_at: float | None  # of a streamed answer
    endpoint: EndpointId
    session: str
    model: str
    chat: bool
    prompt_tokens: int
    output_tokens: int | None
    cached_tokens: int | None
    predicted_tokens: int  # predicted at the endpoint
    prompt_blocks: int
    prefixes: Sequence[tuple[int, bytes]]

    @property
    def ttft_s(self) -> float | None:
        """From the request's arrival at the proxy to its first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def token_s(self) -> float | None:
        """Seconds a token after the first."""
        if self.first_token_at is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_token_at) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Traffic:
    """The requests of one pool: models, and the endpoints that may serve them. In order of arrival."""

    cluster: str
    models: tuple[str, ...]
    endpoints: tuple[EndpointId, ...]
    requests: tuple[RecordedRequest, ...]
    receipts: tuple[Receipt, ...]  # those of failed requests included

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrived_at - self.requests[0].arrived_at if self.requests else 0.0

    @property
    def latest_at(self) -> float:
        """When the last request ended."""
        return max((one.ended_at for one in self.requests), default=0.0)

    @cached_property
    def usual_output_tokens(self) -> int | None:
        """Median length of the answers whose length is known."""
        known = [one.output_tokens for one in self.requests if one.output_tokens is not None]
        return round(median(known)) if known else None

    @property
    def name(self) -> str:
        """For people."""
        return f"cluster {self.cluster}, model {', '.join(self.models)}"

    def answered_by(self, endpoint: EndpointId) -> list[RecordedRequest]:
        return [one for one in self.requests if one.endpoint == endpoint]


def read_traffic(reading: ReceiptReader) -> list[Traffic]:
    """Return the latest receipts by pool, the pool with most requests first. FileNotFoundError when there is no such
    file."""
    receipts = deque(reading.oldest_first(), maxlen=MAX_RECEIPTS)
    found = []
    for (cluster, models), endpoints in _pools(receipts).items():
        own = [one for one in receipts if one.cluster == cluster and one.model in models and one.attempts]
        requests = sorted(_requests(own), key=lambda one: one.arrived_at)
        if requests:
            found.append(Traffic(cluster, models, endpoints, tuple(requests), tuple(own)))
    return sorted(found, key=lambda traffic: -len(traffic.requests))


def _pools(receipts: Iterable[Receipt]) -> Mapping[tuple[str, tuple[str, ...]], tuple[EndpointId, ...]]:
    """Endpoints by (cluster, models): models that share an endpoint are one pool, since they wait for each other."""
    serving: dict[tuple[str, str], set[EndpointId]] = {}
    for receipt in receipts:
        for attempt in receipt.attempts:
            ids = serving.setdefault((receipt.cluster, receipt.model), set())
            ids.update(one.id for one in attempt.candidates)
            ids.add(attempt.endpoint)
    pools: list[tuple[str, set[str], set[EndpointId]]] = []
    for (cluster, model), ids in serving.items():
        joined = [pool for pool in pools if pool[0] == cluster and pool[2] & ids]
        pools = [pool for pool in pools if pool not in joined]
        models = {model}.union(*(pool[1] for pool in joined))
        pools.append((cluster, models, ids.union(*(pool[2] for pool in joined))))
    return {(cluster, tuple(sorted(models))): tuple(sorted(ids)) for cluster, models, ids in pools}


def _requests(receipts: Iterable[Receipt]) -> Iterator[RecordedRequest]:
    for receipt in receipts:
        prompt_tokens = receipt.engine_prompt_tokens or receipt.prompt_tokens
        answered = receipt.status == _OK and receipt.end in _ANSWERED and receipt.kind != RequestKind.EMBEDDINGS
        if not answered or receipt.endpoint is None or not prompt_tokens:
            continue
        if max(prompt_tokens, receipt.completion_tokens or 0) > MAX_TOKENS:
            continue
        try:
            ended_at = datetime.fromisoformat(receipt.time).timestamp()
        except ValueError:
            continue
        arrived_at = ended_at - receipt.duration_s
        shown = receipt.stream and receipt.ttft_s is not None
        yield RecordedRequest(
            arrived_at=arrived_at,
            ended_at=ended_at,
            first_token_at=arrived_at + receipt.ttft_s if shown and receipt.ttft_s is not None else None,
            endpoint=receipt.endpoint,
            session=receipt.session,
            model=receipt.model,
            chat=receipt.kind == RequestKind.CHAT,
            prompt_tokens=prompt_tokens,
            output_tokens=receipt.completion_tokens or None,
            cached_tokens=receipt.cached_tokens,
            predicted_tokens=matched_tokens(receipt, receipt.endpoint),
            prompt_blocks=receipt.prompt_blocks,
            prefixes=decode_prefixes(receipt.prompt_blocks, receipt.prefixes) if receipt.prefixes else (),
        )


#: Only of streamed answers it is known when they began.
_STREAMED = 0.8
#: Slots bind where a request that begins to answer while others wait makes as many answer as ever: mostly the very
#: number, and else one more or less, since ends are seen a moment late.
_BEGUN = 30
_SAME = 0.6
_ALIKE = 0.9
#: More memory in use than this, and it is memory that is waited for.
_FULL_MEMORY = 0.7


@dataclass(frozen=True, slots=True)
class EngineOccupancy:
    """One engine's."""

    endpoint: EndpointId
    answering: int  # requests past their first token, the most at a time
    waiting_share: float  # of the time in which two or more had none yet
    held_tokens: int  # by answering requests in that time, on average
    begun: tuple[int, ...]  # how many answered after each first token that left others waiting


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Of the engines of one pool; of none where too few answers were streamed."""

    engines: tuple[EngineOccupancy, ...] = ()

    @property
    def answering(self) -> int:
        """The most of any engine."""
        return max((one.answering for one in self.engines), default=0)

    @property
    def held_tokens(self) -> int:
        """Of an engine, on average, while requests waited for each other."""
        return round(sum(one.held_tokens for one in self.engines) / max(1, len(self.engines)))

    @property
    def waiting_share(self) -> float:
        """Of the time, on average."""
        return sum(one.waiting_share for one in self.engines) / max(1, len(self.engines))

    def find_slots(self, capacity_tokens: int | None) -> int | None:
        """Return the limit of running sequences, if requests waited for one of them to end; else None. A limit of one
        cannot be distinguished from requests that end before the next prefill."""
        begun = [count for one in self.engines for count in one.begun]
        if len(begun) < _BEGUN:
            return None
        usual, times = Counter(begun).most_common(1)[0]
        alike = sum(abs(count - usual) <= 1 for count in begun)
        bound = usual > 1 and times >= _SAME * len(begun) and alike >= _ALIKE * len(begun)
        memory = capacity_tokens is not None and self.held_tokens > _FULL_MEMORY * capacity_tokens
        return usual if bound and not memory else None


NOT_MEASURED = Occupancy()


def measure_occupancy(traffic: Traffic) -> Occupancy:
    """Of every endpoint that answered."""
    streamed = sum(one.first_token_at is not None for one in traffic.requests)
    if streamed < _STREAMED * len(traffic.requests):
        return NOT_MEASURED
    return Occupancy(
        tuple(
            _measure_engine(endpoint, own) for endpoint in traffic.endpoints if (own := traffic.answered_by(endpoint))
        )
    )


def _measure_engine(endpoint: EndpointId, requests: Sequence[RecordedRequest]) -> EngineOccupancy:
    changes = []
    for one in requests:
        first = one.ended_at if one.first_token_at is None else one.first_token_at
        tokens = one.prompt_tokens + (one.output_tokens or 0)
        changes += [(one.arrived_at, 0, 1, 0, 0), (first, 1, -1, 1, tokens), (one.ended_at, 2, 0, -1, -tokens)]
    changes.sort()
    waiting = answering = held = most = 0
    begun = []
    queued_s = 0.0
    held_s = 0.0
    for (at, _, more_waiting, more_answering, more_held), (until, *_) in pairwise([*changes, changes[-1]]):
        waiting = waiting + more_waiting
        answering = answering + more_answering
        held = held + more_held
        most = max(most, answering)
        if more_waiting < 0 and waiting:
            begun.append(answering)
        if waiting >= 2:
            queued_s += until - at
            held_s += held * (until - at)
    total_s = changes[-1][0] - changes[0][0]
    return EngineOccupancy(
        endpoint,
        answering=most,
        waiting_share=queued_s / total_s if total_s else 0.0,
        held_tokens=round(held_s / queued_s) if queued_s else 0,
        begun=tuple(begun),
    )
