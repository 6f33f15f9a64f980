"""Recorded requests, read from receipts: what came when, where it went, what it shared, how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from statistics import median

from kvproxy.receipts.files import ReceiptReader
from kvproxy.receipts.forecast import matched_tokens
from kvproxy.receipts.prefixes import decode_prefixes
from kvproxy.receipts.receipt import Receipt
from kvproxy.types import EndpointId, RequestKind

#: The latest receipts that are looked at: hours of most fleets, and 100 MB of memory.
MAX_RECEIPTS = 20_000
#: More tokens of a prompt or an answer are a mistake of the engine's: the recording is worth nothing with them.
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
    predicted_tokens: int  # that the endpoint was believed to hold
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

    def on(self, endpoint: EndpointId) -> list[RecordedRequest]:
        """Those that one endpoint answered."""
        return [one for one in self.requests if one.endpoint == endpoint]


def read_traffic(reading: ReceiptReader) -> list[Traffic]:
    """The latest receipts by pool, the pool with most requests first. FileNotFoundError when there is no such file."""
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
