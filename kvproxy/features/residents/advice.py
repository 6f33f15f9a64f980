"""Advice by receipts: how far the contexts of sessions exceed the engines' KV memory, in which hours, and what that
takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from statistics import fmean
from typing import NamedTuple

from kvproxy.features.residents.admission import ADMIT_BELOW
from kvproxy.features.residents.habits import HORIZON_S
from kvproxy.features.residents.note import NOTE, SessionTurn
from kvproxy.operate.receipts.receipt import Receipt, decode_prefixes, note_of

#: Share of a prompt with which another one begins that is its session's next turn.
_GOES_ON = 0.6
#: Looks at what is in memory: a minute apart, or so many in all.
_EVERY_S = 60.0
_LOOKS = 500
_HOUR_S = 3600.0


class _Context(NamedTuple):
    """A prompt and its answer, from arrival to the session's next turn or, if none came in time, to the end."""

    began_at: float
    until: float
    blocks: int
    block_tokens: float
    answer_tokens: int
    names: Sequence[tuple[int, bytes]]  # of its prefixes with their depths in blocks, the longest first


def advise_memory(receipts: Sequence[Receipt], memory_tokens: Sequence[int]) -> Iterator[str]:
    """Yield a sentence if the contexts exceed the memory of the engines in some hours."""
    total = sum(memory_tokens)
    needed = _by_hour(_find_contexts(receipts)) if total else {}
    crowded = {hour: tokens for hour, tokens in needed.items() if tokens > ADMIT_BELOW * total}
    if not crowded:
        return
    most = max(crowded.values())
    engines = max(1, math.ceil(most / ADMIT_BELOW / total * len(memory_tokens)) - len(memory_tokens))
    more = "a further engine" if engines == 1 else f"{engines} further engines"
    text = (
        f"contexts of sessions need {most / total:.1f} times the KV memory {_name_hours(sorted(crowded))} h UTC "
        f"({most:,.0f} tokens; there are {total:,}): {more} like these"
    )
    waits_s = sorted(_room_waits(receipts, set(crowded)))
    if waits_s:
        text += f"; until then 9 of 10 waits for room take up to {waits_s[int(0.9 * (len(waits_s) - 1))]:.0f} s"
    yield text


def _find_contexts(receipts: Sequence[Receipt]) -> list[_Context]:
    """Return the contexts of all prompts whose prefixes are recorded."""
    spans = sorted(((*_span(one), one) for one in receipts), key=lambda span: -span[0])
    came: dict[bytes, float] = {}  # by name of a prefix, when the next prompt came that begins with it
    found = []
    for began_at, ended_at, one in spans:
        names = decode_prefixes(one.prompt_blocks, one.prefixes)[::-1] if one.prefixes else ()
        if not names:
            continue
        again = min(
            (came[name] for depth, name in names if name in came and depth >= _GOES_ON * one.prompt_blocks),
            default=math.inf,
        )
        until = again if ended_at <= again <= ended_at + HORIZON_S else ended_at
        tokens = one.engine_prompt_tokens or one.prompt_tokens or 0
        answer = one.completion_tokens or 0
        found.append(_Context(began_at, until, one.prompt_blocks, tokens / one.prompt_blocks, answer, names))
        came.update((name, began_at) for _, name in names)
    return found


def _span(receipt: Receipt) -> tuple[float, float]:
    """Return when a request came and ended; never for a time that cannot be read."""
    try:
        ended_at = datetime.fromisoformat(receipt.time).timestamp()
    except ValueError:
        return -math.inf, -math.inf
    return ended_at - receipt.duration_s, ended_at


def _by_hour(contexts: Sequence[_Context]) -> Mapping[int, float]:
    """Return the tokens that contexts took, on average over each hour of the day in which any did."""
    contexts = [one for one in contexts if one.until > -math.inf]
    if not contexts:
        return {}
    first = min(one.began_at for one in contexts)
    last = max(one.until for one in contexts)
    looks = max(1, min(_LOOKS, math.ceil((last - first) / _EVERY_S)))
    seen: dict[int, list[float]] = {}
    for number in range(looks):
        at = first + (number + 0.5) * (last - first) / looks
        tokens = _count_tokens([one for one in contexts if one.began_at <= at <= one.until])
        seen.setdefault(int(at // _HOUR_S) % 24, []).append(tokens)
    return {hour: fmean(each) for hour, each in seen.items()}


def _count_tokens(contexts: Sequence[_Context]) -> float:
    """Return the tokens of contexts, shared prefixes once."""
    known: set[bytes] = set()
    total = 0.0
    for one in sorted(contexts, key=lambda each: -each.blocks):
        shared = next((depth for depth, name in one.names if name in known), 0)
        total += (one.blocks - shared) * one.block_tokens + one.answer_tokens
        known.update(name for _, name in one.names)
    return total


def _name_hours(hours: Sequence[int]) -> str:
    """Return `from 9 to 12 and 14 to 17` for people."""
    runs: list[list[int]] = []
    for hour in hours:
        if runs and runs[-1][1] == hour:
            runs[-1][1] = hour + 1
        else:
            runs.append([hour, hour + 1])
    return "from " + " and ".join(f"{first} to {end}" for first, end in runs)


def _room_waits(receipts: Sequence[Receipt], hours: set[int]) -> Iterator[float]:
    """Yield the waits for room of sessions in these hours of the day."""
    for one in receipts:
        turn = note_of(one, NOTE, SessionTurn)
        if turn is None or not turn.room_wait_s:
            continue
        began_at, _ = _span(one)
        if began_at > -math.inf and int(began_at // _HOUR_S) % 24 in hours:
            yield turn.room_wait_s
