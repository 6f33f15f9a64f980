"""The continuous-batching engine in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheChanged,
    EngineOutput,
    EngineSettings,
    Finished,
    FirstToken,
    KvEvent,
    Preempted,
    Rejected,
    SimRequest,
    Tokens,
)
from kvproxy.lab.simulator.timing import EngineTiming

SMALL = EngineSettings(capacity_blocks=64, block_size=16, max_batched_tokens=64, max_sequences=8)


def request(name: str, prompt_tokens: int = 40, output_tokens: int = 4, *, chain: int = 0) -> SimRequest:
    """Return a request whose block hashes are those of conversation `chain`."""
    blocks = prompt_tokens // 16
    return SimRequest(name, [chain * 1000 + block + 1 for block in range(blocks)], prompt_tokens, output_tokens)


def run(engine: Engine) -> list[EngineOutput]:
    """Advances event by event until the engine is idle."""
    outputs: list[EngineOutput] = []
    while (moment := engine.next_event_at()) is not None:
        outputs += engine.advance(moment)
    return outputs


def of(outputs: list[EngineOutput], kind: type[EngineOutput], request_id: str = "") -> list[EngineOutput]:
    """Return the outputs of one kind, in order, of one request or of all."""
    chosen = [output for output in outputs if isinstance(output, kind)]
    return [output for output in chosen if not request_id or getattr(output, "request_id", "") == request_id]


def events_of(outputs: list[EngineOutput]) -> list[KvEvent]:
    """Every cache event, in order."""
    return [event for output in outputs if isinstance(output, CacheChanged) for event in output.events]


def first_token(outputs: list[EngineOutput], request_id: str) -> FirstToken:
    """Return the one first token of a request."""
    (output,) = of(outputs, FirstToken, request_id)
    assert isinstance(output, FirstToken)
    return output


def finished(outputs: list[EngineOutput], request_id: str) -> Finished:
    """Return the one finish of a request."""
    (output,) = of(outputs, Finished, request_id)
    assert isinstance(output, Finished)
    return output


def test_one_request_takes_its_prefill_and_its_decode_steps() -> None:
    """TTFT is the prefill alone; each further token is one decode step over a growing context."""
    engine, timing = Engine(SMALL), EngineTiming()
    engine.submit(request("a", 40, 3), 10.0)
    outputs = run(engine)
    ttft = timing.prefill_s(40, 0)
    assert first_token(outputs, "a").at == pytest.approx(10.0 + ttft)
    total = ttft + timing.decode_s(1, 40) + timing.decode_s(1, 41)
    assert finished(outputs, "a").at == pytest.approx(10.0 + total)
    assert finished(outputs, "a").output_tokens == 3


def test_a_short_prefill_takes_a_whole_step() -> None:
    """A forward pass has a floor, unless decodes share it: these take theirs anyway."""
    timing = EngineTiming(prefill_floor_s=0.03)
    engine = Engine(replace(SMALL, timing=timing, token_outputs=True))
    engine.submit(request("a", 40, 3), 0.0)
    assert engine.next_event_at() == 0.03
    engine.advance(0.03)
    engine.submit(request("b", 40, 1, chain=1), 0.03)
    outputs = run(engine)
    shared = timing.decode_s(1, 41) + timing.prefill_s(40, 0)
    assert first_token(outputs, "b").at == pytest.approx(0.03 + timing.decode_s(1, 40) + shared)


def test_a_single_output_token_ends_with_the_prefill() -> None:
    """`max_tokens: 1` never decodes."""
    engine = Engine(SMALL)
    engine.submit(request("a", 40, 1), 0.0)
    outputs = run(engine)
    assert finished(outputs, "a").at == first_token(outputs, "a").at
    assert engine.load.kv_usage == 0.0


def test_the_last_block_of_a_fully_cached_prompt_is_computed_again() -> None:
    """cached_tokens is the block floor of prompt - 1: a 64-token prompt wholly held reports 48."""
    engine = Engine(SMALL)
    for name in ("a", "b"):
        engine.submit(request(name, 64, 1), 0.0)
        outputs = run(engine)
    assert first_token(outputs, "b").cached_tokens == 48
    assert events_of(outputs) == [BlockStored((4,), 3)]


def test_a_hit_publishes_nothing() -> None:
    """A prompt that ends inside a block is served from the cache without a single event."""
    engine = Engine(SMALL)
    engine.submit(request("a", 40, 1), 0.0)
    run(engine)
    engine.submit(request("b", 40, 1), 1.0)
    outputs = run(engine)
    assert first_token(outputs, "b").cached_tokens == 32
    assert events_of(outputs) == []


def test_stores_come_one_event_a_prefill_step() -> None:
    """A prompt longer than the chunk budget is announced chunk by chunk, each naming the block before it."""
    engine = Engine(SMALL)
    engine.submit(request("a", 100, 1), 0.0)
    outputs = run(engine)
    assert events_of(outputs) == [BlockStored((1, 2, 3, 4), None), BlockStored((5, 6), 4)]
    assert [type(output) for output in outputs] == [CacheChanged, CacheChanged, FirstToken, Finished]


def test_decode_announces_each_block_it_fills() -> None:
    """Hashes beyond the prompt name the blocks that generation fills; the newest token has no KV yet."""
    engine = Engine(replace(SMALL, token_outputs=True))
    tokens = tuple(range(100, 100 + 28 + 22))
    engine.submit(SimRequest("a", [1, 2, 3], 28, 22, tokens), 0.0)
    assert events_of(run(engine)) == [
        BlockStored((1,), None, tokens[:16], extra_keys=(None,)),
        BlockStored((2,), 1, tokens[16:32], extra_keys=(None,)),
        BlockStored((3,), 2, tokens[32:48], extra_keys=(None,)),
    ]


def test_salt_marks_the_first_block_and_lora_every_block() -> None:
    """Extra keys as vLLM shows them in its events."""
    engine = Engine(SMALL)
    ids = tuple(range(40))
    engine.submit(SimRequest("s", [1, 2], 40, 1, ids, cache_salt="tenant-a"), 0.0)
    engine.submit(SimRequest("l", [3, 4], 40, 1, ids, lora_id=1, lora_name="lora-a", cache_salt="t"), 0.0)
    salted, adapted = [event for event in events_of(run(engine)) if isinstance(event, BlockStored)]
    assert salted.extra_keys == (("tenant-a",), None)
    assert adapted.extra_keys == (("lora-a", "t"), ("lora-a",))
    assert (adapted.lora_id, adapted.lora_name) == (1, "lora-a")


def test_evictions_precede_the_stores_of_their_step() -> None:
    """One removal a block, tail first, in the same batch as what took the memory."""
    engine = Engine(replace(SMALL, capacity_blocks=4))
    engine.submit(request("a", 50, 1), 0.0)
    run(engine)
    engine.submit(request("b", 33, 1, chain=1), 1.0)
    assert events_of(run(engine)) == [BlockRemoved(3), BlockRemoved(2), BlockStored((1001, 1002), None)]


def test_reset_is_announced_with_the_next_step() -> None:
    """An idle server clears at once and tells no client until it works again."""
    engine = Engine(SMALL)
    engine.submit(request("a", 40, 1), 0.0)
    run(engine)
    assert engine.scheduler.cache.clear()
    assert engine.next_event_at() is None
    engine.submit(request("b", 40, 1), 1.0)
    outputs = run(engine)
    assert first_token(outputs, "b").cached_tokens == 0
    assert events_of(outputs) == [AllBlocksCleared(), BlockStored((1, 2), None)]


def test_decodes_and_a_prompt_share_each_step() -> None:
    """While a long prompt is prefilled in chunks, a running stream still gets one token a step."""
    engine = Engine(replace(SMALL, token_outputs=True))
    engine.submit(request("stream", 16, 20), 0.0)
    engine.advance(first_at := engine.next_event_at() or 0.0)
    engine.submit(request("long", 150, 1, chain=1), first_at)
    outputs = run(engine)
    first = first_token(outputs, "long").at
    before = [o for o in of(outputs, Tokens, "stream") if isinstance(o, Tokens) and o.at <= first]
    assert len(before) >= 3
    assert engine.scheduler.counters.generation_tokens == 21


def test_an_arrival_joins_at_the_end_of_the_step_under_way() -> None:
    """A stretch of pure decoding is cut where the arrival finds it, not run to its end."""
    engine = Engine(SMALL)
    engine.submit(request("a", 16, 200), 0.0)
    engine.advance(0.1)
    engine.submit(request("b", 16, 1, chain=1), 0.1)
    outputs = run(engine)
    admitted = first_token(outputs, "b").admitted_at
    assert 0.1 <= admitted < 0.1 + EngineTiming().decode_s(1, 216)
    assert finished(outputs, "a").output_tokens == 200


def test_late_calls_do_not_admit_before_arrival() -> None:
    """`submit` first lets the past happen: a step that ended before the arrival cannot include it."""
    engine = Engine(SMALL)
    engine.submit(request("a", 60, 30), 0.0)
    engine.submit(request("b", 16, 1, chain=1), 0.15)
    assert first_token(run(engine), "b").admitted_at >= 0.15


@pytest.mark.parametrize("seed", range(4))
def test_jumping_and_stepping_tell_the_same_story(seed: int) -> None:
    """Token by token or in one calculation: the same first tokens, finishes, caches and counters."""
    stories = []
    for token_outputs in (False, True):
        rng = random.Random(seed)
        settings = replace(SMALL, capacity_blocks=40, token_outputs=token_outputs)
        engine, outputs, now = Engine(settings), list[EngineOutput](), 0.0
        for number in range(60):
            now += rng.random() * 0.08
            outputs += engine.advance(now)
            work = request(str(number), rng.randrange(1, 200), rng.randrange(1, 60), chain=rng.randrange(4))
            engine.submit(work, now)
        outputs += run(engine)
        ends = {o.request_id: o.at for o in outputs if isinstance(o, Finished)}
        firsts = {o.request_id: (o.cached_tokens, o.at) for o in outputs if isinstance(o, FirstToken)}
        stories.append(
            (ends, firsts, engine.scheduler.counters.preemptions, events_of(outputs), engine.scheduler.counters.steps)
        )
    jumped, stepped = stories
    assert jumped[0] == pytest.approx(stepped[0])
    assert {k: v[0] for k, v in jumped[1].items()} == {k: v[0] for k, v in stepped[1].items()}
    assert {k: v[1] for k, v in jumped[1].items()} == pytest.approx({k: v[1] for k, v in stepped[1].items()})
    assert jumped[2:] == stepped[2:]
    assert len(jumped[0]) == 60


def test_a_change_of_speed_takes_hold_in_the_middle_of_a_stretch() -> None:
    """Ten times slower from 0.5 s on: what is left takes ten times as long."""
    plain = Engine(SMALL)
    timing = EngineTiming(slowness_changes=((0.5, 10.0),))
    slowed = Engine(replace(SMALL, timing=timing))
    ends = []
    for engine in (plain, slowed):
        engine.submit(request("a", 16, 100), 0.0)
        ends.append(finished(run(engine), "a").at)
    assert ends[1] == pytest.approx(0.5 + (ends[0] - 0.5) * 10, rel=0.1)


def test_waiting_is_first_come_first_served_and_counts() -> None:
    """A head of line that does not fit keeps the others waiting behind it, as in vLLM."""
    engine = Engine(replace(SMALL, capacity_blocks=8))
    engine.submit(request("a", 60, 40), 0.0)
    engine.submit(request("big", 100, 1, chain=1), 0.0)
    engine.submit(request("small", 16, 1, chain=2), 0.0)
    engine.advance(0.05)
    assert (engine.load.running, engine.load.waiting) == (1, 2)
    outputs = run(engine)
    assert first_token(outputs, "big").at >= finished(outputs, "a").at
    assert first_token(outputs, "small").admitted_at >= first_token(outputs, "big").admitted_at


def test_max_sequences_bounds_the_batch() -> None:
    """The ninth of nine small requests waits for a place."""
    engine = Engine(SMALL)
    for number in range(9):
        engine.submit(request(str(number), 1, 30), 0.0)
    engine.advance(0.2)
    assert engine.load.running == 8
    assert engine.load.waiting == 1
    assert len(of(run(engine), Finished)) >= 1


def test_the_newest_runner_starts_over_when_memory_runs_out() -> None:
    """Two growing sequences and room for one: the younger is preempted, recomputed and still finishes in full."""
    engine = Engine(replace(SMALL, capacity_blocks=8))
    engine.submit(request("old", 48, 60), 0.0)
    engine.submit(request("young", 48, 60, chain=1), 0.0)
    outputs = run(engine)
    preempted = [output.request_id for output in outputs if isinstance(output, Preempted)]
    assert preempted
    assert set(preempted) == {"young"}
    assert engine.scheduler.counters.preemptions == len(preempted)
    assert finished(outputs, "young").output_tokens == 60
    assert len(of(outputs, FirstToken, "young")) == 1
    assert engine.load.kv_usage == 0.0


def test_a_preempted_request_is_the_next_to_run() -> None:
    """Before those that arrived while it ran: it is older than they are."""
    engine = Engine(replace(SMALL, capacity_blocks=8, max_sequences=2))
    engine.submit(request("old", 48, 60), 0.0)
    engine.submit(request("young", 48, 60, chain=1), 0.0)
    engine.submit(request("waits", 48, 60, chain=2), 0.01)
    outputs = run(engine)
    assert of(outputs, Preempted, "young")
    assert finished(outputs, "young").at < finished(outputs, "waits").at


def test_a_prompt_in_the_middle_of_its_chunks_may_be_preempted() -> None:
    """Growing streams take the memory a half-computed prompt was admitted against; it starts over and finishes."""
    engine = Engine(replace(SMALL, capacity_blocks=24, max_batched_tokens=12, max_sequences=8))
    for number in range(6):
        engine.submit(request(f"s{number}", 15, 40, chain=number), 0.0)
    engine.submit(request("long", 150, 2, chain=9), 0.0)
    outputs = run(engine)
    assert [o for o in outputs if isinstance(o, Preempted)]
    assert len(of(outputs, Finished)) == 7


def test_an_impossible_request_is_rejected_at_once() -> None:
    """Longer than the whole cache: an answer instead of waiting for ever."""
    engine = Engine(replace(SMALL, capacity_blocks=4))
    engine.submit(request("a", 64, 10), 3.0)
    assert engine.next_event_at() == 3.0
    assert engine.advance(3.0) == [Rejected("a", 3.0)]
    assert engine.next_event_at() is None


def test_cancel_frees_blocks_at_once() -> None:
    """A client that leaves in mid-decode or mid-prefill holds nothing a moment later."""
    engine = Engine(SMALL)
    engine.submit(request("decode", 40, 100), 0.0)
    engine.advance(0.1)
    engine.submit(request("prefill", 300, 100, chain=1), 0.1)
    engine.advance(0.12)
    assert engine.load.running == 2
    assert engine.cancel("decode", 0.121)
    assert engine.cancel("prefill", 0.121)
    assert engine.load == type(engine.load)(0, 0, 0.0)
    assert of(run(engine), Finished) == []


@pytest.mark.parametrize("company", [0, 1])
def test_a_cancelled_requests_slot_serves_the_next_one(company: int) -> None:
    """It begins with the next step, and not where the long decode under way would have ended; also where the one that
    left was alone."""
    engine = Engine(replace(SMALL, max_sequences=1 + company))
    for number in range(1 + company):
        engine.submit(request(f"decode {number}", 16, 400, chain=number), 0.0)
    engine.submit(request("waits", 16, 2, chain=9), 0.0)
    engine.advance(0.1)
    assert engine.load.waiting == 1
    engine.cancel("decode 0", 0.1)
    assert first_token(run(engine), "waits").at < 0.2


def test_cancelling_the_unknown_or_the_waiting() -> None:
    """A waiting request goes quietly; an id that is not here is a False."""
    engine = Engine(replace(SMALL, max_sequences=1))
    engine.submit(request("a", 16, 50), 0.0)
    engine.submit(request("b", 16, 5, chain=1), 0.0)
    assert engine.cancel("b", 0.01)
    assert not engine.cancel("b", 0.02)
    assert [o.request_id for o in run(engine) if isinstance(o, Finished)] == ["a"]


def test_an_id_in_use_is_refused() -> None:
    """Two live requests of one id would be indistinguishable."""
    engine = Engine(SMALL)
    engine.submit(request("a"), 0.0)
    with pytest.raises(ValueError, match="already here"):
        engine.submit(request("a"), 0.0)
    run(engine)
    engine.submit(request("a"), 9.0)


def test_counters_follow_vllms_meaning() -> None:
    """Queries and hits count tokens of admitted prompts."""
    engine = Engine(SMALL)
    for number in range(2):
        engine.submit(request(str(number), 40, 2), float(number))
        run(engine)
    counters = engine.scheduler.counters
    assert (counters.prompt_tokens, counters.generation_tokens) == (80, 4)
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (80, 32)


def test_nonsense_settings_and_requests_are_refused() -> None:
    """Empty prompts, empty outputs, a budget too small for the batch."""
    with pytest.raises(ValueError, match="max_batched_tokens"):
        EngineSettings(max_batched_tokens=8, max_sequences=8)
    with pytest.raises(ValueError, match="block size"):
        EngineSettings(block_size=0)
    with pytest.raises(ValueError, match="threshold"):
        EngineSettings(long_prefill_token_threshold=-1)
    with pytest.raises(ValueError, match="at least one prompt token"):
        SimRequest("a", [], 0, 1)
    assert Engine(SMALL).settings is SMALL


def test_without_prefix_caching_nothing_is_kept() -> None:
    """No hits, no events, and as in vLLM the counters of the cache stay where they are."""
    engine = Engine(replace(SMALL, prefix_caching=False))
    engine.submit(request("a"), 0.0)
    first = run(engine)
    engine.submit(request("b"), 10.0)
    second = run(engine)
    assert [one.cached_tokens for one in (*first, *second) if isinstance(one, FirstToken)] == [0, 0]
    assert events_of([*first, *second]) == []
    counters = engine.scheduler.counters
    assert (counters.prompt_tokens, counters.prefix_cache_queries, counters.prefix_cache_hits) == (80, 0, 0)


def test_times_between_tokens_are_counted_once_a_token() -> None:
    """A decode step is a gap of every answer under way; one that was preempted waits until its next token."""
    engine = Engine(SMALL)
    engine.submit(request("a", output_tokens=5), 0.0)
    engine.submit(request("b", output_tokens=5, chain=1), 0.0)
    outputs = run(engine)
    step_s = engine.settings.timing.decode_s(2, 90)
    counters = engine.scheduler.counters
    assert counters.token_gaps.total == counters.generation_tokens - len(of(outputs, FirstToken)) == 8
    assert counters.token_gaps.percentile(0.0) == pytest.approx(step_s, rel=0.02)
    tight = Engine(replace(SMALL, capacity_blocks=8))
    for name, chain in (("a", 0), ("b", 1)):
        tight.submit(request(name, prompt_tokens=40, output_tokens=40, chain=chain), 0.0)
    preempted = of(run(tight), Preempted)
    assert preempted
    assert tight.scheduler.counters.token_gaps.total == 78
    assert tight.scheduler.counters.token_gaps.percentile(1.0) > 10 * step_s
