"""Small traces for tests."""

from __future__ import annotations

import json
from random import Random

from kvproxy.lab.replay.trace import Trace, parse_trace


def lines(*rows: dict[str, object], block_size: int = 512) -> list[str]:
    """Return a trace file's lines."""
    return [json.dumps({"meta": {"block_size": block_size}}), *(json.dumps(row) for row in rows)]


def shared_prefix_trace(requests: int = 120, *, gap_ms: int = 150, seed: int = 1) -> Trace:
    """Open loop: a handful of long prefixes, each asked for again and again with a tail of its own."""
    rng = Random(seed)
    rows = [
        {
            "timestamp": number * gap_ms,
            "input_length": 6 * 512 + 200,
            "output_length": rng.randrange(10, 80),
            "hash_runs": [100 * rng.randrange(8), 5, 10_000 + number, 1],
        }
        for number in range(requests)
    ]
    return parse_trace(lines(*rows), name="shared_prefix")


def chat_trace(sessions: int = 12, turns: int = 4) -> Trace:
    """Return a closed loop of conversations that grow by two blocks a turn."""
    rows = []
    for session in range(sessions):
        for turn in range(turns):
            timing = {"timestamp": session * 2000} if turn == 0 else {"delay": 1500}
            blocks = 2 + 2 * turn
            rows.append(
                {**timing, "session_id": session, "input_length": blocks * 512 + 100, "output_length": 30,
                 "hash_runs": [0, 1, 1000 * (session + 1), blocks - 1]}
            )  # fmt: skip
    return parse_trace(lines(*rows), name="chat")


def agents(sessions: int = 10, turns: int = 6, *, gap_ms: int = 300, apart_ms: int = 10) -> Trace:
    """They begin one after the other, with a common prompt of two blocks, and grow by two blocks a turn."""
    rows = []
    for session in range(sessions):
        for turn in range(turns):
            timing = {"timestamp": apart_ms * session} if turn == 0 else {"delay": gap_ms}
            blocks = 4 + 2 * turn
            rows.append(
                {**timing, "session_id": session, "input_length": blocks * 64 + 10, "output_length": 20,
                 "hash_runs": [0, 2, 1000 * (session + 1), blocks - 2]}
            )  # fmt: skip
    return parse_trace(lines(*rows, block_size=64), name="agents")
