"""Advice, and findings of the doctor, about sessions and memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.engine_metrics import parse_engine_metrics
from kvproxy.features.residents import memory_check
from kvproxy.features.residents.feature import FEATURE
from kvproxy.features.residents.note import SessionTurn
from kvproxy.operate.receipts.receipt import (
    Attempt,
    Receipt,
    ReceiptCandidate,
    encode_prefixes,
    encode_receipt,
    receipt_type,
)
from tests.lab.advise.test_adviser import advise, both
from tests.operate.doctor.setup import ENGINE, cluster, visit

KEY = b"k" * 16
#: 9:00 UTC of some day.
NINE = datetime(2027, 1, 15, 9, tzinfo=UTC).timestamp()
BLOCK_TOKENS = 100
SYSTEM = range(20)
E0, E1 = EndpointId("e0"), EndpointId("e1")


def receipt(began_at: float, took_s: float, blocks: Sequence[int], **more: Any) -> Receipt:
    """Return that of a prompt of these blocks."""
    return receipt_type()(
        time=datetime.fromtimestamp(began_at + took_s, UTC).isoformat(),
        request_id="r",
        end="completed",
        duration_s=took_s,
        prompt_tokens=len(blocks) * BLOCK_TOKENS,
        prompt_blocks=len(blocks),
        prefixes=encode_prefixes(array("Q", blocks), key=KEY),
        **more,
    )


def agents(count: int, *, hours: float = 2.0, gap_s: float = 10.0, **more: Any) -> list[Receipt]:
    """Return the turns of agents of about 100 blocks, 20 of them common, that go on all the time."""
    found = []
    for number in range(count):
        own = range(1000 * (number + 1), 1000 * (number + 1) + 90)
        at = NINE
        turn = 0
        while at < NINE + hours * 3600.0:
            found.append(receipt(at, 20.0, [*SYSTEM, *own[: 70 + turn % 20]], **more))
            at += 20.0 + gap_s
            turn += 1
    return sorted(found, key=lambda one: one.time)


def test_contexts_beyond_the_memory_are_put_into_figures() -> None:
    """Ratio, hours and engines; what all share counts once, and so do contexts between turns."""
    # 10 agents of 80 blocks on average, and 20 common ones: 82,000 tokens
    (text,) = FEATURE.advise(agents(10), [26_000, 26_000])
    assert text.startswith("contexts of sessions need 1.6 times the KV memory from 9 to 11 h UTC (8")
    assert "tokens; there are 52,000): 2 further engines like these" in text
    assert "wait" not in text


def test_memory_that_is_large_enough_needs_no_advice() -> None:
    """Nor does memory that no engine reports, or traffic without recorded prefixes."""
    assert not list(FEATURE.advise(agents(10), [100_000]))
    assert not list(FEATURE.advise(agents(10), []))
    assert not list(FEATURE.advise([msgspec.structs.replace(one, prefixes="") for one in agents(10)], [1_000]))


def test_a_context_that_nobody_comes_back_for_counts_until_its_end() -> None:
    """Sessions that pause for minutes are no residents."""
    (text,) = FEATURE.advise(agents(10, gap_s=100.0), [8_000])
    busy = float(text.split("need ")[1].split(" times")[0])
    (text,) = FEATURE.advise(agents(10), [8_000])
    assert float(text.split("need ")[1].split(" times")[0]) > 2.5 * busy


def test_sessions_waits_are_those_of_the_crowded_hours() -> None:
    """Of first turns and of others that gave way; turns that need not wait are left out."""
    notes = (SessionTurn(1, True, 40.0), SessionTurn(2, True, 40.0), SessionTurn(3, True))
    turns = [one for note in notes for one in agents(10, session_turn=note)]
    turns += agents(1, session_turn=SessionTurn(2, True, 500.0))
    (text,) = FEATURE.advise(turns, [26_000, 26_000])
    assert text.endswith("; until then 9 of 10 waits for room take up to 40 s")


def test_several_runs_of_hours_are_named() -> None:
    """And a time that cannot be read is passed over."""
    evening = [receipt(NINE + 5 * 3600.0 + 30.0 * number, 30.0, [*SYSTEM, *range(5000, 5400)]) for number in range(120)]
    broken = msgspec.structs.replace(evening[0], time="no time")
    (text,) = FEATURE.advise([*agents(10, hours=1.0), *evening, broken], [30_000])
    assert "from 9 to 10 and 14 to 15 h UTC" in text
    assert "further engine" in text


def test_the_adviser_gives_it(tmp_path: Path) -> None:
    """Without a flag: neither an engine's share of its GPU nor host memory holds that much more."""
    more = {
        "kind": "chat",
        "model": "m",
        "cluster": "default",
        "endpoint": "e0",
        "status": 200,
        "attempts": (Attempt(0.0, E0, "kv_aware", "load", (ReceiptCandidate(E0), ReceiptCandidate(E1))),),
    }
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(b"".join(map(encode_receipt, agents(10, **more))))
    (pool,), text = advise(path, engines=both(capacity_tokens=26_000, offloads=False), now=NINE + 7200.0)
    assert "Contexts of sessions need 1.6 times the KV memory" in text
    (one,) = [each for each in pool.advice if each.setting == "KV memory"]
    assert not one.flags
    _, text = advise(path, engines=both(capacity_tokens=260_000), now=NINE + 7200.0)
    assert "Contexts of sessions" not in text


async def test_doctor_reports_the_memory_that_sessions_share() -> None:
    """Nothing is checked where they are not admitted."""
    async with cluster({"a": ENGINE, "b": ENGINE}, controller=None) as site:
        report = await visit(site.config(kvcache={"lmcache_endpoint": ""}))
        [good] = [one for one in report.passed if one.check == "session memory"]
        assert good.what == "sessions share KV memory of 16,384 tokens"
        off = await visit(site.config(kvcache={"lmcache_endpoint": ""}, admit_sessions=False))
        assert not [one for one in off.passed if one.check == "session memory"]


@pytest.mark.parametrize(("asleep", "expected"), [(False, ["endpoint a"]), (True, [])])
async def test_doctor_names_engines_without_known_memory(
    asleep: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There sessions have no limit; one that sleeps shows it when it is awake."""
    monkeypatch.setattr(
        memory_check,
        "parse_engine_metrics",
        lambda text: replace(parse_engine_metrics(text), cache=None, asleep=asleep),
    )
    async with cluster({"a": ENGINE}, controller=None) as site:
        report = await visit(site.config(kvcache={"lmcache_endpoint": ""}))
    found = [one for one in report.findings if one.check == "session memory"]
    assert [one.where for one in found] == expected
    assert all("sessions have no limit there" in one.fix for one in found)
