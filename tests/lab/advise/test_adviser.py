"""The adviser on recorded traffic: what it refuses to say, and the planted fault that it names."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.lab.advise.adviser import Adviser, PoolAdvice
from kvproxy.lab.advise.command import as_dict, print_text
from kvproxy.lab.advise.engines import EngineSettingsSeen
from kvproxy.lab.replay.settings import IndexMode, ReplayFleet
from kvproxy.operate.config.load import check_config
from kvproxy.operate.config.schema import Config
from kvproxy.operate.doctor.flags import Setting
from kvproxy.operate.receipts.receipt import decode_receipt, encode_receipt
from tests.lab.advise.recorded import BEGAN, Chats, record

FLEET = ReplayFleet(instances=2, capacity_tokens=200_000)
SLOTS = replace(FLEET, max_sequences=2)
CHATS = Chats(sessions=90, turns=3, rate=0.65, output_tokens=200)
NOW = BEGAN + 3600.0


def config(**changes: Any) -> Config:
    """Of two engines."""
    raw = {
        "endpoints": {"e0": "http://127.0.0.1:9000", "e1": "http://127.0.0.1:9001"},
        "policy": "kv_aware",
        "filters": ["inference_request", {"kvcache": {"kv_events": True}}, "router"],
        **changes,
    }
    found, problems = check_config(raw, env={})
    assert found is not None, problems
    return found


def engine(id_: str = "e0", **changes: Any) -> EngineSettingsSeen:
    """One that is well set up."""
    seen = EngineSettingsSeen(
        EndpointId(id_), "default", EngineKind.VLLM, version="0.32.0", capacity_tokens=FLEET.capacity_tokens,
        block_tokens=16, prefix_caching=True, publishes=True, replays=True, renders=True,
    )  # fmt: skip
    return replace(seen, **changes)


def both(**changes: Any) -> list[EngineSettingsSeen]:
    """Two engines alike."""
    return [engine("e0", **changes), engine("e1", **changes)]


def advise(
    path: Path | None, *, engines: Sequence[EngineSettingsSeen] | None = None, budget_s: float = 0.0, now: float = NOW,
    clock: Clock = lambda: 0.0, **changes: Any,
) -> tuple[list[PoolAdvice], str]:  # fmt: skip
    """Return the advice, and all of its text on one line. The clock of the budget stands still by default."""
    adviser = Adviser(
        config(**changes), both() if engines is None else engines, path, budget_s, now, io.StringIO(), clock
    )
    pools, out = adviser.advise(), io.StringIO()
    print_text(pools, adviser.notes, out, now=now, width=1000)
    json.dumps(as_dict(pools, adviser.notes, now=now))
    return pools, out.getvalue()


def flags(pool: PoolAdvice) -> set[str]:
    """Every flag that is advised."""
    return {flag for one in pool.advice for _, flag in one.flags}


@cache
def _lines(fleet: ReplayFleet) -> bytes:
    path = Path("/dev/null")
    return b"".join(encode_receipt(one) for one in record(path, CHATS.trace(), fleet))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Receipts of a fleet with nothing wrong."""
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(_lines(FLEET))
    return path


def test_without_receipts_only_the_engines_are_judged() -> None:
    """And what to do to have some is said."""
    (pool,), text = advise(None, engines=both(publishes=False))
    assert "no receipts: set `receipts.path`" in text
    assert [one.setting for one in pool.advice] == [Setting.KV_EVENTS]


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    """It is no error: what engines say is worth having without it."""
    _, text = advise(tmp_path / "none.jsonl", budget_s=5)
    assert "no receipts" in text
    assert "none.jsonl" in text


def test_too_few_requests_are_not_simulated(recorded: Path) -> None:
    """It is said how many there have to be."""
    recorded.write_bytes(b"".join(recorded.read_bytes().splitlines(keepends=True)[:50]))
    (pool,), text = advise(recorded, budget_s=5)
    assert pool.fit is None
    assert "50 answered requests" in text
    assert "at least 200 in 2 min are needed" in text


