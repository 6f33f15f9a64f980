"""Tiers below an engine's memory: the blocks they keep, the time of a read, and their events."""

from __future__ import annotations

import pytest

from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import (
    BlockRemoved,
    BlockStored,
    CacheChanged,
    EngineSettings,
    FirstToken,
    KvEvent,
    SimRequest,
)
from kvproxy.lab.simulator.lower_tiers import LowerTier
from kvproxy.lab.simulator.retention import Eviction, TierSettings
from kvproxy.lab.simulator.timing import EngineTiming

SIZE, READ_S = 16, 0.001
HOST = TierSettings("CPU", 100, READ_S)
TIMING = EngineTiming(prefill_tokens_per_s=1000, quadratic_tokens=1e9)


def engine(*tiers: TierSettings, blocks: int = 9, store: LowerTier | None = None) -> Engine:
    """With memory for one prompt of eight blocks and its last token."""
    settings = EngineSettings(blocks, SIZE, max_batched_tokens=512, timing=TIMING, tiers=tiers)
    return Engine(settings, store=store)


def ask(subject: Engine, *names: int, now: float) -> tuple[FirstToken, list[KvEvent]]:
    """One request with a block for each name and a little more; what it found, and all events until its end."""
    request = SimRequest(f"r{now}", names, len(names) * SIZE + 1, 1)
    subject.submit(request, now)
    outputs = subject.advance(now + 100.0)
    (first,) = (each for each in outputs if isinstance(each, FirstToken))
    return first, [event for each in outputs if isinstance(each, CacheChanged) for event in each.events]


def test_blocks_evicted_from_engine_memory_are_read_back() -> None:
    """At the tier's price instead of computing it; it is the engine's again afterwards."""
    subject = engine(HOST)
    first, _ = ask(subject, 1, 2, 3, 4, 5, now=0.0)
    assert first.cached_tokens == 0
    ask(subject, 11, 12, 13, 14, 15, 16, now=200.0)
    again, _ = ask(subject, 1, 2, 3, 4, 5, now=400.0)
    assert again.cached_tokens == 5 * SIZE
    blocks_read = subject.scheduler.counters.external_prefix_cache_hits // SIZE
    assert blocks_read == 3  # the beginning was still in memory
    assert again.at - 400.0 == pytest.approx(blocks_read * READ_S + 1 / 1000)
    once_more, _ = ask(subject, 1, 2, 3, 4, 5, now=600.0)
    assert (once_more.cached_tokens, once_more.at - 600.0) == (5 * SIZE, pytest.approx(1 / 1000))


def test_without_a_tier_it_is_computed_again() -> None:
    """As before there were any."""
    subject = engine()
    ask(subject, 1, 2, 3, 4, 5, now=0.0)
    ask(subject, *range(11, 19), now=200.0)
    assert ask(subject, 1, 2, 3, 4, 5, now=400.0)[0].cached_tokens == 0


def test_events_name_the_tier() -> None:
    """Stored once under the engine's hashes and parents; what is read back is announced as in engine memory."""
    subject = engine(HOST)
    _, events = ask(subject, 1, 2, now=0.0)
    assert events == [BlockStored((1, 2), None), BlockStored((1, 2), None, medium="CPU")]
    _, events = ask(subject, 1, 2, 3, now=200.0)
    assert events == [BlockStored((3,), 2), BlockStored((3,), 2, medium="CPU")]
    ask(subject, *range(11, 19), now=400.0)
    _, events = ask(subject, 1, 2, 3, now=600.0)
    assert [each for each in events if isinstance(each, BlockStored)] == [BlockStored((1, 2, 3), None)]


def test_a_full_tier_gives_up_the_end_of_what_was_used_longest_ago() -> None:
    """A prompt's beginning is of use without its end."""
    tier = TierSettings("CPU", 4, READ_S)
    subject = engine(tier)
    ask(subject, 1, 2, 3, now=0.0)
    _, events = ask(subject, 11, 12, 13, now=200.0)
    gone = [each for each in events if isinstance(each, BlockRemoved) and each.medium == "CPU"]
    assert gone == [BlockRemoved(3, medium="CPU"), BlockRemoved(2, medium="CPU")]


def test_a_shared_store_serves_what_another_engine_computed() -> None:
    """Behind both engines there is one."""
    store = LowerTier(TierSettings("EXTERNAL", 100, READ_S, latency_s=0.5))
    one, other = engine(store=store), engine(HOST, store=store)
    ask(one, 1, 2, 3, now=0.0)
    first, _ = ask(other, 1, 2, 3, now=200.0)
    assert first.cached_tokens == 3 * SIZE
    assert first.at - 200.0 == pytest.approx(0.5 + 3 * READ_S + 1 / 1000)


def test_a_read_that_fails_is_computed() -> None:
    """Every second one here; the time it took to find out is lost."""
    subject = engine(TierSettings("CPU", 100, READ_S, latency_s=0.25, failing_reads=2))
    found = []
    ask(subject, 1, 2, 3, now=0.0)
    for turn in range(1, 5):
        ask(subject, *range(20 * turn, 20 * turn + 8), now=400.0 * turn)
        first, _ = ask(subject, 1, 2, 3, now=400.0 * turn + 200.0)
        found.append(first.cached_tokens)
        late_s = first.at - (400.0 * turn + 200.0)
        assert late_s == pytest.approx(0.25 + (3 * READ_S + 1 / 1000 if first.cached_tokens else 49 / 1000))
    assert found == [48, 0, 48, 0]


def test_a_disk_gets_what_host_memory_gives_up() -> None:
    """And is read from there; with the parents and the medium that events need."""
    host, disk = TierSettings("CPU", 4, READ_S), TierSettings("DISK", 100, 10 * READ_S, below=True)
    subject = engine(host, disk)
    _, events = ask(subject, 1, 2, 3, now=0.0)
    assert [each.medium for each in events if isinstance(each, BlockStored)] == ["GPU", "CPU"]
    _, events = ask(subject, *range(11, 19), now=200.0)
    down = [each for each in events if isinstance(each, BlockStored) and each.medium == "DISK"]
    assert BlockStored((3,), 2, medium="DISK") in down
    assert BlockStored((1,), None, medium="DISK") in down
    first, _ = ask(subject, 1, 2, 3, now=400.0)
    assert first.cached_tokens == 3 * SIZE
    assert first.at - 400.0 == pytest.approx(3 * 10 * READ_S + 1 / 1000)


@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.WEIGHTED, Eviction.NEXT_USE])
def test_a_ranked_tier_keeps_what_is_used_often(eviction: Eviction) -> None:
    """Where by recency a flood of others takes its place."""
    for order, found in ((Eviction.LRU, 0), (eviction, 3)):
        subject = engine(TierSettings("CPU", 12, READ_S, eviction=order))
        for turn in range(4):
            ask(subject, 1, 2, 3, now=100.0 * turn)
        for turn in range(3):
            ask(subject, *(100 * turn + at for at in range(11, 19)), now=1000.0 + 100.0 * turn)
        assert ask(subject, 1, 2, 3, now=2000.0)[0].cached_tokens == found * SIZE


@pytest.mark.parametrize("wrong", [{"capacity_blocks": 0}, {"read_block_s": -1.0}, {"failing_reads": -1}])
def test_impossible_tiers_are_refused(wrong: dict[str, float]) -> None:
    """Before an engine is built with them."""
    with pytest.raises(ValueError, match="a tier has room"):
        TierSettings(**{"medium": "CPU", "capacity_blocks": 1, "read_block_s": 0.0, **wrong})  # type: ignore[arg-type]
