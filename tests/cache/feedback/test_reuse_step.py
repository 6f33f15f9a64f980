"""The step in which an engine reuses: found from few reuses, not from ordinary blocks, losses or noise."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from kvproxy.cache.feedback import reuse_step
from kvproxy.cache.feedback.reuse_step import ReuseSteps
from tests.cache.support import A, B

STEP = 4096


class Learner:
    """Reuses of one endpoint, as the engine of some step would report them."""

    def __init__(self, *, seed: int = 1) -> None:
        self.steps = ReuseSteps()
        self.rng = random.Random(seed)

    @property
    def step(self) -> int:
        """The step known; 1: none."""
        return self.steps.known.get(A, 1)

    def reuse(self, held: int, cached: int, prefix: int | None = None) -> None:
        prefix = self.rng.getrandbits(60) if prefix is None else prefix
        self.steps.observe_reuse(A, held_tokens=held, cached_tokens=cached, blocks=[prefix])

    def serve(self, engine_step: int, held: Iterable[int]) -> None:
        """Prompts of which so much is held, each of a prefix of its own."""
        for tokens in held:
            self.reuse(tokens, tokens - tokens % engine_step)

    def lengths(self, count: int, least: int = 1_000, most: int = 30_000) -> list[int]:
        return [self.rng.randint(least, most) for _ in range(count)]


@pytest.fixture
def learner() -> Learner:
    return Learner()


@pytest.mark.parametrize("step", [512, 1056, 2048, STEP, 8192])
@pytest.mark.parametrize("seed", range(5))
def test_a_step_is_found_within_a_few_dozen_reuses(step: int, seed: int) -> None:
    """Whatever its length: block sizes of hybrid models are no powers of two."""
    learner = Learner(seed=seed)
    learner.serve(step, learner.lengths(60, least=step // 2, most=5 * step))
    assert learner.step == step


@pytest.mark.parametrize("block", [1, 16, 32, 64])
@pytest.mark.parametrize("bias", [0.7, 1.0, 1.3])
def test_ordinary_blocks_are_no_step(block: int, bias: float) -> None:
    """Not even where the held length is always estimated too large, so that every reuse falls short."""
    learner = Learner()
    for tokens in learner.lengths(2000):
        learner.reuse(int(tokens * bias), tokens - tokens % block)
        assert learner.step == 1


@pytest.mark.parametrize("seed", range(10))
def test_evictions_are_no_step(seed: int) -> None:
    """The engine lost some tail of what it held, at any block of 16 tokens."""
    learner = Learner(seed=seed)
    for tokens in learner.lengths(2000):
        learner.reuse(tokens, learner.rng.randrange(0, tokens, 16))
        assert learner.step == 1


def test_a_shared_beginning_that_alone_survives_is_no_step(learner: Learner) -> None:
    """Every session's own tail was evicted, the system prompt of 4,512 tokens was not."""
    for tokens in learner.lengths(500, least=5_000, most=9_000):
        learner.reuse(tokens, 4_512, prefix=7)
    assert learner.step == 1


def test_one_length_proves_nothing(learner: Learner) -> None:
    """Prompts made alike, reused alike."""
    for _ in range(500):
        learner.reuse(6_000, 4_096)
    assert learner.step == 1


def test_too_few_reuses_prove_nothing(learner: Learner) -> None:
    learner.serve(STEP, [6_000, 10_000, 15_000, 7_500, 11_000, 20_000, 5_500])
    assert learner.step == 1
    learner.serve(STEP, [11_000])
    assert learner.step == STEP


def test_reuse_again_of_one_prefix_counts_once(learner: Learner) -> None:
    for _ in range(20):
        learner.reuse(6_000, 4_096, prefix=1)
        learner.reuse(11_000, 8_192, prefix=1)
    assert learner.step == 1


