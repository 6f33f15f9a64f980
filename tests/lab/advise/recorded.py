"""Receipts of a fleet that never was: a trace played in virtual time, as the proxy would have recorded it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import Overlap
from kvproxy.cluster.routing.work import NO_WORK, Features, features_of, sum_of
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.results import ReplayOutcome
from kvproxy.lab.replay.settings import Pace, ReplayFleet
from kvproxy.lab.replay.trace import Trace, TraceSession, Turn
from kvproxy.operate.receipts.receipt import Attempt, Receipt, ReceiptCandidate, encode_prefixes, encode_receipt

#: When recorded traffic began, seconds since 1970.
BEGAN = 1_800_000_000.0
KEY = b"k" * 16


@dataclass(frozen=True)
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

    def trace(self) -> Trace:
        """Of blocks of `block_size`."""
        rng = Random(1)
        fresh, now, sessions = 1000, 0.0, []
        for number in range(self.sessions):
            now += rng.expovariate(self.rate)
            is_long = bool(self.long_every) and number % self.long_every == 0
            system = [] if is_long else range(number % 3 * 100, number % 3 * 100 + self.system_blocks)
            blocks, turns = array("Q", system), []
            for turn in range(1 if is_long else self.turns):
                grow = 40 * self.turn_blocks if is_long else self.turn_blocks
                blocks = blocks + array("Q", range(fresh, fresh + grow))
                fresh += grow
                delay_s = rng.uniform(1.0, 6.0) if turn else 0.0
                turns.append(Turn(delay_s, len(blocks) * self.block_size + 9, self.output_tokens, blocks))
            sessions.append(TraceSession(now, tuple(turns)))
        return Trace("chats", self.block_size, tuple(sessions))


def record(path: Path, trace: Trace, fleet: ReplayFleet, *, policy: str = "kv_aware", **changes: Any) -> list[Receipt]:
    """Play the trace on the fleet and write its receipts. `changes` are fields of each receipt."""
    spec = PolicySpec.parse(policy)
    outcomes = play_policy(trace, Pace(), fleet, spec.make(rng=Random(7)), spec, seed=7)
    receipts = [
        msgspec.structs.replace(one, **changes) for one in compose_receipts(trace, outcomes, fleet, str(spec.name))
    ]
    path.write_bytes(b"".join(encode_receipt(one) for one in receipts))
    return receipts


def compose_receipts(trace: Trace, outcomes: Sequence[ReplayOutcome], fleet: ReplayFleet, policy: str) -> list[Receipt]:
    """As the proxy would have written them, in the order of their ends."""
    ids = [EndpointId(f"e{index}") for index in range(fleet.instances)]
    turns = {session: iter(each.turns) for session, each in enumerate(trace.sessions)}
    by_engine: list[list[ReplayOutcome]] = [[] for _ in ids]
    found = []
    for number, outcome in enumerate(outcomes):
        turn = next(turns[outcome.session])
        assert outcome.first_token_at is not None
        assert outcome.finished_at is not None
        busy, elapsed_s, in_flight = _pending(by_engine[outcome.endpoint], outcome.arrived_at)
        by_engine[outcome.endpoint].append(outcome)
        chosen = ids[outcome.endpoint]
        candidates = tuple(
            ReceiptCandidate(
                one, in_flight if one == chosen else 0, int(busy[0]) if one == chosen else 0,
                work=busy if one == chosen else NO_WORK, elapsed_s=elapsed_s if one == chosen else 0.0,
            )
            for one in ids
        )  # fmt: skip
        found.append(
            Receipt(
                time=datetime.fromtimestamp(BEGAN + outcome.finished_at, UTC).isoformat(timespec="microseconds"),
                request_id=f"r{number}", end="completed", duration_s=outcome.finished_at - outcome.arrived_at,
                kind="chat", model="m", session=f"s{outcome.session}", stream=True, cluster="default",
                prompt_tokens=turn.prompt_tokens, prompt_blocks=len(turn.blocks), block_tokens=float(trace.block_size),
                prefixes=encode_prefixes(turn.blocks, key=KEY), facts={chosen: Overlap(outcome.predicted_tokens)},
                attempts=(Attempt(0.0, chosen, policy, "load", candidates),), endpoint=chosen, status=200,
                ttft_s=outcome.ttft_s, engine_prompt_tokens=turn.prompt_tokens, cached_tokens=outcome.cached_tokens,
                completion_tokens=turn.output_tokens,
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: one.time)


def _pending(earlier: Sequence[ReplayOutcome], now: float) -> tuple[Features, float, int]:
    """Prefill work at an engine, seconds since its latest first token, and requests there."""
    here = [one for one in earlier if one.finished_at is not None and one.finished_at > now]
    pending = [one for one in here if one.first_token_at is not None and one.first_token_at > now]
    work = NO_WORK
    for one in pending:
        work = sum_of(work, features_of(one.prompt_tokens - one.cached_tokens, one.cached_tokens))
    began = min((one.arrived_at for one in pending), default=now)
    latest = max(
        (one.first_token_at for one in earlier if one.first_token_at and one.first_token_at <= now), default=0.0
    )
    return work, now - max(began, latest), len(here)
