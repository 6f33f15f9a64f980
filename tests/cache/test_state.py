"""State that a service has learned outlives it, as far as the settings of the next one still fit."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.cache.overlap.facts import Result
from kvproxy.cache.state import CacheState
from tests.cache.support import NOWHERE, A, chat, cluster_of, long_text, running, settings
from tests.support.clock import FakeClock

TURN = long_text("w")


async def test_a_service_with_an_earlier_ones_state_goes_on_where_it_is() -> None:
    """Routed prefixes, prompt lengths and the score."""
    cluster = cluster_of({"a": NOWHERE})
    async with running(settings(), cluster) as before:
        await before.serve(chat(TURN), A)
        facts = await before.ask(chat(TURN))
        before.kv.finished(facts, Result(A, True, prompt_tokens=facts.overlaps.prompt_tokens * 2))
        async with running(settings(min_matched_tokens=9), cluster, state=before.kv.state) as after:
            known = await after.ask(chat(TURN))
            assert known.preferred == A
            assert known.overlaps.prompt_tokens == facts.overlaps.prompt_tokens * 2
            assert after.kv.state.predictions is before.kv.state.predictions


async def test_requests_that_end_at_the_earlier_service_teach_both() -> None:
    """It drains while the next one serves already."""
    cluster = cluster_of({"a": NOWHERE})
    async with running(settings(), cluster) as before:
        late = await before.ask(chat(TURN))
        before.kv.placed(late, A)
        async with running(settings(min_matched_tokens=9), cluster, state=before.kv.state) as after:
            before.kv.finished(late, Result(A, True))
            assert (await after.ask(chat(TURN))).preferred == A


@pytest.mark.parametrize(("changes", "kept"), [({"min_matched_tokens": 9}, True), ({"hot_window": 1.0}, False)])
def test_heat_is_kept_while_its_bounds_stay_the_same(changes: dict[str, Any], kept: bool, clock: FakeClock) -> None:
    """It cannot be counted again in another window."""
    state = CacheState.empty(metrics=Metrics(), clock=clock)
    assert (state.hotness(settings()) is state.hotness(settings(**changes))) is kept


@pytest.mark.parametrize(("changes", "kept"), [({}, True), ({"ttl": 1.0}, False), ({"max_bytes": 1024}, False)])
def test_token_memory_is_kept_while_its_bounds_stay_the_same(
    changes: dict[str, Any], kept: bool, clock: FakeClock
) -> None:
    state = CacheState.empty(metrics=Metrics(), clock=clock)
    first = state.token_memory(settings().token_cache, clock)
    assert (state.token_memory(settings(token_cache=changes).token_cache, clock) is first) is kept


async def test_a_cluster_that_left_is_forgotten() -> None:
    """One of the same name begins empty."""
    cluster = cluster_of({"a": NOWHERE})
    async with running(settings(), cluster) as before:
        state = before.kv.state
        await before.serve(chat(TURN), A)
        state.index("other", endpoints=1)
        async with running(settings(), cluster, state=before.kv.state):
            assert set(state.indexes) == {"default"}
        state.keep_only({})
        assert state.index("default", endpoints=1).approximate.counts.entries == 0


def test_a_feature_keeps_one_state_of_its_own(clock: FakeClock) -> None:
    """Made on first use, and the same for every service after that."""

    class Book:
        """Anything."""

    state = CacheState.empty(metrics=Metrics(), clock=clock)
    assert state.of(Book) is state.of(Book)
    assert CacheState.empty(metrics=Metrics(), clock=clock).of(Book) is not state.of(Book)
