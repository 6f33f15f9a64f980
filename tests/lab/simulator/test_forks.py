"""Choices of one request that share their prompt's blocks and copy the last one on write."""

from __future__ import annotations

from random import Random

import pytest

from kvproxy.lab.simulator.block_cache import BlockCache
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import EngineOutput, EngineSettings, Finished, FirstToken, Preempted, SimRequest
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.tokenizer import hash_blocks

SIZE = 16
TIMING = EngineTiming(prefill_tokens_per_s=1000, quadratic_tokens=1e9, decode_step_s=0.01, decode_sequence_s=0,
                      decode_resident_block_s=0)  # fmt: skip


def engine(blocks: int = 100, *, copy_on_write: bool = True, sequences: int = 8) -> Engine:
    settings = EngineSettings(blocks, SIZE, max_batched_tokens=64, max_sequences=sequences, timing=TIMING,
                              token_outputs=True, copy_on_write=copy_on_write)  # fmt: skip
    return Engine(settings)


def choices(name: str, prompt: int, output: int, count: int = 3) -> list[SimRequest]:
    """Of one prompt, with an answer each."""
    asked = []
    for choice in range(count):
        ids = [hash(name) % 1000, *range(prompt - 1), *(10_000 * (choice + 1) + token for token in range(output))]
        first = f"{name}-0" if choice else ""
        asked.append(
            SimRequest(f"{name}-{choice}", hash_blocks(ids, SIZE, lora=None, salt=None), prompt, output, copy_of=first)
        )
    return asked


def submit(subject: Engine, asked: list[SimRequest], now: float = 0.0) -> None:
    for request in asked:
        subject.submit(request, now)


def cache_of(subject: Engine) -> BlockCache:
    return subject._own


def in_use(subject: Engine) -> int:
    cache = cache_of(subject)
    return cache.capacity_blocks - cache.free_blocks


def run(subject: Engine, until: float = 100.0) -> list[EngineOutput]:
    return subject.advance(until)


def test_three_choices_share_a_prompts_blocks_and_each_choices_own_count() -> None:
    """Of 40 tokens three blocks, in which all begin; the third is copied for two of them by the next token."""
    subject = engine()
    submit(subject, choices("a", 40, 30))
    first = [one for one in subject.advance(0.041) if isinstance(one, FirstToken)]
    assert {one.request_id: one.at for one in first} == pytest.approx({f"a-{choice}": 0.04 for choice in range(3)})
    assert (in_use(subject), subject.load.running) == (3, 3)
    subject.advance(0.055)
    assert in_use(subject) == 2 + 3
    subject.advance(0.04 + 28.5 * 0.01)
    assert in_use(subject) == 2 + 3 * 3
    done = [one for one in run(subject) if isinstance(one, Finished)]
    assert [one.output_tokens for one in done] == [30, 30, 30]
    assert in_use(subject) == 0


def test_each_answer_can_be_found_again() -> None:
    """What a choice wrote behind the shared prompt is its own."""
    subject, asked = engine(), choices("a", 40, 30)
    submit(subject, asked)
    run(subject)
    for request in asked:
        assert subject.cached_prefix_blocks(SimRequest("x", request.block_hashes, 70, 1)) == 4


def test_a_prompt_of_whole_blocks_is_never_copied() -> None:
    subject = engine()
    submit(subject, choices("a", 48, 3))
    subject.advance(0.065)
    assert in_use(subject) == 3 + 3


def test_without_it_each_choice_computes_the_last_block() -> None:
    """As vLLM's choices, which are requests of their own."""
    subject = engine(copy_on_write=False)
    submit(subject, [SimRequest(one.id, one.block_hashes, 40, 30) for one in choices("a", 40, 30)])
    first = [one for one in subject.advance(0.3) if isinstance(one, FirstToken)]
    assert max(one.at for one in first) > 0.04
    assert len({one.cached_tokens for one in first}) == 2


def test_copies_of_a_request_that_is_cancelled_go_on_by_themselves() -> None:
    subject = engine()
    submit(subject, choices("a", 100, 5))
    subject.cancel("a-0", 0.01)
    done = {one.request_id for one in run(subject) if isinstance(one, Finished)}
    assert (done, in_use(subject)) == ({"a-1", "a-2"}, 0)


def test_a_copy_that_is_cancelled_while_it_waits_is_gone() -> None:
    subject = engine()
    submit(subject, choices("a", 100, 5))
    assert subject.cancel("a-1", 0.01)
    done = {one.request_id for one in run(subject) if isinstance(one, Finished)}
    assert (done, in_use(subject)) == ({"a-0", "a-2"}, 0)


def test_a_copy_without_a_slot_waits_and_finds_the_prompt_cached() -> None:
    subject = engine(sequences=2)
    submit(subject, choices("a", 100, 5))
    outputs = run(subject)
    found = {one.request_id: one.cached_tokens for one in outputs if isinstance(one, FirstToken)}
    assert found == {"a-0": 0, "a-1": 0, "a-2": 96}
    assert in_use(subject) == 0


@pytest.mark.parametrize("seed", range(6))
def test_no_block_is_lost_and_no_answer_when_memory_is_short(seed: int) -> None:
    """Choices of several prompts that have to start over for each other, some of them cancelled on the way."""
    rng, subject = Random(seed), engine(14)
    asked = [one for number in range(12) for one in choices(f"r{number}", rng.randint(20, 90), rng.randint(2, 40))]
    submit(subject, asked)
    outputs, now, cancelled = [], 0.0, set()
    for request in rng.sample(asked, 8):
        now += rng.uniform(0.0, 0.3)
        outputs += subject.advance(now)
        if subject.cancel(request.id, now):
            cancelled.add(request.id)
    outputs += run(subject)
    done = [one.request_id for one in outputs if isinstance(one, Finished)]
    assert sorted([*done, *cancelled]) == sorted(one.id for one in asked)
    assert any(isinstance(one, Preempted) for one in outputs)
    assert in_use(subject) == 0
