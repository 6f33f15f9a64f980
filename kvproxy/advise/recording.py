"""A trace for the replay, made of recorded requests: sessions, and blocks that are equal where prompts were.

A receipt names some of its prompt's prefixes by hashes. Going through the requests in order of arrival, a prompt's
blocks are those of the deepest prefix that an earlier prompt named too, and new ones from there on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count

from kvproxy.advise.traffic import RecordedRequest, Traffic
from kvproxy.replay.trace import Trace, TraceSession, Turn

#: Tokens of a trace's block: about as many as a text block has, so that nothing finer is known.
BLOCK_TOKENS = 64


def make_trace(traffic: Traffic, requests: Sequence[RecordedRequest], *, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """The trace of these requests of a pool, which are in order of arrival."""
    blocks = _shared_blocks(requests, block_tokens)
    first = requests[0].arrived_at
    usual = traffic.usual_output_tokens or 1
    sessions = []
    for members in _sessions(requests):
        turns, before = [], requests[members[0]].arrived_at
        for index in members:
            one = requests[index]
            turns.append(Turn(one.arrived_at - before, one.prompt_tokens, one.output_tokens or usual, blocks[index]))
            before = one.ended_at
        sessions.append(TraceSession(requests[members[0]].arrived_at - first, tuple(turns)))
    return Trace("recorded", block_tokens, tuple(sessions))


def _sessions(requests: Sequence[RecordedRequest]) -> list[list[int]]:
    """Indexes of the requests of each session, in order of their starts. Where a request came before the end of the
    one before it, or without a session key, a session of its own begins: nothing says that it waited for that."""
    sessions: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    for index, one in enumerate(requests):
        under_way = latest.get(one.session) if one.session else None
        if under_way is not None and requests[under_way[-1]].ended_at <= one.arrived_at:
            under_way.append(index)
        else:
            latest[one.session] = [index]
            sessions.append(latest[one.session])
    return sessions


def _shared_blocks(requests: Sequence[RecordedRequest], block_tokens: int) -> list[array[int]]:
    texts = sum(one.prompt_blocks for one in requests)
    known_tokens = sum(one.prompt_tokens for one in requests if one.prompt_blocks)
    blocks_per_text = known_tokens / texts / block_tokens if texts else 0.0
    fresh = count(1)
    named: dict[bytes, array[int]] = {}  # by a prefix's hash, the blocks of a prompt that begins with it
    found = []
    for one in requests:
        whole = one.prompt_tokens // block_tokens
        own: array[int] = array("Q")
        for depth, name in reversed(one.prefixes):
            if name in named:
                own = named[name][: min(whole, int(depth * blocks_per_text))]
                break
        own.extend(next(fresh) for _ in range(whole - len(own)))
        for _, name in one.prefixes:
            named.setdefault(name, own)
        found.append(own)
    return found
