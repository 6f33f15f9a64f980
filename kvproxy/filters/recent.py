"""The last requests the router finished, and how many went where: what status pages and samplers read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from kvproxy.balancing.policy import Overlap
from kvproxy.filters.exchange import Exchange, Outcome
from kvproxy.types import EndpointId


@dataclass(frozen=True, slots=True)
class Decision:
    """One finished request."""

    ended_at: float  # on the proxy's clock
    duration_s: float
    request_id: str
    tenant: str
    model: str
    prompt_tokens: int  # as known before the pick; 0: unknown
    matched_tokens: int  # of these, what the endpoint that served was believed to hold
    outcome: Outcome


#: A decision as it is kept, in the order of the fields above but for when the request came in place of its duration and
#: the overlap in place of its tokens: a tuple costs a fraction of an object. No prompt text, and nothing that keeps a
#: body alive.
_Kept: TypeAlias = tuple[float, float, str, str, str, int, Overlap | None, Outcome]

#: Cluster, endpoint (None: none was reached) and end, with the number of requests.
Tally = dict[tuple[str, EndpointId | None, str], int]


class RecentDecisions:
    """Bounded in requests. `record` is called once a request and costs about a microsecond."""

    def __init__(self, limit: int = 1000) -> None:
        self._kept: deque[_Kept] = deque(maxlen=limit)
        self._tally: Tally = {}

    def __len__(self) -> int:
        return len(self._kept)

    def record(self, exchange: Exchange, now: float) -> None:
        """The request is over."""
        outcome, inference, facts = exchange.outcome, exchange.inference, exchange.facts
        endpoint = outcome.endpoint
        prompt_tokens = 0 if facts is None else facts.prompt_tokens
        overlap = None if facts is None or endpoint is None else facts.by_endpoint.get(endpoint)
        model = "" if inference is None else inference.model
        self._kept.append(
            (now, exchange.received_at, exchange.request_id, exchange.tenant, model, prompt_tokens, overlap, outcome)
        )
        key = (outcome.cluster, endpoint, outcome.end)
        tally = self._tally
        tally[key] = tally.get(key, 0) + 1

    def latest(self) -> Iterator[Decision]:
        """The newest first."""
        return map(_decision, reversed(self._kept))

    def ttfts_since(self, moment: float) -> list[float]:
        """Seconds to the first byte of those that ended after `moment` and had one."""
        recent = takewhile(lambda kept: kept[0] > moment, reversed(self._kept))
        return [ttft_s for kept in recent if (ttft_s := kept[7].ttft_s) is not None]

    def take_tally(self) -> Tally:
        """Requests since the last call, all of them: more than are kept here, maybe. Whoever records must also take."""
        tally, self._tally = self._tally, {}
        return tally


def _decision(kept: _Kept) -> Decision:
    ended_at, received_at, request_id, tenant, model, prompt_tokens, overlap, outcome = kept
    matched = 0 if overlap is None else min(overlap.tokens, prompt_tokens)
    return Decision(ended_at, ended_at - received_at, request_id, tenant, model, prompt_tokens, matched, outcome)
