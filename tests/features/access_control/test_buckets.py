"""Token buckets outlive the filter they were made for."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.features.access_control.rate_limit import Buckets, BucketTable, Limit, TokenBucket, build
from kvproxy.features.access_control.settings import RateLimitSettings
from kvproxy.operate.runtime.generation import StateStore
from tests.support.asgi import Inner, call, http_scope
from tests.support.clock import FakeClock
from tests.support.filter_context import counted, filter_context

REQUESTS = Limit("requests", 60, 1.0)
TOKENS = Limit("tokens", 600, 1.0)


def levels(buckets: Buckets, key: str, now: float = 0.0) -> list[float]:
    return [bucket.level(now) for bucket in buckets.of(key, now)]


@pytest.mark.parametrize(("charged", "level"), [(0, 20.0), (3, 14.0), (10, 0.0), (15, -10.0)])
def test_a_bucket_of_another_size_is_as_full(charged: float, level: float) -> None:
    """And as deep in debt."""
    bucket = TokenBucket(rate_per_s=1.0, capacity=10.0, now=0.0)
    bucket.charge(charged, 0.0)
    bucket.resize(rate_per_s=4.0, capacity=20.0, now=0.0)
    assert bucket.level(0.0) == level
    assert bucket.level(1.0) == min(20.0, level + 4.0)


def test_time_under_the_former_rate_counts_by_it() -> None:
    """Tokens that came back before the change are there."""
    bucket = TokenBucket(rate_per_s=1.0, capacity=10.0, now=0.0)
    bucket.charge(10.0, 0.0)
    bucket.resize(rate_per_s=100.0, capacity=10.0, now=5.0)
    assert bucket.level(5.0) == 5.0


def test_other_limits_take_the_buckets_over() -> None:
    """By what they limit: one that is new starts full, and a client that never came before starts full as well."""
    table = BucketTable()
    for bucket in Buckets((REQUESTS, TOKENS), 10, table).of("a", 0.0):
        bucket.charge(30.0, 0.0)
    tokens_only = Buckets((Limit("tokens", 1200, 1.0),), 10, table)
    assert levels(tokens_only, "a") == [570.0 * 2]
    assert levels(tokens_only, "b") == [1200.0]
    both = Buckets((Limit("requests", 6, 1.0), Limit("tokens", 1200, 1.0)), 10, table)
    assert levels(both, "a") == [6.0, 1140.0]


def test_a_request_begun_before_the_change_is_charged_after_it() -> None:
    """A running request holds the bucket it will be charged to."""
    table = BucketTable()
    running = Buckets((TOKENS,), 10, table).of("a", 0.0)[0]
    after = Buckets((Limit("tokens", 1200, 1.0),), 10, table)
    assert levels(after, "a") == [1200.0]
    running.charge(200.0, 0.0)
    assert levels(after, "a") == [1000.0]


def test_a_key_that_comes_only_after_two_changes_is_still_known() -> None:
    """Within the bound on keys, those in use first; a smaller bound counts as soon as the next key comes."""
    table = BucketTable()
    first = Buckets((REQUESTS,), 2, table)
    for key in ("a", "b"):
        first.of(key, 0.0)[0].charge(60.0, 0.0)
    second = Buckets((Limit("requests", 120, 1.0),), 2, table)
    assert levels(second, "b") == [0.0]
    third = Buckets((Limit("requests", 240, 1.0),), 2, table)
    assert levels(third, "a") == [0.0]
    fourth = Buckets((REQUESTS,), 1, table)
    assert sorted(levels(fourth, "a") + levels(fourth, "b")) == [0.0, 60.0]


def settings(**changes: Any) -> RateLimitSettings:
    return RateLimitSettings.model_validate({"requests_per_minute": 2, **changes})


async def test_a_reload_gives_nobody_a_fresh_start() -> None:
    """Unchanged, the buckets are the same; changed, they are as empty as before."""
    clock = FakeClock()
    store = StateStore()
    before = filter_context(clock=clock, store=store)
    app = build(Inner(), settings(), before)
    assert [(await call(app, http_scope())).status for _ in range(3)] == [200, 200, 429]
    for changes in ({}, {"requests_per_minute": 100}):
        after = filter_context(clock=clock, store=store)
        app = build(Inner(), settings(**changes), after)
        assert (await call(app, http_scope())).status == 429
    assert counted(after, "kvproxy_queue_depth", queue="rate_limit") == 1
    clock.advance(0.6)
    assert (await call(app, http_scope())).status == 200
