"""The latest requests: the observer that keeps them, and counts results and failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TypeAlias

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import NO_FACTS, OverlapFacts
from kvproxy.proxy.request.exchange import MAX_REMEMBERED, Exchange, Outcome, result_of
from kvproxy.proxy.request.observer import RequestObserver

#: A request as kept, in the order of the fields above but without its number, and with its arrival in place of its
#: duration: a tuple costs a fraction of an object. No prompt text, and nothing that keeps a body alive.
_Kept: TypeAlias = tuple[float, float, str, str, str, bool, OverlapFacts, Outcome]
#: Cluster, endpoint (None: not reached) and result, with the number of requests.
Tally = dict[tuple[str, EndpointId | None, str], int]
#: Cluster, endpoint (None: not reached) and cause of failure, with the number of requests.
FailureTally = dict[tuple[str, EndpointId | None, str], int]


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One finished request."""

    number: int  # number of the finished request since the start, from 1
    ended_at: float  # on the proxy's clock
    duration_s: float
    request_id: str
    tenant: str
    model: str
    streamed: bool
    facts: OverlapFacts  # at the last pick; of a fleet of more than MAX_REMEMBERED only what the endpoint held
    outcome: Outcome

    @property
    def prompt_tokens(self) -> int:
        """As known before the pick; 0: unknown."""
        return self.facts.prompt_tokens

    @property
    def matched_tokens(self) -> int:
        """Of the prompt's tokens, what the endpoint that served was estimated to hold."""
        endpoint = self.outcome.endpoint
        return 0 if endpoint is None else self.facts.matched_tokens(endpoint)

    @property
    def result(self) -> str:
        """Result of the request, one of RESULTS."""
        return result_of(self.outcome.end, self.outcome.status)


class RecentDecisions(RequestObserver):
    """Bounded in requests. `finished` is called once a request and costs about a microsecond."""

    def __init__(self, limit: int = 1000) -> None:
        self._kept: deque[_Kept] = deque(maxlen=limit)
        self._tally: Tally = {}
        self._failures: FailureTally = {}
        self._recorded = 0

    def __len__(self) -> int:
        return len(self._kept)

    def finished(self, exchange: Exchange, now: float) -> None:
        """Record the end of the request."""
        outcome = exchange.outcome
        inference = exchange.inference
        facts = exchange.facts
        facts = facts or NO_FACTS
        endpoint = outcome.endpoint
        if len(facts.by_endpoint) > MAX_REMEMBERED:
            held = None if endpoint is None else facts.by_endpoint.get(endpoint)
            by_endpoint = {} if endpoint is None or held is None else {endpoint: held}
            facts = OverlapFacts(facts.prompt_tokens, by_endpoint, searched=facts.searched)
        model, streamed = ("", False) if inference is None else (inference.model, inference.stream)
        self._kept.append(
            (now, exchange.received_at, exchange.request_id, exchange.tenant, model, streamed, facts, outcome)
        )
        self._recorded += 1
        result = "ok"
        if outcome.status >= 400 or outcome.end != "completed":
            result = result_of(outcome.end, outcome.status)
            self._count_failure(outcome)
        key = (outcome.cluster, endpoint, result)
        tally = self._tally
        tally[key] = tally.get(key, 0) + 1

    def _count_failure(self, outcome: Outcome) -> None:
        if cause := outcome.failure_cause():
            key = (outcome.cluster, outcome.endpoint, cause)
            self._failures[key] = self._failures.get(key, 0) + 1

    def latest(self) -> Iterator[RecentRequest]:
        """Yield the newest first."""
        return map(_recent_request, count(self._recorded, -1), reversed(self._kept))

    def numbered(self, number: int) -> RecentRequest | None:
        """Return the request of this number; None when it is not kept any more, or not there yet."""
        index = number - self._recorded - 1
        return _recent_request(number, self._kept[index]) if -len(self._kept) <= index < 0 else None

    def ttfts_since(self, moment: float) -> list[float]:
        """Seconds to the first byte of the streamed answers that ended after `moment`. The first byte of an answer that
        is not streamed is its end: another figure."""
        recent = takewhile(lambda kept: kept[0] > moment, reversed(self._kept))
        return [ttft_s for kept in recent if kept[5] and (ttft_s := kept[7].ttft_s) is not None]

    def ttfts_by_endpoint(self, moment: float) -> dict[tuple[str, EndpointId], list[float]]:
        """Return the same by cluster and endpoint."""
        found: dict[tuple[str, EndpointId], list[float]] = {}
        for kept in takewhile(lambda kept: kept[0] > moment, reversed(self._kept)):
            outcome = kept[7]
            if kept[5] and outcome.ttft_s is not None and outcome.endpoint is not None:
                found.setdefault((outcome.cluster, outcome.endpoint), []).append(outcome.ttft_s)
        return found

    def take_failures(self) -> FailureTally:
        """Return requests since the last call that were not served, by cause."""
        failures = self._failures
        self._failures = {}
        return failures

    def take_tally(self) -> Tally:
        """Return the tally of all requests since the last call, which may be more than are kept here. The caller must
        add it to its own."""
        tally = self._tally
        self._tally = {}
        return tally


def _recent_request(number: int, kept: _Kept) -> RecentRequest:
    ended_at, received_at, request_id, tenant, model, streamed, facts, outcome = kept
    duration_s = ended_at - received_at
    return RecentRequest(number, ended_at, duration_s, request_id, tenant, model, streamed, facts, outcome)
