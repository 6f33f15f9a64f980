"""Pairs of endpoints: which may carry a request in two legs, by what is known of each."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvproxy.cluster.endpoint import Endpoint

log = logging.getLogger("kvproxy.disaggregation")

#: Pause before a pair whose canary could not be sent is tried again.
RETRY_S = 5.0
MAX_PAIRS = 4096
#: Seconds to pull a token by a pair that was not measured: 6 GB/s where a token's KV is 128 KiB.
_PULL_S = 0.000_02


class PairState(StrEnum):
    """Finding of the canary; a metric label."""

    UNPROVEN = "unproven"
    GOOD = "good"
    WRONG = "wrong"  # another text than the decoder's own
    NO_EFFECT = "no_effect"  # the decoder computes the prompt again
    VERSIONS = "versions"  # the engines differ
    MODES = "modes"  # a server was started for another leg than its endpoint's role


#: States by which a pair is out until one of its engines is another process.
OUT = frozenset({PairState.WRONG, PairState.NO_EFFECT, PairState.VERSIONS, PairState.MODES})


@dataclass(slots=True)
class Pair:
    """An endpoint that prefills, one that decodes, and the model of the request that wanted them."""

    prefill: Endpoint
    decode: Endpoint
    model: str
    state: PairState = PairState.UNPROVEN
    why: str = ""
    due_at: float = -math.inf  # of its next canary
    s_per_token: float = _PULL_S  # of a pull, as its canary measures it


class Pairs:
    """Those of one cluster, made on first use."""

    def __init__(self) -> None:
        self._known: dict[tuple[Endpoint, Endpoint], Pair] = {}

    def __iter__(self) -> Iterator[Pair]:
        return iter(list(self._known.values()))

    def may_carry(self, prefill: Endpoint, decode: Endpoint, model: str) -> bool:
        """Return whether the pair was found good; an unknown one is to be examined."""
        pair = self._known.get((prefill, decode))
        if pair is None:
            if len(self._known) < MAX_PAIRS:
                self._known[prefill, decode] = Pair(prefill, decode, model)
            return False
        return pair.state is PairState.GOOD

    def is_out(self, prefill: Endpoint, decode: Endpoint) -> bool:
        """Return whether the pair was found bad."""
        pair = self._known.get((prefill, decode))
        return pair is not None and pair.state in OUT

    def s_per_token(self, prefill: Endpoint, decode: Endpoint) -> float:
        """Return the time of a pull by the pair."""
        pair = self._known.get((prefill, decode))
        return _PULL_S if pair is None else pair.s_per_token

    def find_due(self, now: float) -> Pair | None:
        """Return the pair whose canary is due for longest."""
        due = [pair for pair in self if pair.due_at <= now and pair.state not in OUT]
        return min(due, key=lambda pair: pair.due_at, default=None)

    def doubt(self, prefill: Endpoint, decode: Endpoint) -> None:
        """Use the pair no more before its next canary: its decoder refused a handle."""
        pair = self._known.get((prefill, decode))
        if pair is not None and pair.state is PairState.GOOD:
            pair.state = PairState.UNPROVEN
            pair.due_at = -math.inf

    def forget(self, endpoint: Endpoint) -> None:
        """Forget what was found about an endpoint, whose engine may be another process with other flags."""
        self._known = {pair: found for pair, found in self._known.items() if endpoint not in pair}

    def keep_only(self, endpoints: Collection[Endpoint]) -> None:
        """Forget pairs with an endpoint that left."""
        present = set(endpoints)
        self._known = {pair: found for pair, found in self._known.items() if present.issuperset(pair)}

    def count_states(self) -> Counter[PairState]:
        """Return the number of pairs by state."""
        return Counter(pair.state for pair in self)


def settle(pair: Pair, state: PairState, why: str, *, next_at: float) -> None:
    """Record what a canary found, loudly if the pair is out by it."""
    if state in OUT and pair.state is not state:
        log.error("%s -> %s are used as a pair no more: %s", pair.prefill.id, pair.decode.id, why)
    pair.state = state
    pair.why = why
    pair.due_at = next_at
