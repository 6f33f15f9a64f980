"""Verdicts of the doctor about an LMCache, from what it measured there."""

from __future__ import annotations

import pytest

from kvproxy.features.lmcache.check_lookup import judge_chunk_size, judge_lookup_times
from kvproxy.features.lmcache.check_service import judge_strategies
from kvproxy.features.lmcache.settings import StrategySettings
from kvproxy.operate.doctor.engine import PromptLengths
from kvproxy.operate.doctor.report import Severity


@pytest.mark.parametrize(
    ("lookups", "tokenize", "severity", "said"),
    [
        ([0.001] * 20, 0.001, Severity.OK, "20 lookups took 1 ms (median) and 1 ms (the slowest) of 50 ms"),
        ([0.001] * 19 + [0.2], 0.001, Severity.WARNING, "some are late"),
        ([0.08] * 20, 0.001, Severity.PROBLEM, "they are never in time"),
        ([0.03] * 20, 0.03, Severity.WARNING, "/tokenize 30 ms more"),
        ([2.0] * 20, 0.0, Severity.PROBLEM, "2 s (median)"),
    ],
)
def test_time_budget(lookups: list[float], tokenize: float, severity: Severity, said: str) -> None:
    """LookupClient, and tokenize before them, against the routing deadline."""
    found = judge_lookup_times("lmcache_endpoint", lookups, tokenize, 0.05)
    assert found.severity is severity
    assert said in found.what
    assert severity is Severity.OK or "lookup_routing_timeout" in found.fix


@pytest.mark.parametrize(
    ("count", "shorter", "minimum", "severity", "said"),
    [
        (1000, 100, 256, Severity.OK, "at least 10% of its 1000 prompts were shorter"),
        (1000, 600, 256, Severity.WARNING, "60% of its 1000 prompts"),
        (1000, 990, 256, Severity.PROBLEM, "99% of its 1000 prompts"),
        (100, 99, 256, Severity.OK, "chunks have 256 tokens"),
        (0, 0, 256, Severity.OK, "no prompts so far"),
        (0, 0, 64, Severity.WARNING, "prompts of 64 tokens are looked up"),
    ],
)
def test_chunk_size(count: int, shorter: int, minimum: int, severity: Severity, said: str) -> None:
    """Few prompts say nothing; buckets above a chunk do not count."""
    lengths = PromptLengths(count, ((200.0, shorter), (500.0, count)))
    found = judge_chunk_size("endpoint a", lengths, 256, minimum)
    assert found.severity is severity
    assert said in found.what


def test_actions_that_a_controller_cannot_do() -> None:
    """Eviction and unknown places: each would answer 404 or do nothing."""
    strategy = StrategySettings(
        enable_eviction=True,
        enable_compression=True,
        enable_pinning=True,
        pin_location="lmcache",
    )
    found = list(judge_strategies("lmcache", strategy, evicts=False))
    assert [one.fix.split("`")[1] for one in found] == [
        "allow_clear: true",
        "pin_location",
    ]
    cleared = StrategySettings(enable_eviction=True, allow_clear=True, evict_location="nowhere")
    assert ["evict_location" in one.what for one in judge_strategies("lmcache", cleared, evicts=False)] == [True]
    assert not list(judge_strategies("lmcache", StrategySettings(enable_eviction=True), evicts=True))
