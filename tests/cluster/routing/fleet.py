"""Candidates whose loads a test arranges by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.load import EndpointLoad, Reservation, count_live_blocks
from kvproxy.cluster.routing.policy import Candidate, Choice, Overlap, OverlapFacts, PickRequest, Policy


@dataclass
class FakeCandidate:
    """An endpoint that passed screening."""

    id: EndpointId
    weight: float = 1.0
    load: EndpointLoad = field(default_factory=EndpointLoad)


def fleet(count: int) -> list[FakeCandidate]:
    """Idle endpoints e0, e1, ..."""
    return [FakeCandidate(EndpointId(f"e{index}")) for index in range(count)]


def ask(
    prompt_tokens: int, held: Mapping[str, int | Overlap] = {}, *, hot: int = 0, blocks: Sequence[int] = ()
) -> PickRequest:
    """Return a request whose leading tokens are held as given; a number means device memory. `blocks`: of 16 tokens
    each."""
    overlaps = {
        EndpointId(name): tokens if isinstance(tokens, Overlap) else Overlap(device_tokens=tokens)
        for name, tokens in held.items()
    }
    facts = OverlapFacts(prompt_tokens, overlaps, hot_tokens=hot, blocks=blocks, block_tokens=16.0)
    return PickRequest(facts=facts)


def place(policy: Policy, request: PickRequest, candidates: Sequence[Candidate], now: float = 0.0) -> Choice:
    """Choose and record the placement; the loads stay as they are."""
    choice = policy.choose(request, candidates, now)
    policy.placed(request, candidates, choice.index, now, choice=choice)
    return choice


def live(candidate: FakeCandidate, blocks: Sequence[int], *, pending: int = 0, times: int = 1) -> None:
    """Put requests in flight with these prompt blocks, `pending` tokens of each still to prefill; live blocks are
    counted there from now on."""
    count_live_blocks(candidate.load, True)
    for _ in range(times):
        reservation = candidate.load.reserve(pending, 0, 0.0, blocks=blocks)
        if not pending:
            candidate.load.first_token(reservation, 0.0)


def occupy(candidate: FakeCandidate, *, uncached: int = 0, cached: int = 0, times: int = 1) -> list[Reservation]:
    """Put requests in flight without a first token, placed at 0 s."""
    return [candidate.load.reserve(uncached, cached, 0.0) for _ in range(times)]


def decode(candidate: FakeCandidate, *, tokens: int, times: int = 1) -> None:
    """Put requests in flight that have their first token."""
    for _ in range(times):
        candidate.load.first_token(candidate.load.reserve(tokens, 0, 0.0), 0.0)
