"""The plan of one request: where its prompt is computed and where it is answered, by the expected first token. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
#: Share of the time at the decoder within which one that answers, too, is to prefill: its own prompts come behind, and
#: the decoder gets others meanwhile.
_SOONER = 0.85


def pull_s(tokens: int, s_per_token: float) -> float:
    """Return the expected time to pull so many."""
    return tokens * s_per_token + LATENCY_S


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
    pull_s: float
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
    s_per_token: Callable[[EndpointT], float],
    all_requests: bool = False,
) -> Sequence[Plan[EndpointT]]:
    """Return the prefills elsewhere that give the first token earlier than the decoder alone, the earliest first; with
    `all_requests` those that give it later, too.

    `stall` is the policy's price of a prefill that delays what decodes beside it, `decode_wait_s` the wait for the
    decoder without this request, `s_per_token` the time of a pull from each. Without learned speeds the least busy
    endpoint prefills.
    """
    missing = facts.prompt_tokens - facts.matched_tokens(decode.id)
    if speeds is None:
        idlest = sorted(prefillers, key=lambda one: one.load.in_flight)
        return [Plan(one, missing, 0.0, 0.0, 0.0) for one in idlest]
    local_s = decode_wait_s + compute_s(facts, decode, speeds, now, stall=stall)
    plans = []
    for one in prefillers:
        prefilled_s = wait_s(one, speeds, now) + compute_s(facts, one, speeds, now, stall=stall)
        transfer_s = pull_s(missing, s_per_token(one))
        expected_s = max(prefilled_s, decode_wait_s) + transfer_s
        least_s = local_s if one.role is EndpointRole.PREFILL else _SOONER * local_s
        if all_requests or expected_s < least_s:
            plans.append(Plan(one, missing, transfer_s, expected_s, local_s))
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


def split_of_pulled(facts: OverlapFacts, pulled_s: float) -> PromptSplit:
    """Return the work that the decoder has with a prompt that it pulls in this time."""
    return PromptSplit(0, facts.prompt_tokens, onboarding_s=pulled_s)
