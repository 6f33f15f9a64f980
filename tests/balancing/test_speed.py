"""The learned speeds: right from wrong priors, robust against wrong samples, bounded."""

from __future__ import annotations

from random import Random

import pytest

from kvproxy.balancing.load import features_of, seconds_of
from kvproxy.balancing.onboarding import OnboardingCost
from kvproxy.balancing.speed import SpeedModel, SpeedPriors
from kvproxy.types import EndpointId

TRUTH = (0.02, 1 / 10_000, 1 / (10_000 * 32_000), 0.0)
FAST, SLOW = EndpointId("fast"), EndpointId("slow")


def teach(model: SpeedModel, endpoint: EndpointId, factor: float, *, samples: int, start: float = 0.0) -> float:
    """Shows the model true samples of one endpoint; the time afterwards."""
    rng, now = Random(7), start
    for _ in range(samples):
        work = features_of(rng.randrange(50, 20_000), rng.choice([0, 4000, 60_000]))
        now += 1.0
        model.observe(endpoint, work, factor * seconds_of(work, TRUTH), now)
    return now


@pytest.mark.parametrize("wrong_by", [0.25, 1.0, 4.0])
def test_learns_the_speeds_from_wrong_priors(wrong_by: float) -> None:
    """Priors wrong by four either way: long prompts within 5 % of the truth after 300 samples, short ones near it."""
    model = SpeedModel(SpeedPriors(tokens_per_s=10_000 * wrong_by, quadratic_tokens=32_000, request_s=0.01))
    now = teach(model, FAST, 1.0, samples=300)
    for uncached, cached, tolerance in ((500, 0, 0.25), (4000, 30_000, 0.05), (20_000, 0, 0.05)):
        work = features_of(uncached, cached)
        believed = seconds_of(work, model.seconds) * model.slowness(FAST, now)
        assert believed == pytest.approx(seconds_of(work, TRUTH), rel=tolerance)


def test_tells_slow_endpoints_from_fast_ones() -> None:
    """One log factor an endpoint, relative to the pool."""
    model = SpeedModel()
    now = 0.0
    for _ in range(60):
        now = teach(model, FAST, 1.0, samples=3, start=now)
        now = teach(model, SLOW, 3.0, samples=3, start=now)
    assert model.slowness(SLOW, now) / model.slowness(FAST, now) == pytest.approx(3.0, rel=0.15)
    assert model.slowness(SLOW, now) > 1.0 > model.slowness(FAST, now)


def test_an_endpoint_without_samples_falls_back_to_the_pool() -> None:
    """Half of the log factor is left after two minutes; an unknown endpoint is average."""
    model = SpeedModel()
    now = teach(model, FAST, 1.0, samples=50)
    now = teach(model, SLOW, 3.0, samples=50, start=now)
    assert model.slowness(SLOW, now + 120.0) == pytest.approx(model.slowness(SLOW, now) ** 0.5)
    assert model.slowness(EndpointId("new"), now) == 1.0


def test_one_wild_sample_moves_little() -> None:
    """A pause of minutes is clipped to three times the expected."""
    model = SpeedModel()
    now = teach(model, FAST, 1.0, samples=200)
    before = seconds_of(features_of(4000, 0), model.seconds)
    model.observe(FAST, features_of(100, 0), 600.0, now)
    assert seconds_of(features_of(4000, 0), model.seconds) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("busy_s", [0.0, -1.0])
def test_impossible_samples_are_ignored(busy_s: float) -> None:
    """A clock that stood still teaches nothing."""
    model = SpeedModel()
    model.observe(FAST, features_of(100, 0), busy_s, 1.0)
    model.observe(FAST, (0.0, 0.0, 0.0, 0.0), 1.0, 1.0)
    assert model.estimates(1.0).samples == 0


def test_forgotten_endpoints_are_average_again() -> None:
    """Endpoints come and go."""
    model = SpeedModel()
    now = teach(model, SLOW, 3.0, samples=20)
    teach(model, FAST, 1.0, samples=20, start=now)
    model.forget(SLOW)
    model.forget(SLOW)
    assert model.slowness(SLOW, now) == 1.0
    assert set(model.estimates(now).slowness) == {FAST}


def test_the_number_of_endpoints_is_bounded() -> None:
    """The one without a sample for longest makes room."""
    model = SpeedModel(max_endpoints=2)
    for second, name in enumerate(("a", "b", "a", "c")):
        model.observe(EndpointId(name), features_of(100, 0), 0.1, float(second))
    assert set(model.estimates(4.0).slowness) == {"a", "c"}


def test_estimates_speak_in_units_people_know() -> None:
    """Tokens a second and the depth at which attention doubles the time."""
    estimates = SpeedModel(SpeedPriors(request_s=0.02, tokens_per_s=5000, quadratic_tokens=16_000)).estimates(0.0)
    assert estimates.request_s == pytest.approx(0.02)
    assert estimates.tokens_per_s == pytest.approx(5000)
    assert estimates.quadratic_tokens == pytest.approx(16_000)
    assert estimates.onboarding_s_per_token == 0.0


def test_onboarding_is_measured_from_first_tokens() -> None:
    """Lower-tier tokens get their price, never above it, and the prefill speeds stay what they are."""
    model, rng, now, price_s = SpeedModel(), Random(3), 0.0, 2e-5
    for _ in range(800):
        now += 1.0
        lower = rng.choice([0, 0, 8000, 16_000])
        work = features_of(rng.randrange(50, 4000), 20_000, lower)
        model.observe(FAST, work, seconds_of(work, TRUTH) + lower * price_s, now)
    assert 0.6 * price_s < model.estimates(now).onboarding_s_per_token < 1.1 * price_s
    assert model.estimates(now).tokens_per_s == pytest.approx(10_000, rel=0.25)


def test_onboarding_is_free_until_measured_and_never_dearer_than_computing() -> None:
    """Too cheap a belief costs little, too dear a lot."""
    cost = OnboardingCost()
    assert cost.seconds_per_token == 0.0
    cost.observe(1000, -5.0, 0.1)
    assert cost.seconds_per_token == 0.0
    for _ in range(2000):
        cost.observe(1000, 99.0, 0.1)
    assert cost.seconds_per_token < 0.1 / 1000
