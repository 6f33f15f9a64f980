"""The plan of one request: where its prompt is computed and where it is answered, by the expected first token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.base.types import Tier
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.costs import own_s, wait_s
from kvproxy.cluster.routing.kv_aware import MAX_STALLED
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import PromptSplit
from kvproxy.cluster.settings import EndpointRole

#: Latency of a second request and of the handshake between the engines.
LATENCY_S = 0.005


@dataclass(frozen=True, slots=True)
class Plan:
    """Prefill at `prefill`; seconds until the first token by it, and at the decoder alone."""

    prefill: Endpoint
    pulled_tokens: int
    expected_s: float
    local_s: float


def choose_plan(
    facts: OverlapFacts,
    decode: Endpoint,
    prefillers: Sequence[Endpoint],
    speeds: SpeedModel | None,
    now: float,
    *,
    stall: float,
    decode_wait_s: float,
) -> Sequence[Plan]:
    """Return the prefills elsewhere that give the first token earlier than the decoder alone, the earliest first.

    `stall` is the policy's price of a prefill that delays what decodes beside it, `decode_wait_s` the wait for the
    decoder without this request. Without learned speeds the least busy endpoint prefills.
    """
    missing = facts.prompt_tokens - facts.matched_tokens(decode.id)
    if speeds is None:
        idlest = sorted(prefillers, key=lambda one: one.load.in_flight)
        return [Plan(one, missing, 0.0, 0.0) for one in idlest]
    local_s = decode_wait_s + compute_s(facts, decode, speeds, now, stall=stall)
    transfer_s = pull_s(missing, decode, speeds) + LATENCY_S
    plans = []
    for one in prefillers:
        prefilled_s = wait_s(one, speeds, now) + compute_s(facts, one, speeds, now, stall=stall)
        expected_s = max(prefilled_s, decode_wait_s) + transfer_s
        if expected_s < local_s:
            plans.append(Plan(one, missing, expected_s, local_s))
    return sorted(plans, key=lambda plan: plan.expected_s)


def compute_s(facts: OverlapFacts, endpoint: Endpoint, speeds: SpeedModel, now: float, *, stall: float) -> float:
    """Seconds of the prompt's prefill, with what it delays of the answers there."""
    own = own_s(facts, endpoint.id, speeds)
    decoding = 0 if endpoint.role is EndpointRole.PREFILL else endpoint.load.in_flight - endpoint.load.pending_requests
    return own * (speeds.slowness(endpoint.id, now) + stall * max(0, min(MAX_STALLED, decoding)))


def pull_s(tokens: int, decode: Endpoint, speeds: SpeedModel) -> float:
    """Seconds to pull so many tokens, as learned from first tokens at the decoder."""
    return speeds.onboarding_s(decode.id, ((Tier.SHARED, tokens),))


def split_of_pulled(facts: OverlapFacts, decode: Endpoint, speeds: SpeedModel | None) -> PromptSplit:
    """Return the work that the decoder has with a prompt that it pulls."""
    missing = facts.prompt_tokens - facts.matched_tokens(decode.id)
    pulled_s = 0.0 if speeds is None else pull_s(missing, decode, speeds)
    return PromptSplit(0, facts.prompt_tokens, ((Tier.SHARED, missing),), pulled_s)
