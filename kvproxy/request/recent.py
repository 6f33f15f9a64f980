"""The last requests the router finished, and how many went where: what status pages and samplers read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TypeAlias

from kvproxy.request.exchange import MAX_REMEMBERED, Exchange, Outcome, result_of
from kvproxy.request.observer import RequestObserver
from kvproxy.routing.policy import NO_FACTS, OverlapFacts
from kvproxy.types import EndpointId


@dataclass(frozen=True, slots=True)
class Decision:
    """One finished request."""

    number: int  # of the requests finished since the start, counted from 1
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
        """Of the prompt's tokens, what the endpoint that served was believed to hold."""
        endpoint = self.outcome.endpoint
        return 0 if endpoint is None else self.facts.matched_tokens(endpoint)

    @property
    def result(self) -> str:
        """What became of it, one of RESULTS."""
        return result_of(self.outcome.end, self.outcome.status)


#: A decision as it is kept, in the order of the fields above but without its number, and with when the request came in
#: place of its duration: a tuple costs a fraction of an object. No prompt text, and nothing that keeps a body alive.
_Kept: TypeAlias = tuple[float, float, str, str, str, bool, OverlapFacts, Outcome]

#: Cluster, endpoint (None: none was reached) and result, with the number of requests.
Tally = dict[tuple[str, EndpointId | None, str], int]


class RecentDecisions(RequestObserver):
    """Bounded in requests. `finished` is called once a request and costs about a microsecond."""

    def __init__(self, limit: int = 1000) -> None:
        self._kept: deque[_Kept] = deque(maxlen=limit)
        self._tally: Tally = {}
        self._recorded = 0

    def __len__(self) -> int:
        return len(self._kept)

    def finished(self, exchange: Exchange, now: float) -> None:
        """The request is over."""
        outcome, inference, facts = exchange.outcome, exchange.inference, exchange.facts
        facts, endpoint = facts or NO_FACTS, outcome.endpoint
        if len(facts.by_endpoint) > MAX_REMEMBERED:
            held = None if endpoint is None else facts.by_endpoint.get(endpoint)
            facts = OverlapFacts(facts.prompt_tokens, {} if endpoint is None or held is None else {endpoint: held})
        model, streamed = ("", False) if inference is None else (inference.model, inference.stream)
        self._kept.append(
            (now, exchange.received_at, exchange.request_id, exchange.tenant, model, streamed, facts, outcome)
        )
        self._recorded += 1
        key = (outcome.cluster, endpoint, result_of(outcome.end, outcome.status))
        tally = self._tally
        tally[key] = tally.get(key, 0) + 1

    def latest(self) -> Iterator[Decision]:
        """The newest first."""
        return map(_decision, count(self._recorded, -1), reversed(self._kept))

    def numbered(self, number: int) -> Decision | None:
        """The decision of this number; None when it is not kept any more, or not there yet."""
        index = number - self._recorded - 1
        return _decision(number, self._kept[index]) if -len(self._kept) <= index < 0 else None

    def ttfts_since(self, moment: float) -> list[float]:
        """Seconds to the first byte of the streamed answers that ended after `moment`. The first byte of an answer that
        is not streamed is its end: another figure."""
        recent = takewhile(lambda kept: kept[0] > moment, reversed(self._kept))
        return [ttft_s for kept in recent if kept[5] and (ttft_s := kept[7].ttft_s) is not None]

    def take_tally(self) -> Tally:
        """Requests since the last call, all of them: more than are kept here, maybe. What records must also take."""
        tally, self._tally = self._tally, {}
        return tally


def _decision(number: int, kept: _Kept) -> Decision:
    ended_at, received_at, request_id, tenant, model, streamed, facts, outcome = kept
    duration_s = ended_at - received_at
    return Decision(number, ended_at, duration_s, request_id, tenant, model, streamed, facts, outcome)