def test_nothing_reused_says_nothing(learner: Learner) -> None:
    """A prompt shorter than a step looks like one that was lost."""
    learner.serve(STEP, [6_000, 10_000, 15_000, 7_500, 11_000, 20_000, 5_500])
    for tokens in learner.lengths(100, least=600, most=4_000):
        learner.reuse(tokens, 0)
    learner.serve(STEP, [11_000])
    assert learner.step == STEP


def test_a_multiple_of_the_step_is_corrected(learner: Learner) -> None:
    """All prompts so far happened to be held to an even number of steps."""
    learner.serve(2 * STEP, [9_900, 18_000, 12_000, 14_000, 13_000, 22_000, 11_000, 20_000])
    assert learner.step == 2 * STEP
    learner.serve(STEP, [13_000, 5_000])
    assert learner.step == STEP


def test_a_single_odd_reuse_changes_nothing(learner: Learner) -> None:
    """Another engine behind the address, or blocks loaded from elsewhere."""
    learner.serve(STEP, learner.lengths(60))
    for _ in range(10):
        learner.reuse(9_000, 8_784)
        learner.serve(STEP, learner.lengths(20, least=STEP))
        assert learner.step == STEP


def test_a_step_is_found_in_spite_of_losses(learner: Learner) -> None:
    """One reuse in ten falls short for another reason."""
    for _ in range(30):
        learner.serve(STEP, learner.lengths(9, least=STEP))
        learner.reuse(9_000, 16 * learner.rng.randrange(1, 200))
    assert learner.step in (1, STEP)
    learner.serve(STEP, learner.lengths(20, least=STEP))
    assert learner.step == STEP


@pytest.mark.parametrize(("before", "after"), [(4096, 1024), (4096, 528), (1024, 4096), (4096, 16)])
def test_a_restart_with_another_setting_is_noticed(before: int, after: int, learner: Learner) -> None:
    """Whatever the engine reused in from now on."""
    learner.serve(before, learner.lengths(60))
    assert learner.step == before
    learner.serve(after, learner.lengths(60))
    assert learner.step == (after if after >= reuse_step.LEAST_STEP_TOKENS else 1)


def test_a_told_block_is_a_step_at_once(learner: Learner) -> None:
    learner.steps.tell_block_size(A, 1056)
    assert learner.step == 1056
    learner.serve(4 * 1056, learner.lengths(60))
    assert learner.step == 4 * 1056
    learner.steps.tell_block_size(A, 1056)  # the next scrape
    assert learner.step == 4 * 1056


def test_ordinary_told_blocks_are_no_step(learner: Learner) -> None:
    for block in (16, 32, 64):
        learner.steps.tell_block_size(A, block)
    assert learner.step == 1
    learner.serve(STEP, learner.lengths(60))
    learner.steps.tell_block_size(A, 64)
    assert learner.step == STEP


def test_a_told_block_that_reuse_contradicts_is_no_step(learner: Learner) -> None:
    """Blocks may be reused in part."""
    learner.steps.tell_block_size(A, 1056)
    learner.serve(16, learner.lengths(3))
    assert learner.step == 1
    learner.steps.tell_block_size(A, 1056)
    assert learner.step == 1


def test_a_told_block_of_another_size_begins_again(learner: Learner) -> None:
    learner.steps.tell_block_size(A, 1056)
    learner.steps.tell_block_size(A, 16)
    assert learner.step == 1


def test_endpoints_are_apart_and_forgotten(learner: Learner) -> None:
    learner.steps.tell_block_size(B, 528)
    learner.serve(STEP, learner.lengths(60))
    assert learner.steps.known == {A: STEP, B: 528}
    learner.steps.forget_endpoint(A)
    learner.steps.forget_endpoint(A)
    assert learner.steps.known == {B: 528}


def test_the_number_of_endpoints_is_bounded(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_step, "MAX_ENDPOINTS", 1)
    learner.steps.tell_block_size(B, 528)
    learner.steps.tell_block_size(A, 528)
    assert learner.steps.known == {A: 528}
