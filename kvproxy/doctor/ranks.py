"""Requests of one token to each data-parallel rank of an engine, and to one that there is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvproxy.doctor.trial import TrialTarget, send_small
from kvproxy.errors import Refused
from kvproxy.forward.headers import RANK_HEADER

#: So many ranks are tried of one engine: the first ones.
MAX_TRIED = 16
_BAD_REQUEST = 400
_BEYOND = 1000


@dataclass(frozen=True, slots=True)
class RankAnswers:
    """`taken`: the number by which it knows each rank; `reads`: whether it refuses a rank that there is not."""

    taken: dict[int, int]
    refused: tuple[int, ...]
    reads: bool


async def try_ranks(target: TrialTarget, ranks: Sequence[int]) -> RankAnswers:
    """Raises ClientError when the engine does not answer without a rank either."""
    chat = await send_small(target)
    tried = sorted(ranks)[:MAX_TRIED]
    first = tried[0] if tried[0] and not await _takes(target, tried[0], chat=chat) else 0  # it may count its own from 0
    taken, refused = {}, []
    for rank in tried:
        if await _takes(target, rank - first, chat=chat):
            taken[rank] = rank - first
        else:
            refused.append(rank)
    return RankAnswers(taken, tuple(refused), not await _takes(target, tried[-1] + _BEYOND, chat=chat))


def asking_for(target: TrialTarget, number: int) -> TrialTarget:
    """The same engine, by the rank of this number."""
    return replace(target, api=target.api.with_header(RANK_HEADER.decode(), str(number)))


async def _takes(target: TrialTarget, number: int, *, chat: bool) -> bool:
    try:
        await send_small(asking_for(target, number), chat=chat)
    except Refused as error:
        if error.status != _BAD_REQUEST:
            raise
        return False
    return True
