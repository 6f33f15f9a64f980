"""The order in which an engine admits and gives up sequences, and the bounds that no step exceeds."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproxy.lab.simulator.block_cache import BlockCache
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import (
    EngineOutput,
    EngineSettings,
    Finished,
    FirstToken,
    Preempted,
    Scheduling,
    SimRequest,
)
from kvproxy.lab.simulator.scheduler import Batch, Scheduler, SequenceMemory
from kvproxy.lab.simulator.sequence import Sequence, WaitingLine
from tests.support.examples import examples

SMALL = EngineSettings(capacity_blocks=64, block_size=16, max_batched_tokens=64, max_sequences=8)
BY_PRIORITY = replace(SMALL, scheduling=Scheduling.PRIORITY)


def work(name: str, prompt_tokens: int = 16, output_tokens: int = 1, *, priority: int = 0) -> SimRequest:
    """Return a request with a prompt of its own."""
    chain = crc32(name.encode()) * 1000
    return SimRequest(name, range(chain, chain + prompt_tokens // 16), prompt_tokens, output_tokens, priority=priority)


def run(engine: Engine) -> list[EngineOutput]:
    """Event by event until the engine is idle."""
    outputs: list[EngineOutput] = []
    while (moment := engine.next_event_at()) is not None:
        outputs += engine.advance(moment)
    return outputs


def admissions(outputs: list[EngineOutput]) -> list[str]:
    """Names in order of admission; those of one step in order of submission."""
    return [each.request_id for each in sorted(
        (output for output in outputs if isinstance(output, FirstToken)), key=lambda first: first.admitted_at
    )]  # fmt: skip


def busy(settings: EngineSettings) -> Engine:
    """One slot, and something in it."""
    engine = Engine(replace(settings, max_sequences=1))
    engine.submit(work("running", 16, 20, priority=9), 0.0)
    return engine


def test_the_lowest_priority_is_admitted_first() -> None:
    """Ties go by arrival; what runs goes on, however late it would be by its number."""
    engine = busy(BY_PRIORITY)
    for at, (name, priority) in enumerate([("c", 5), ("a", -3), ("d", 5), ("b", 2)], start=1):
        engine.submit(work(name, priority=priority), at / 1000)
    assert admissions(run(engine)) == ["running", "a", "b", "c", "d"]


def test_a_priority_says_nothing_to_an_engine_that_goes_by_arrival() -> None:
    """As vLLM under fcfs: accepted, without effect."""
    engine = busy(SMALL)
    for at, (name, priority) in enumerate([("c", 5), ("a", -3)], start=1):
        engine.submit(work(name, priority=priority), at / 1000)
    assert admissions(run(engine)) == ["running", "c", "a"]


def preempted_by(settings: EngineSettings, priorities: tuple[int, int]) -> set[str]:
    """Of two sequences that outgrow the memory, those that started over."""
    engine = Engine(replace(settings, capacity_blocks=8))
    for name, at, priority in (("old", 0.0, priorities[0]), ("young", 0.001, priorities[1])):
        engine.submit(work(name, 48, 60, priority=priority), at)
    outputs = run(engine)
    assert {output.request_id for output in outputs if isinstance(output, Finished)} == {"old", "young"}
    return {output.request_id for output in outputs if isinstance(output, Preempted)}


@pytest.mark.parametrize(
    ("settings", "priorities", "victim"),
    [
        (SMALL, (9, 1), "young"),
        (BY_PRIORITY, (9, 1), "old"),
        (BY_PRIORITY, (1, 9), "young"),
        (BY_PRIORITY, (4, 4), "young"),
    ],
)
def test_memory_is_taken_from_the_last_in_the_engines_order(
    settings: EngineSettings, priorities: tuple[int, int], victim: str
) -> None:
    """The newest runner under fcfs; under priority the greatest number, then the latest arrival."""
    assert preempted_by(settings, priorities) == {victim}


def test_the_preempted_wait_in_front_under_fcfs_and_by_their_number_under_priority() -> None:
    """vLLM puts them at the head of its deque, but back into the heap."""
    orders = {}
    for scheduling in Scheduling:
        line = WaitingLine(scheduling)
        fresh, older, newer = (Sequence(work(n, priority=p), at) for n, p, at in (("fresh", 1, 3.0), ("older", 7, 1.0),
                                                                                ("newer", 8, 2.0)))  # fmt: skip
        line.add(fresh)
        line.put_back(newer)
        line.put_back(older)
        order = []
        while line:
            order.append(line.first().request.id)
            line.remove(line.first())
        orders[scheduling] = order
    assert orders == {Scheduling.FCFS: ["older", "newer", "fresh"], Scheduling.PRIORITY: ["fresh", "older", "newer"]}


def test_the_line_forgets_those_that_leave_it() -> None:
    """Cancelled in the middle, they are neither first nor counted, nor kept for ever."""
    line = WaitingLine(Scheduling.PRIORITY)
    sequences = [Sequence(work(str(number), priority=number), 0.0) for number in range(100)]
    for sequence in sequences:
        line.add(sequence)
    for sequence in sequences[1:]:
        line.remove(sequence)
        line.remove(sequence)
    assert len(line) == 1
    assert line.first() is sequences[0]


def test_a_long_prompt_leaves_room_for_others_only_where_there_are_any() -> None:
    """`long_prefill_token_threshold` is lifted for a prompt that is alone, as in vLLM 0.32."""
    threshold = replace(SMALL, long_prefill_token_threshold=16)
    alone, shared, plain = Engine(threshold), Engine(threshold), Engine(SMALL)
    for engine in (alone, shared, plain):
        engine.submit(work("long", 640), 0.0)
    shared.submit(work("short", 32), 0.0)
    plain.submit(work("short", 32), 0.0)
    run(alone)
    assert alone.scheduler.counters.steps == 10
    order = [output.request_id for output in run(shared) if isinstance(output, FirstToken)]
    assert order == ["short", "long"]
    assert [output.request_id for output in run(plain) if isinstance(output, FirstToken)] == ["long", "short"]


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 300),  # prompt
        st.integers(1, 60),  # output
        st.integers(-3, 3),  # priority
        st.floats(0.0, 0.3),  # until the next
        st.integers(0, 4),  # conversation
        st.booleans(),  # cancelled on the way
    ),
    min_size=1,
    max_size=30,
)
SETTINGS = st.builds(
    EngineSettings,
    capacity_blocks=st.integers(23, 60),  # the longest of the requests fits
    block_size=st.just(16),
    max_sequences=st.integers(1, 6),
    max_batched_tokens=st.integers(7, 200),
    scheduling=st.sampled_from(Scheduling),
    long_prefill_token_threshold=st.sampled_from([0, 5, 40]),
    token_outputs=st.booleans(),
)


class WatchedScheduler(Scheduler):
    """Checks each step it plans."""

    def plan(self, now: float) -> Batch:
        waiting = dict(self.waiting_by_name())
        batch = super().plan(now)
        limits = self._settings
        assert len(self.running) <= limits.max_sequences
        assert batch.decodes + sum(tokens for _, tokens in batch.chunks) <= limits.max_batched_tokens
        assert all(tokens > 0 for _, tokens in batch.chunks)
        held = {block for sequence in self.running.values() for block in sequence.blocks}
        assert self.cache.free_blocks == limits.capacity_blocks - len(held)
        assert self.cache.free_blocks >= batch.reserved_blocks
        assert not batch.preempted or not any(name in self.running for name in waiting)
        if limits.scheduling is Scheduling.PRIORITY:
            admitted = [sequence.urgency for name, sequence in waiting.items() if name in self.running]
            left = [sequence.urgency for name, sequence in waiting.items() if name not in self.running]
            assert not admitted or not left or max(admitted) <= min(left)
        return batch

    def waiting_by_name(self) -> dict[str, Sequence]:
        return self.waiting._waiting


class WatchedEngine(Engine):
    """An engine whose every step is checked."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        memory = SequenceMemory(settings, BlockCache(settings.capacity_blocks))
        self.scheduler = WatchedScheduler(settings, memory)


@settings(max_examples=examples(150))
@given(settings=SETTINGS, requests=REQUESTS)
def test_no_step_exceeds_slots_tokens_or_memory_and_every_request_ends(
    settings: EngineSettings, requests: list[tuple[int, int, int, float, int, bool]]
) -> None:
    """Whatever comes: within the bounds, in order of priority, each request ends once and leaves nothing behind."""
    engine, outputs, now = WatchedEngine(settings), list[EngineOutput](), 0.0
    expected = {}
    for number, (prompt, output, priority, gap, chain, cancelled) in enumerate(requests):
        now += gap
        outputs += engine.advance(now)
        hashes = range(chain * 1000, chain * 1000 + prompt // 16)
        engine.submit(SimRequest(str(number), hashes, prompt, output, priority=priority), now)
        expected[str(number)] = output
        if cancelled and engine.cancel(str(number - 1), now):
            del expected[str(number - 1)]
    outputs += run(engine)
    ends = [each for each in outputs if isinstance(each, Finished)]
    assert {each.request_id: each.output_tokens for each in ends} == expected
    assert len(ends) == len(expected)
    assert (engine.load.running, engine.load.waiting, engine.load.kv_usage) == (0, 0, 0.0)
