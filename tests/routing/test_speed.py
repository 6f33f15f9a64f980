"""The learned speeds: right from wrong priors, robust against wrong samples, bounded."""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest

from kvproxy.routing.speeds import FactorState, OnboardingCost, SpeedModel, SpeedPriors, SpeedState
from kvproxy.routing.work import features_of, seconds_of
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


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_an_endpoint_is_never_believed_beyond_reason(factor: float) -> None:
    """An engine a million times slower or faster is a clock or a measurement gone wrong: at most about twelve times."""
    model, now = SpeedModel(), 0.0
    for _ in range(200):
        now = teach(model, FAST, 1.0, samples=1, start=now)
        now = teach(model, SLOW, factor, samples=1, start=now)
    ratio = model.slowness(SLOW, now) / model.slowness(FAST, now)
    assert abs(math.log(ratio)) <= 5.0


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
    for _ in range(4):  # no sample weighs more than its bound, whichever way it is off
        cost.observe(1000, 0.05, 0.1)
    assert cost.seconds_per_token > 0.0
    for _ in range(2000):
        cost.observe(1000, 99.0, 0.1)
    assert cost.seconds_per_token < 0.1 / 1000


def learned() -> tuple[SpeedModel, float]:
    """A model of two endpoints, one of them slow and with lower tiers."""
    model = SpeedModel()
    now = teach(model, FAST, 1.0, samples=50)
    now = teach(model, SLOW, 3.0, samples=50, start=now)
    model.observe(SLOW, features_of(500, 4000, 4000), 1.0, now)
    return model, now


def resumed(state: SpeedState, now: float, *, keep: tuple[str, ...] = (FAST, SLOW), away_s: float = 0.0) -> SpeedModel:
    model = SpeedModel()
    model.resume(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SpeedState), now, keep=keep, away_s=away_s)
    return model


def test_another_life_goes_on_from_what_was_learned() -> None:
    """The same estimates, and the same ones after the next samples; clocks of two lives have nothing in common."""
    model, now = learned()
    again = resumed(model.state(now), 5.0)
    assert again.estimates(5.0) == model.estimates(now)
    teach(model, FAST, 2.0, samples=5, start=now)
    teach(again, FAST, 2.0, samples=5, start=5.0)
    assert again.seconds == pytest.approx(model.seconds)
    assert again.slowness(FAST, 10.0) == pytest.approx(model.slowness(FAST, now + 5.0))


def test_time_away_counts_as_time_without_samples() -> None:
    """What an endpoint was like fades; what the pool is like stays."""
    model, now = learned()
    again = resumed(model.state(now), 5.0, away_s=120.0)
    assert again.slowness(SLOW, 5.0) == pytest.approx(model.slowness(SLOW, now) ** 0.5)
    assert again.seconds == model.seconds


def test_endpoints_that_are_gone_are_not_taken_over() -> None:
    """Nor would they ever be forgotten: no source says that they left."""
    model, now = learned()
    again = resumed(model.state(now), 5.0, keep=(FAST,))
    assert set(again.estimates(5.0).slowness) == {FAST}


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": (0.01, 0.1, 0.1)},
        {"theta": (1.0, 1.0)},
        {"theta": (1.0, 0.0, 1.0)},
        {"gram": (math.nan,) * 9},
        {"gram": (0.0,) * 9},
        {"moment": (-1.0, 0.0, 0.0)},
        {"moment": (0.0, 0.0, 0.0)},
        {"onboarding": (1.0, -1.0)},
        {"factors": {"fast": FactorState(math.inf, 1, 0.0)}},
        {"factors": {"fast": FactorState(0.0, 1, math.nan)}},
    ],
)
def test_a_state_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    """One bad number would stay in the sums for ever."""
    model, now = learned()
    fresh = SpeedModel()
    with pytest.raises(ValueError, match=r"."):
        fresh.resume(msgspec.structs.replace(model.state(now), **wrong), 0.0, keep=(FAST,), away_s=0.0)
    assert fresh.estimates(0.0) == SpeedModel().estimates(0.0)


def test_a_model_that_learned_nothing_resumes() -> None:
    """A proxy that never saw a first token is restarted as well."""
    assert resumed(SpeedModel().state(0.0), 0.0).estimates(0.0) == SpeedModel().estimates(0.0)
