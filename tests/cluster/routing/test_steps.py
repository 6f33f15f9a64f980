"""Inter-token time over the number of sequences, learned from answers, and what a target makes of it."""

from __future__ import annotations

from random import Random

import pytest

from kvproxy.cluster.routing.engine_samples import MIN_TOKENS, StepModel
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.settings import KvAwareSettings
from tests.cluster.routing.fleet import ask, decode, fleet


def taught(answers: int = 400, *, base_s: float = 0.008, sequence_s: float = 0.0002) -> StepModel:
    """By answers of 200 tokens beside 10 to 100 sequences."""
    model, rng = StepModel(), Random(1)
    for _ in range(answers):
        sequences = rng.randrange(10, 101)
        model.observe_answer(201, 200 * (base_s + sequence_s * sequences), sequences)
    return model


def test_the_line_is_found() -> None:
    """Steps that grow with what takes part in them; a little is left of the belief before."""
    model = taught()
    assert model.sequence_s == pytest.approx(0.0002, rel=0.15)
    assert model.base_s + 55 * model.sequence_s == pytest.approx(0.019, rel=0.05)
    assert model.answer_tokens == pytest.approx(201)


def test_one_load_says_little_of_others() -> None:
    """Always the same number of sequences: a quarter of the step is taken to go with it."""
    model = StepModel()
    for _ in range(300):
        model.observe_answer(101, 100 * 0.020, 50)
    assert model.base_s + 50 * model.sequence_s == pytest.approx(0.020)
    assert model.sequence_s == pytest.approx(0.25 * 0.020 / 50)


@pytest.mark.parametrize(
    ("tokens", "decode_s", "sequences"), [(MIN_TOKENS - 1, 0.1, 3), (50, 0.0, 3), (50, -1.0, 3), (50, 1.0, 0.0)]
)
def test_uninformative_answers_teach_nothing(tokens: int, decode_s: float, sequences: float) -> None:
    """Too short an answer, no time, or no sequence it could have run with."""
    model = StepModel()
    model.observe_answer(tokens, decode_s, sequences)
    assert (model.base_s, model.sequence_s, model.answer_tokens) == (0.0, 0.0, 0.0)


def test_slopes_stay_possible() -> None:
    """Noise cannot make steps shorter by more sequences, nor negative without any."""
    falling, steep = StepModel(), StepModel()
    for n in (10, 20, 30) * 50:
        falling.observe_answer(101, 100 * (0.05 - 0.001 * n), n)
        steep.observe_answer(101, 100 * max(0.0001, 0.01 * (n - 9)), n)
    assert falling.sequence_s == 0.0
    assert steep.base_s >= 0.0


def test_late_is_what_all_answers_take_longer_beyond_the_target() -> None:
    """The one that joins and those it slows down; on a slow endpoint sooner; within the target nothing."""
    model = taught()
    tokens, slope = model.answer_tokens, model.sequence_s
    step_s = model.base_s + 61 * slope
    assert model.late_s(60, 1.0, 0.015) == pytest.approx(tokens * (step_s - 0.015 + 60 * slope))
    assert model.late_s(60, 2.0, 0.015) == pytest.approx(tokens * (2 * step_s - 0.015 + 60 * 2 * slope))
    assert model.late_s(10, 1.0, 0.015) == 0.0


def test_the_one_that_breaks_the_target_breaks_it_for_all() -> None:
    """Just within it before, over it after: every sequence there is late by the little that it is over."""
    model = taught()
    target_s = model.base_s + 60.5 * model.sequence_s
    late_s = model.answer_tokens * 61 * 0.5 * model.sequence_s
    assert model.late_s(60, 1.0, target_s) == pytest.approx(late_s)


def policy(target_itl: float | None) -> KvAware:
    subject = KvAware(rng=Random(1), settings=KvAwareSettings(target_itl=target_itl))
    candidates = fleet(1)
    for n in (10, 50, 100) * 100:
        subject.observe_answer(candidates[0].id, 201, 200 * (0.008 + 0.0002 * n), n, 1.0)
    return subject


def test_a_target_moves_requests_off_a_hot_prefix() -> None:
    """A hundred sequences sit where the prefix is: with a target the request goes where its answer is in time."""
    candidates = fleet(2)
    decode(candidates[0], tokens=4000, times=100)
    request = ask(4100, {"e0": 4000})
    assert policy(None).choose(request, candidates, 1.0).index == 0
    assert policy(0.020).choose(request, candidates, 1.0).index == 1
    assert policy(0.100).choose(request, candidates, 1.0).index == 0


def test_without_a_target_nothing_is_learned_and_nothing_changes() -> None:
    """Costs are the same to the bit, whatever answers ended."""
    taught_policy, fresh = policy(None), KvAware(rng=Random(1))
    candidates = fleet(3)
    decode(candidates[0], tokens=900, times=40)
    for request in (ask(4000, {"e0": 900}), PickRequest()):
        assert taught_policy.choose(request, candidates, 2.0).costs == fresh.choose(request, candidates, 2.0).costs
    assert taught_policy.steps.answer_tokens == 0.0


def test_learned_values_are_shown() -> None:
    """Beside the speeds, for status and receipts."""
    learned = policy(0.05).estimates(1.0)
    assert learned["itl_sequence_s"] == pytest.approx(0.0002, rel=0.15)
    assert learned["answer_tokens"] == pytest.approx(201)