def test_a_line_that_is_no_receipt_is_passed_over(recorded: Path) -> None:
    """And counted."""
    recorded.write_bytes(b'{"cut off\n' + recorded.read_bytes() + b"\xff\n")
    (pool,), text = advise(recorded)
    assert "2 lines of the receipts cannot be read" in text
    assert pool.traffic is not None
    assert len(pool.traffic.requests) == CHATS.sessions * CHATS.turns


def test_tokens_of_media_are_reported_apart(recorded: Path) -> None:
    """Engines count them among the prompt's."""
    lines = [decode_receipt(line) for line in recorded.read_bytes().splitlines()]
    marked = [msgspec.structs.replace(one, engine_prompt_tokens=1000, engine_media_tokens=250) for one in lines]
    recorded.write_bytes(b"".join(map(encode_receipt, marked)))
    _, text = advise(recorded)
    assert "25% of their prompt tokens are those of pictures, audio or video" in text


def test_receipts_of_other_times_are_said_to_be_old(recorded: Path) -> None:
    """Nothing says that the traffic is still the same."""
    _, text = advise(recorded, now=NOW + 9 * 86_400)
    assert "the latest receipt is 9 days old" in text


def test_receipts_that_do_not_say_what_prompts_share_are_not_simulated(tmp_path: Path) -> None:
    """Those of an older kvproxy: half of the truth would be a wrong answer."""
    path = tmp_path / "receipts.jsonl"
    record(path, CHATS.trace(), FLEET, prefixes="")
    (pool,), text = advise(path, budget_s=5)
    assert pool.fit is None
    assert "lack shared prefixes" in text


def test_a_sample_of_the_traffic_is_not_simulated(recorded: Path) -> None:
    """Requests that were left out waited, too."""
    (pool,), text = advise(recorded, budget_s=5, receipts={"path": str(recorded), "sample": 0.1})
    assert pool.fit is None
    assert "set `receipts.sample: 1.0`" in text


def test_an_engine_that_cannot_be_asked_is_a_note(recorded: Path) -> None:
    """The others are judged; without the KV memory of any nothing is simulated."""
    silent = EngineSettingsSeen(EndpointId("e1"), "default", error="vllm cannot be reached")
    (pool,), text = advise(recorded, engines=[engine("e0", prefix_caching=False), silent])
    assert "no answer from endpoint e1: vllm cannot be reached" in text
    assert "--enable-prefix-caching" in flags(pool)
    _, text = advise(recorded, engines=[replace(silent, id=EndpointId("e0")), silent], budget_s=5)
    assert "no engine reports its KV memory" in text


def test_engines_of_two_kinds_get_their_own_flags(recorded: Path) -> None:
    """Each in its own spelling."""
    mixed = [engine("e0", publishes=False), engine("e1", kind=EngineKind.SGLANG, publishes=False, cache_report=False)]
    (pool,), text = advise(recorded, engines=mixed)
    assert "engines of several kinds (SGLang, vLLM)" in text
    (events,) = [one for one in pool.advice if one.setting is Setting.KV_EVENTS]
    spelled = dict(events.flags)
    assert '"enable_kv_cache_events": true' in spelled["endpoint e0"]
    assert "enable_kv_cache_events" not in spelled["endpoint e1"]
    assert "--enable-cache-report" in flags(pool)


def test_models_that_share_no_engine_are_pools_of_their_own(tmp_path: Path) -> None:
    """A request that waits for one does not wait for the other."""
    path = tmp_path / "receipts.jsonl"
    one = record(path, CHATS.trace(), replace(FLEET, instances=1))
    other = [
        msgspec.structs.replace(
            each, model="n", endpoint="e1", facts={},
            attempts=(msgspec.structs.replace(
                each.attempts[0], endpoint="e1",
                candidates=(msgspec.structs.replace(each.attempts[0].candidates[0], id="e1"),)),),
        )
        for each in one[:40]
    ]  # fmt: skip
    path.write_bytes(b"".join(encode_receipt(each) for each in (*one, *other)))
    pools, _ = advise(path)
    assert [(pool.traffic.models, pool.traffic.endpoints) for pool in pools if pool.traffic] == [
        (("m",), ("e0",)),
        (("n",), ("e1",)),
    ]


