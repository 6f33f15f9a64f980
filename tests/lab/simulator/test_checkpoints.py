"""The engine of a hybrid model: what it reuses ends where it kept a state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import BlockRemoved, BlockStored, FirstToken
from tests.lab.simulator.test_engine import SMALL, events_of, first_token, of, request, run
from tests.support.vllms.hybrid import Checkpoints, HybridEngine

ROOMY = replace(SMALL, capacity_blocks=128, max_batched_tokens=64)
EVERY = Checkpoints(64)
ENDS = Checkpoints(64, ends_only=True)


def reused(engine: Engine, prompt_tokens: int, *, chain: int = 0, at: float = 0.0, parts_after: int = 99) -> int:
    """Of one more prompt, alike to those of its chain for so many blocks."""
    asked = request(f"{chain} {prompt_tokens} {at}", prompt_tokens, 1, chain=chain)
    hashes = [
        each if number < parts_after else each + 100_000 * parts_after for number, each in enumerate(asked.block_hashes)
    ]
    engine.submit(replace(asked, block_hashes=hashes), at)
    outputs = run(engine)
    assert len(of(outputs, FirstToken)) == 1
    return first_token(outputs, asked.id).cached_tokens


@pytest.mark.parametrize(
    ("first", "second", "cached"), [(300, 300, 256), (300, 64, 0), (300, 65, 64), (256, 256, 192), (63, 300, 0)]
)
def test_reuse_ends_at_a_state(first: int, second: int, cached: int) -> None:
    """Whole steps, and never the last token."""
    engine = HybridEngine(ROOMY, EVERY)
    assert (reused(engine, first), reused(engine, second, at=10.0)) == (0, cached)


def test_states_at_ends_serve_what_goes_on_and_not_what_parts() -> None:
    """Until a second prompt has parted there: then the place is known to be shared."""
    engine = HybridEngine(ROOMY, ENDS)
    assert reused(engine, 300) == 0
    assert reused(engine, 400, at=10.0) == 256
    assert reused(engine, 350, at=20.0, parts_after=10) == 0
    assert reused(engine, 360, at=30.0, parts_after=10) == 320  # the third one's own end
    assert reused(engine, 350, at=40.0, parts_after=11) == 128


def test_a_state_goes_with_its_block() -> None:
    """Both are announced."""
    engine = HybridEngine(replace(ROOMY, capacity_blocks=20), EVERY)
    engine.submit(request("a", 200, 1), 0.0)
    outputs = run(engine)
    engine.submit(request("b", 300, 1, chain=1), 10.0)
    events = events_of(outputs + run(engine))
    states = [event for event in events if isinstance(event, BlockStored) and event.group == 1]
    assert {event.kind for event in states} == {"mamba"}
    assert [event.block_hashes for event in states[:3]] == [(4,), (8,), (12,)]
    assert BlockRemoved(12, 1) in events
    assert BlockRemoved(12) in events


def test_a_cleared_cache_has_no_states() -> None:
    engine = HybridEngine(ROOMY, EVERY)
    reused(engine, 300)
    hashes = request("x", 300).block_hashes
    assert engine.own_cache.match_prefix(hashes, 18) == 16
    assert engine.scheduler.cache.clear()
    assert (engine.own_cache.match_prefix(hashes, 18), reused(engine, 300, at=10.0)) == (0, 0)


def test_states_stand_at_the_ends_of_blocks() -> None:
    with pytest.raises(ValueError, match="ends of blocks"):
        HybridEngine(SMALL, Checkpoints(40))
