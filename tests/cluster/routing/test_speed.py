"""The learned speeds: right from wrong priors, robust against wrong samples, bounded."""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest

from kvproxy.base.types import EndpointId, LowerTokens, Tier, count_lower
from kvproxy.cluster.routing.onboarding import OnboardingCosts
from kvproxy.cluster.routing.speeds import FactorState, SpeedModel, SpeedPriors, SpeedState
from kvproxy.cluster.routing.work import features_of, seconds_of

TRUTH = (0.02, 1 / 10_000, 1 / (10_000 * 32_000), 0.0)
FAST, SLOW = EndpointId("fast"), EndpointId("slow")


def teach(model: SpeedModel, endpoint: EndpointId, factor: float, *, samples: int, start: float = 0.0) -> float:
    """Show the model true samples of one endpoint; returns the time afterwards."""
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
    assert estimates.onboarding_s_per_token == {}


def test_onboarding_is_measured_from_first_tokens() -> None:
    """Each tier gets its price, on each endpoint its own, and the prefill speeds stay what they are."""
    model, rng, now = SpeedModel(), Random(3), 0.0
    prices = {(FAST, Tier.HOST): 1e-5, (FAST, Tier.DISK): 6e-5, (SLOW, Tier.HOST): 4e-5}
    for _ in range(1600):
        now += 1.0
        (endpoint, tier), price_s = rng.choice(list(prices.items()))
        lower = ((tier, rng.choice([8000, 16_000])),) if rng.random() < 0.5 else ()
        work = features_of(rng.randrange(50, 4000), 20_000, model.onboarding_s(endpoint, lower))
        model.observe(endpoint, work, seconds_of((*work[:3], 0.0), TRUTH) + lower_s(lower, price_s), now, lower=lower)
    known = model.estimates(now).onboarding_of
    for (endpoint, tier), price_s in prices.items():
        assert 0.7 * price_s < known[endpoint][tier] < 1.4 * price_s
    assert model.estimates(now).tokens_per_s == pytest.approx(10_000, rel=0.25)


def lower_s(lower: LowerTokens, price_s: float) -> float:
    """At this price."""
    return count_lower(lower) * price_s


def test_onboarding_begins_at_the_weights() -> None:
    """Of what computing costs, a tier saves its weight; what has none is as good as the engine's own memory."""
    costs = OnboardingCosts({Tier.HOST: 0.75, Tier.DISK: 0.25, Tier.SHARED: 1.0})
    prices = [costs.seconds_per_token(FAST, tier, 1e-4) for tier in (Tier.HOST, Tier.DISK, Tier.SHARED)]
    assert prices == pytest.approx([0.25e-4, 0.75e-4, 0.0])
    assert costs.onboarding_s(FAST, ((Tier.HOST, 100), (Tier.DISK, 10)), 1e-4) == pytest.approx(0.0025 + 0.00075)


def test_onboarding_is_never_dearer_than_computing() -> None:
    """Nor does it ever pay to bring tokens up."""
    costs, token_s, host = OnboardingCosts(), 1e-4, ((Tier.HOST, 8000),)
    for _ in range(200):
        costs.observe(FAST, host, -5.0, token_s)
    assert 0.0 <= costs.seconds_per_token(FAST, Tier.HOST, token_s) < 0.1 * token_s
    for _ in range(2000):
        costs.observe(FAST, host, 99.0, token_s)
    assert costs.seconds_per_token(FAST, Tier.HOST, token_s) == pytest.approx(token_s, rel=0.05)


def test_false_placements_do_not_make_a_tier_dear() -> None:
    """A fifth of what was believed to be there is computed after all; the price is that of the others, nearly."""
    costs, token_s, price_s, rng = OnboardingCosts(), 1e-4, 7e-6, Random(5)
    for _ in range(1000):
        took_s = token_s if rng.random() < 0.2 else price_s
        costs.observe(FAST, ((Tier.HOST, 8000),), 8000 * took_s, token_s)
    assert costs.seconds_per_token(FAST, Tier.HOST, token_s) < 2.0 * price_s


def test_a_new_endpoint_begins_with_the_pools_speeds() -> None:
    """It need not pay for it again; one that left is forgotten."""
    costs, token_s, host = OnboardingCosts(), 1e-4, ((Tier.HOST, 8000),)
    for _ in range(200):
        costs.observe(FAST, host, 8000 * 5e-6, token_s)
    assert costs.seconds_per_token(SLOW, Tier.HOST, token_s) == pytest.approx(5e-6, rel=0.2)
    costs.forget(FAST)
    assert costs.known(token_s) == {}


def test_onboarding_prices_are_bounded_in_number() -> None:
    """Endpoints beyond the bound pay the pool's."""
    costs = OnboardingCosts(max_endpoints=2)
    for number in range(5):
        costs.observe(EndpointId(f"e{number}"), ((Tier.HOST, 100),), 0.01, 1e-4)
    assert list(costs.known(1e-4)) == ["e0", "e1"]


def learned() -> tuple[SpeedModel, float]:
    """Return a model of two endpoints, one of them slow and with lower tiers."""
    model = SpeedModel()
    now = teach(model, FAST, 1.0, samples=50)
    now = teach(model, SLOW, 3.0, samples=50, start=now)
    model.observe(SLOW, features_of(500, 4000), 1.0, now, lower=((Tier.DISK, 4000),))
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
    """Samples of an endpoint fade; those of the pool stay."""
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
        {"onboarding": {"": {Tier.HOST: (1.0, -1.0)}}},
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
