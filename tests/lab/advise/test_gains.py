"""From runs to a gain: what is recommended, and how sure that is."""

from __future__ import annotations

import pytest

from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.lab.advise.advice import Confidence, Figures, Fit, Gain, Ratio, compute_gain, why_not_given
from kvproxy.operate.doctor.flags import Setting, spell_flag

SAME = Ratio(1.0, 0.0)
FIT = Fit(1.0, 1.05, 0.5, 0.5, 2000, 3600.0)


def gain(mean: Ratio, *, p99: float = 1.0, itl: float = 1.0, runs: int = 10) -> Gain:
    """One that was expected."""
    return Gain(mean, Ratio(p99, 0.0), Ratio(itl, 0.0), SAME, runs, Confidence.HIGH)


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (gain(Ratio(0.98, 0.0)), "less than 3%"),
        (gain(Ratio(1.2, 0.0)), "no gain"),
        (gain(Ratio(0.95, 0.1)), "within noise"),
        (gain(Ratio(0.9, 0.01), p99=1.2), "TTFT p99 pays for it"),
        (gain(Ratio(0.9, 0.01), itl=1.2), "ITL p99 pays for it"),
        (gain(Ratio(0.9, 0.01), p99=1.05), ""),
        (gain(Ratio(0.95, 0.1), runs=100), ""),
    ],
)
def test_small_uncertain_or_costly_advice_is_left_out(expected: Gain, reason: str) -> None:
    """Three percent, two standard errors, and nothing else that pays more."""
    assert why_not_given(expected) == reason


def halves(count: int, factor: float = 0.8) -> list[tuple[Figures, Figures]]:
    """Equal pairs of halves."""
    return [(Figures(1.0, 2.0, 3.0, 0.1), Figures(factor, 2.0, 3.0, 0.1))] * count


@pytest.mark.parametrize(
    ("pairs", "fit", "confidence"),
    [
        (halves(6), FIT, Confidence.HIGH),
        (halves(6), Fit(1.2, 1.0, 0.5, None, 2000, 3600.0), Confidence.MEDIUM),
        (halves(6), Fit(1.0, 1.0, 0.5, None, 300, 3600.0), Confidence.LOW),
        (halves(2), FIT, Confidence.LOW),
        ([*halves(3), *halves(3, 1.6)], FIT, Confidence.LOW),
    ],
)
def test_confidence_needs_runs_traffic_and_a_model_that_fits(
    pairs: list[tuple[Figures, Figures]], fit: Fit, confidence: Confidence
) -> None:
    """And runs that agree."""
    found = compute_gain(pairs, fit)
    assert found.confidence is confidence
    assert found.runs == len(pairs)


def test_a_flag_is_spelled_for_its_engine() -> None:
    """With its value; nothing where the engine has none, vLLM's where it is not known."""
    assert spell_flag(Setting.SEQUENCES, EngineKind.SGLANG, 256) == "--max-running-requests 256"
    assert spell_flag(Setting.LONG_PREFILL, EngineKind.SGLANG, 1024) == ""
    assert spell_flag(Setting.SCHEDULING, EngineKind.UNKNOWN) == "--scheduling-policy priority"
    assert '{"enable_kv_cache_events": true' in spell_flag(Setting.KV_EVENTS, EngineKind.VLLM)
    assert spell_flag(Setting.POLICY, EngineKind.VLLM) == ""