@pytest.mark.slow
def test_a_fleet_where_nothing_helps_is_told_so(recorded: Path) -> None:
    """Every setting was tried, none is recommended."""
    (pool,), text = advise(recorded, budget_s=60)
    assert pool.fit is not None
    assert pool.fit.good
    assert list(pool.advice) == []
    assert {one.setting for one in pool.not_given} >= {Setting.SCHEDULING, Setting.QUEUE, Setting.MEMORY}
    assert "Nothing helps beyond noise: these settings fit this traffic." in text


@pytest.mark.slow
def test_slots_that_are_too_few_are_named_with_their_gain(tmp_path: Path) -> None:
    """The receipts show how many there are; replay expects what more of them bring."""
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(_lines(SLOTS))
    (pool,), text = advise(path, budget_s=60)
    assert pool.today is not None
    assert pool.today.fleet.max_sequences == 2
    (advice,) = [one for one in pool.advice if one.setting is Setting.SEQUENCES]
    assert {flag for _, flag in advice.flags} == {"--max-num-seqs 256"}
    assert advice.gain is not None
    assert advice.gain.ttft_mean.value < 0.7
    assert "--max-num-seqs 256" in text


def test_without_a_simulation_the_slots_are_known_all_the_same(tmp_path: Path) -> None:
    """From the receipts alone, and no prefill that takes long is taken for a missing slot."""
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(_lines(SLOTS))
    (pool,), text = advise(path)
    assert flags(pool) >= {"--max-num-seqs 256"}
    assert "never answer more than 2 requests at a time" in text
    record(path, Chats(sessions=60, turns=2, rate=1.5, long_every=2, output_tokens=40).trace(), FLEET)
    (pool,), _ = advise(path)
    assert Setting.SEQUENCES not in {one.setting for one in pool.advice}


def test_answers_without_cached_tokens_are_noticed(tmp_path: Path) -> None:
    """Where hits were expected; an engine whose cache was never hit may have had nothing to say."""
    path = tmp_path / "receipts.jsonl"
    record(path, CHATS.trace(), FLEET, cached_tokens=None)
    (pool,), _ = advise(path)
    assert "--enable-prompt-tokens-details" in flags(pool)
    record(path, CHATS.trace(), replace(FLEET, index=IndexMode.APPROXIMATE), cached_tokens=None, facts={})
    (pool,), _ = advise(path)
    assert "--enable-prompt-tokens-details" not in flags(pool)


@pytest.mark.slow
def test_a_model_that_does_not_fit_expects_nothing(tmp_path: Path) -> None:
    """First tokens that come for another reason than the simulated ones: only facts remain."""
    path = tmp_path / "receipts.jsonl"
    late = record(path, CHATS.trace(), FLEET)
    half = len(late) // 2
    odd = [msgspec.structs.replace(one, ttft_s=one.duration_s * 0.95) for one in late[half:]]
    path.write_bytes(b"".join(encode_receipt(one) for one in (*late[:half], *odd)))
    (pool,), text = advise(path, budget_s=60)
    assert pool.fit is not None
    assert not pool.fit.good
    assert "the model does not fit this fleet" in text
    assert all(one.gain is None for one in pool.advice)


def test_a_budget_that_is_too_small_ends_without_expectations(recorded: Path) -> None:
    """In its time, with what is known."""
    (pool,), text = advise(recorded, budget_s=0.01, clock=count().__next__)
    assert pool.fit is None
    assert "the budget of 0 s is spent" in text


def test_ctrl_c_ends_the_simulations_with_what_is_known(recorded: Path) -> None:
    """No trace of a stack; what engines and receipts say remains."""
    calls = count()

    def clock() -> float:
        if next(calls) == 400:
            raise KeyboardInterrupt
        return 0.0

    (pool,), text = advise(recorded, engines=both(publishes=False), budget_s=60, clock=clock)
    assert "note: interrupted" in text
    assert Setting.KV_EVENTS in {one.setting for one in pool.advice}
