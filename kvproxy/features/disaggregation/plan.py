"""The plan of one request: where its prompt is computed and where it is answered, by the expected first token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvproxy.cluster.routing.costs import own_s, wait_s
from kvproxy.cluster.routing.kv_aware import MAX_STALLED
from kvproxy.cluster.routing.load import Reservation
from kvproxy.cluster.routing.policy import Candidate, OverlapFacts
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import PromptSplit, seconds_of
from kvproxy.cluster.settings import EndpointRole

#: Latency of a second request and of the handshake between the engines.
LATENCY_S = 0.005
#: Seconds to pull a token before the first pull: 6 GB/s where a token's KV is 128 KiB; and the least that is learned.
_PRIOR_S = 0.000_02
_LEAST_S = 0.000_001
#: Steps of the price after a pull that took longer than expected, or not: a quarter of all pulls are faster than it.
_UP = 1.1
_DOWN = 0.7


class PullPrice:
    """Seconds to pull a token's KV, learned from the first tokens of decoders: of the fast ones, since what came to a
    decoder meanwhile makes others late."""

    def __init__(self) -> None:
        self.s_per_token = _PRIOR_S

    def observe(self, tokens: int, took_s: float) -> None:
        """Learn from a decoder's first token, `took_s` after the decoder was to be free."""
        late = took_s > self.pull_s(tokens)
        self.s_per_token = max(_LEAST_S, self.s_per_token * (_UP if late else _DOWN))

    def pull_s(self, tokens: int) -> float:
        """Return the expected time to pull so many."""
        return tokens * self.s_per_token + LATENCY_S


class RoledEndpoint(Candidate, Protocol):
    """An endpoint that may prefill for others, or answer with what others prefill."""

    @property
    def role(self) -> EndpointRole: ...


EndpointT = TypeVar("EndpointT", bound=RoledEndpoint)


@dataclass(frozen=True, slots=True)
class Plan(Generic[EndpointT]):
    """Prefill at `prefill`; seconds until the first token by it, and at the decoder alone."""

    prefill: EndpointT
    pulled_tokens: int
    expected_s: float
    local_s: float


def choose_plan(
    facts: OverlapFacts,
    decode: EndpointT,
    prefillers: Sequence[EndpointT],
    speeds: SpeedModel | None,
    now: float,
    *,
    stall: float,
    decode_wait_s: float,
    price: PullPrice,
    all_requests: bool = False,
) -> Sequence[Plan[EndpointT]]:
    """Return the prefills elsewhere that give the first token earlier than the decoder alone, the earliest first; with
    `all_requests` those that give it later, too.

    `stall` is the policy's price of a prefill that delays what decodes beside it, `decode_wait_s` the wait for the
    decoder without this request. Without learned speeds the least busy endpoint prefills.
    """
    missing = facts.prompt_tokens - facts.matched_tokens(decode.id)
    if speeds is None:
        idlest = sorted(prefillers, key=lambda one: one.load.in_flight)
        return [Plan(one, missing, 0.0, 0.0) for one in idlest]
    local_s = decode_wait_s + compute_s(facts, decode, speeds, now, stall=stall)
    transfer_s = price.pull_s(missing)
    plans = []
    for one in prefillers:
        prefilled_s = wait_s(one, speeds, now) + compute_s(facts, one, speeds, now, stall=stall)
        expected_s = max(prefilled_s, decode_wait_s) + transfer_s
        if all_requests or expected_s < local_s:
            plans.append(Plan(one, missing, expected_s, local_s))
    return sorted(plans, key=lambda plan: plan.expected_s)


def wait_before(reservation: Reservation, decode: Candidate, speeds: SpeedModel, now: float) -> float:
    """Return the wait at the decoder without this request, which is counted in already."""
    own_s = speeds.slowness(decode.id, now) * seconds_of(reservation.features, speeds.seconds)
    return max(0.0, wait_s(decode, speeds, now) - own_s)


def compute_s(facts: OverlapFacts, endpoint: RoledEndpoint, speeds: SpeedModel, now: float, *, stall: float) -> float:
    """Seconds of the prompt's prefill, with what it delays of the answers there."""
    own = own_s(facts, endpoint.id, speeds)
    decoding = 0 if endpoint.role is EndpointRole.PREFILL else endpoint.load.in_flight - endpoint.load.pending_requests
    return own * (speeds.slowness(endpoint.id, now) + stall * max(0, min(MAX_STALLED, decoding)))


def split_of_pulled(facts: OverlapFacts, decode: Candidate, price: PullPrice) -> PromptSplit:
    """Return the work that the decoder has with a prompt that it pulls."""
    missing = facts.prompt_tokens - facts.matched_tokens(decode.id)
    return PromptSplit(0, facts.prompt_tokens, onboarding_s=price.pull_s(missing))
