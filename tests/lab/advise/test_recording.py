"""A trace made of receipts is the traffic that was recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvproxy.lab.advise import simulate
from kvproxy.lab.advise.today import make_trace
from kvproxy.lab.advise.traffic import Traffic, read_traffic
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.operate.receipts.files import ReceiptReader
from kvproxy.operate.receipts.receipt import encode_receipt
from tests.lab.advise.recorded import Chats, record

FLEET = ReplayFleet(instances=2, capacity_tokens=400_000)


def recorded(path: Path, chats: Chats) -> Traffic:
    """Through the file."""
    record(path, chats.trace(), FLEET)
    (traffic,) = read_traffic(ReceiptReader(path))
    return traffic


def test_sessions_lengths_and_shared_prefixes_come_back(tmp_path: Path) -> None:
    """As they were played: turns, tokens, and nearly all of what prompts share."""
    played = Chats(sessions=60, turns=4).trace()
    traffic = recorded(tmp_path / "r.jsonl", Chats(sessions=60, turns=4))
    trace = make_trace(traffic, traffic.requests)
    assert [len(one.turns) for one in trace.sessions] == [len(one.turns) for one in played.sessions]
    tokens = [turn.prompt_tokens for one in played.sessions for turn in one.turns]
    assert sorted(turn.prompt_tokens for one in trace.sessions for turn in one.turns) == sorted(tokens)
    assert 0.9 * played.hit_ceiling() < trace.hit_ceiling() <= played.hit_ceiling() + 0.01
    delays = [turn.delay_s for one in trace.sessions for turn in one.turns[1:]]
    assert all(0.9 < delay_s < 6.1 for delay_s in delays)


def test_turns_that_overlap_did_not_wait_for_each_other(tmp_path: Path) -> None:
    """Two requests of one session at once are two sessions of the trace; so are those without a key."""
    traffic = recorded(tmp_path / "r.jsonl", Chats(sessions=3, turns=2))
    first = traffic.requests[0]
    twice = (first, replace(first, arrived_at=first.arrived_at + 0.001))
    assert len(make_trace(traffic, twice).sessions) == 2
    unknown = tuple(replace(one, session="") for one in traffic.requests)
    assert len(make_trace(traffic, unknown).sessions) == len(unknown)


def test_prompts_without_hashes_share_nothing(tmp_path: Path) -> None:
    """Nothing is made up."""
    traffic = recorded(tmp_path / "r.jsonl", Chats(sessions=10, turns=2))
    bare = [replace(one, prefixes=(), prompt_blocks=0) for one in traffic.requests]
    assert make_trace(traffic, bare).hit_ceiling() == 0.0


def test_a_count_beyond_all_reason_is_no_traffic(tmp_path: Path) -> None:
    """An engine's mistake: its blocks alone would be gigabytes, and its tokens days of simulated steps."""
    file = tmp_path / "r.jsonl"
    receipts = record(file, Chats(sessions=10, turns=2).trace(), FLEET)
    odd = [{"engine_prompt_tokens": 2**31}, {"completion_tokens": 2**31}]
    changed = [msgspec.structs.replace(receipts[0], **each) for each in odd]
    file.write_bytes(b"".join(encode_receipt(one) for one in [*receipts, *changed]))
    (traffic,) = read_traffic(ReceiptReader(file))
    assert len(traffic.requests) == len(receipts)


def test_only_so_many_tokens_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest: a trace of a million blocks a request would not fit into memory."""
    traffic = recorded(tmp_path / "r.jsonl", Chats(sessions=10, turns=2))
    tokens = [one.prompt_tokens for one in traffic.requests]
    monkeypatch.setattr(simulate, "_MAX_TOKENS", sum(tokens[-3:]))
    assert simulate._latest(traffic.requests) == traffic.requests[-3:]
