"""Receipts of a fleet that never was: a trace played in virtual time, as the proxy would have recorded it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from kvproxy.receipts.prefixes import encode_prefixes
from kvproxy.receipts.receipt import Attempt, Receipt, ReceiptCandidate, encode
from kvproxy.replay.results import ReplayOutcome
from kvproxy.replay.scenario import PolicySpec, play_policy
from kvproxy.replay.settings import Pace, ReplayFleet
from kvproxy.replay.trace import Trace, TraceSession, Turn
from kvproxy.routing.load import Features, features_of
from kvproxy.routing.policy import Overlap
from kvproxy.types import EndpointId

#: When recorded traffic began, seconds since 1970.
BEGAN = 1_800_000_000.0
KEY = b"k" * 16


@dataclass
class Chats:
    """Sessions of growing chats over a few system prompts, with some long unique prompts among them."""

    sessions: int = 120
    turns: int = 4
    rate: float = 1.0  # sessions a second
    system_blocks: int = 8
    turn_blocks: int = 6
    long_every: int = 0  # each so-manieth session is one long prompt
    output_tokens: int = 60
    block_size: int = 64
    rng: Random = field(default_factory=lambda: Random(1))

    def trace(self) -> Trace:
        """Of blocks of `block_size`."""
        fresh, now, sessions = 1000, 0.0, []
        for number in range(self.sessions):
            now += self.rng.expovariate(self.rate)
            is_long = bool(self.long_every) and number % self.long_every == 0
            system = [] if is_long else range(number % 3 * 100, number % 3 * 100 + self.system_blocks)
            blocks, turns = array("Q", system), []
            for turn in range(1 if is_long else self.turns):
                grow = 40 * self.turn_blocks if is_long else self.turn_blocks
                blocks = blocks + array("Q", range(fresh, fresh + grow))
                fresh += grow
                delay_s = self.rng.uniform(1.0, 6.0) if turn else 0.0
                turns.append(Turn(delay_s, len(blocks) * self.block_size + 9, self.output_tokens, blocks))
            sessions.append(TraceSession(now, tuple(turns)))
        return Trace("chats", self.block_size, tuple(sessions))


def record(path: Path, trace: Trace, fleet: ReplayFleet, *, policy: str = "kv_aware", **changes: object) -> list[Receipt]:
    """Play the trace on the fleet and write its receipts. `changes` are of each receipt."""
    spec = PolicySpec.parse(policy)
    outcomes = play_policy(trace, Pace(), fleet, spec.make(rng=Random(7)), queue=spec.queue, seed=7)
    turns = {len(turn.blocks): turn for session in trace.sessions for turn in session.turns}
    del turns
    receipts = [replace_all(each, changes) for each in _receipts(trace, outcomes, fleet.instances)]
    path.write_bytes(b"".join(encode(each) for each in receipts))
    return receipts
