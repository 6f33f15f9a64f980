"""The engines' own counters beside responses and predictions."""

from __future__ import annotations

import pytest

from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cache.feedback.token_counts import SCRAPES, CacheUse, HitRatioStats
from tests.cache.support import A, B

AT = ("default", A)
NOTHING = CacheUse(None, None, None, None)


def scraped(accounts: HitRatioStats, queries: int, hits: int) -> bool:
    return accounts.read_counters(AT, EngineMetrics(prefix_queries_tokens=queries, prefix_hits_tokens=hits))


def served(accounts: HitRatioStats, prompt: int, cached: int, predicted: int) -> None:
    accounts.count_response(AT, prompt_tokens=prompt, cached_tokens=cached, predicted_tokens=predicted)


def test_the_shares_between_two_readings() -> None:
    """Earlier counts are left out, and a quarter of the engine's lookups were sent by others."""
    accounts = HitRatioStats()
    served(accounts, 99_999, 0, 0)
    scraped(accounts, 1_000_000, 0)
    served(accounts, 6_000, 3_000, 4_500)
    scraped(accounts, 1_008_000, 2_000)
    assert accounts.read_shares(AT) == CacheUse(engine=0.25, responses=0.5, prediction=0.75, foreign=0.25)
    assert dict(accounts.hit_series()) == {
        ("default", "a", "engine"): 0.25,
        ("default", "a", "responses"): 0.5,
        ("default", "a", "prediction"): 0.75,
    }
    assert dict(accounts.foreign_series()) == {("default", "a"): 0.25}


def test_one_reading_says_nothing() -> None:
    accounts = HitRatioStats()
    assert accounts.read_shares(AT) == NOTHING
    scraped(accounts, 1_000_000, 500_000)
    assert accounts.read_shares(AT) == NOTHING
    assert not list(accounts.hit_series())
    assert not list(accounts.foreign_series())


def test_too_few_tokens_make_no_ratio() -> None:
    """An idle engine is no engine that reuses nothing."""
    accounts = HitRatioStats()
    scraped(accounts, 0, 0)
    served(accounts, 5_000, 0, 0)
    scraped(accounts, 100, 100)
    assert accounts.read_shares(AT) == CacheUse(None, 0.0, 0.0, None)


def test_requests_that_are_still_under_way_make_no_negative_share() -> None:
    """Ours are counted when they end, the engine's when they begin."""
    accounts = HitRatioStats()
    scraped(accounts, 0, 0)
    served(accounts, 9_000, 0, 0)
    scraped(accounts, 3_000, 0)
    assert accounts.read_shares(AT).foreign == 0.0


@pytest.mark.parametrize(("queries", "anew"), [(99, True), (100, False), (101, False)])
def test_counters_that_fell_are_a_new_process(queries: int, anew: bool) -> None:
    accounts = HitRatioStats()
    assert not scraped(accounts, 100, 0)
    assert scraped(accounts, queries, 0) is anew


def test_no_share_is_taken_over_a_restart() -> None:
    """Counters of two processes have no difference: what was read of the first counts no more."""
    accounts = HitRatioStats()
    scraped(accounts, 90_000, 80_000)
    scraped(accounts, 99_000, 88_000)
    assert scraped(accounts, 100, 0)
    assert accounts.read_shares(AT).engine is None
    scraped(accounts, 95_100, 9_500)
    assert accounts.read_shares(AT).engine == 0.1


def test_engines_that_count_nothing() -> None:
    assert not HitRatioStats().read_counters(AT, EngineMetrics(prefix_queries_tokens=5))


def test_only_the_latest_readings_count() -> None:
    accounts = HitRatioStats()
    scraped(accounts, 0, 0)
    for number in range(1, SCRAPES + 1):
        scraped(accounts, 10_000 * number, 10_000 * (number - 1))
    assert accounts.read_shares(AT).engine == 1.0


def test_endpoints_that_left_are_forgotten() -> None:
    accounts = HitRatioStats()
    scraped(accounts, 0, 0)
    scraped(accounts, 9_000, 0)
    accounts.keep_only({("default", B)})
    assert accounts.read_shares(AT) == NOTHING
