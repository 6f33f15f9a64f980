"""Every encoding of KV events since 0.11, and everything that is none."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.base.errors import BadResponse
from kvproxy.cache.indexes.block_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvproxy.features.kv_events import decoding as codec
from kvproxy.features.kv_events import decoding as wire
from kvproxy.features.kv_events.decoding import (
    END_OF_REPLAY,
    MAX_EVENT_BLOCKS,
    MAX_EVENT_TOKENS,
    Effort,
    Skipped,
    decode_batch,
    sequence_number,
)
from tests.features.kv_events.support import BLOCK, CLEARED, captured_frames, captured_rows, frames, removed, stored
from tests.support.examples import examples

CAPTURES = ["mini_fixture.jsonl", "oldfmt_0.11.0.jsonl", "oldfmt_0.22.1.jsonl", "oldfmt_0.24.0.jsonl"]


def events_of(message: list[bytes]) -> tuple[list[KvEvent], dict[str, int]]:
    skipped: Skipped = {}
    return list(decode_batch(message).events(skipped)), skipped


def one(event: Any) -> KvEvent:
    (decoded,), counts = events_of(frames(0, event))
    assert counts == {}
    return decoded


def plain(value: Any) -> Any:
    """Return a decoded capture's value with its hex bytes as bytes."""
    if isinstance(value, dict) and "__bytes__" in value:
        return bytes.fromhex(value["__bytes__"])
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("capture", CAPTURES)
def test_captures_of_every_encoding(capture: str) -> None:
    """Arrays with missing trailing fields and maps, int and bytes hashes: field by field what the capture says."""
    seen = 0
    for row, message in zip(captured_rows(capture), captured_frames(capture), strict=True):
        events, counts = events_of(message)
        ts, wire, _ = row["decoded"]
        batch = decode_batch(message)
        assert (batch.ts, len(batch)) == (ts, len(wire))
        assert counts == {}
        for event, raw in zip(events, wire, strict=True):
            assert_same(event, raw)
            seen += 1
    assert seen >= 4


def assert_same(event: KvEvent, raw: Any) -> None:
    names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    fields = raw if isinstance(raw, dict) else dict(zip(names, raw, strict=False))
    assert type(event).__name__ == fields["type"]
    if isinstance(event, BlockStored):
        assert list(event.block_hashes) == plain(fields["block_hashes"])
        assert event.parent == plain(fields["parent_block_hash"])
        assert list(event.token_ids) == fields["token_ids"]
        assert (event.block_tokens, event.medium) == (fields["block_size"], fields["medium"])
        assert event.lora_name == fields.get("lora_name")
        assert event.indexable
    elif isinstance(event, BlockRemoved):
        assert list(event.block_hashes) == plain(fields["block_hashes"])


def test_the_salt_and_the_lora_are_extra_keys() -> None:
    """The salt is on the first block only, the LoRA on each."""
    by_scenario = {row["scenario"]: message for row, message in zip(
        captured_rows("mini_fixture.jsonl"), captured_frames("mini_fixture.jsonl"), strict=True
    )}  # fmt: skip
    (salted,), _ = events_of(by_scenario["salt"])
    (lora,), _ = events_of(by_scenario["lora:lora-a"])
    assert isinstance(salted, BlockStored)
    assert isinstance(lora, BlockStored)
    assert salted.extra is not None
    assert salted.extra[0] == ("tenant-a",)
    assert set(salted.extra[1:]) <= {None}
    assert (lora.lora_name, lora.extra) == ("lora-a", (("lora-a",),))


def test_tokens_are_a_compact_array() -> None:
    """Four bytes a token, ready for hashing."""
    event = one(stored(7, 8, parent=6))
    assert event == BlockStored((7, 8), 6, array("I", [7] * BLOCK + [8] * BLOCK), BLOCK)
    assert isinstance(event, BlockStored)
    assert event.token_ids.itemsize == 4


@pytest.mark.parametrize("count", [1, 15, 16, 300, 1 << 16])
def test_pairs_of_tokens_are_read_as_the_page_s_own_tokens(count: int) -> None:
    """SGLang's keys with EAGLE; every length of the array's head on the wire."""
    event = one(stored(1, token_ids=[[n, n + 1] for n in range(count)], block_size=count))
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.pairs, event.indexable) == (array("I", range(count)), True, True)


def test_a_page_of_sglang() -> None:
    """Signed hashes, a medium of its own, a salt of its own field, which only a chain's first block has."""
    hashes = [-(1 << 63), -1]
    tokens = list(range(2 * BLOCK))
    first = one(stored(*hashes, token_ids=tokens, medium="CPU_PINNED", cache_salt="tenant-a", session_id=None))
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.medium, first.pairs) == (tuple(hashes), "CPU_PINNED", False)
    assert first.extra == (("tenant-a",), None)
    later = one(stored(5, parent=-1, cache_salt="tenant-a"))
    assert isinstance(later, BlockStored)
    assert (later.parent, later.extra) == (-1, None)
    long = one(stored(1, cache_salt="s" * 600))
    assert isinstance(long, BlockStored)
    assert long.extra is not None
    assert long.extra[0] != ("s" * 600,)


def test_an_array_of_sglang_has_fewer_fields() -> None:
    """Without a rank in the batch in the oldest, without a medium in the event."""
    message = [b"", bytes(8), msgspec.msgpack.encode([1.5, [["BlockStored", [-7], None, [1] * BLOCK, BLOCK, None]]])]
    (event,), counts = events_of(message)
    assert event == BlockStored((-7,), None, array("I", [1] * BLOCK), BLOCK)
    assert not any(counts.values())


def test_removed_and_cleared() -> None:
    """Old arrays and new maps."""
    assert one(removed(1, 2)) == BlockRemoved((1, 2), "GPU", 0)
    assert one(["BlockRemoved", [1], "CPU"]) == BlockRemoved((1,), "CPU")
    assert one(["BlockRemoved", [1]]) == BlockRemoved((1,))
    assert one(CLEARED) == one(["AllBlocksCleared"]) == AllBlocksCleared()
    assert AllBlocksCleared().blocks == 0


def test_fields_of_later_versions_are_ignored() -> None:
    """Locality, ownership, session, and whatever comes next."""
    later = stored(1, locality="local", ownership="own", session_id="s", next_big_thing=[1])
    assert one(later) == one(stored(1))
    tail = ["BlockStored", [1], None, [1] * BLOCK, BLOCK, None, "GPU", None, None, 0, "full_attention", None, "more", 5]
    assert one(tail) == one(stored(1, group_idx=0, kv_cache_spec_kind="full_attention"))


@pytest.mark.parametrize(
    ("event", "indexable"),
    [
        (stored(1), True),
        (stored(1, kv_cache_spec_kind="full_attention"), True),
        (stored(1, kv_cache_spec_kind="sliding_window"), False),
        (stored(1, block_size=BLOCK + 1), False),
        (stored(), False),
    ],
)
def test_memory_bounds_of_an_index(event: Any, indexable: bool) -> None:
    """Full attention with all its tokens; a version that names no kind has only that."""
    decoded = one(event)
    assert isinstance(decoded, BlockStored)
    assert decoded.indexable is indexable


def test_a_live_message_and_both_replay_replies() -> None:
    """The topic frame is there or not; the number is always the last but one."""
    live = frames(5, CLEARED)
    for message in (live, [b"", *live], [b"", *live[1:]]):
        assert decode_batch(message).seq == sequence_number(message) == 5


def test_the_captured_replay_ends_with_its_marker() -> None:
    """Numbers from 0 on, then the marker."""
    messages = captured_frames("replay.jsonl")
    numbers = [sequence_number(message) for message in messages]
    assert numbers[-1] is None
    assert numbers[:-1] == list(range(len(numbers) - 1))
    with pytest.raises(BadResponse, match="end of replay"):
        decode_batch(messages[-1])
    assert sequence_number([b"", END_OF_REPLAY, b""]) is None


@pytest.mark.parametrize(
    "message",
    [
        [],
        [b"x"],
        [b"topic", b"short", b"\x93\x00\x90\x00"],
        [b"topic", bytes(8), b""],
        [b"topic", bytes(8), b"\xc1"],
        [b"topic", bytes(8), b"\xdd\xff\xff\xff\xff"],
        [b"topic", bytes(8), b"\x91" * 100_000],
        [b"topic", bytes(8), msgspec.msgpack.encode({"ts": 1})],
        [b"topic", bytes(8), msgspec.msgpack.encode(["no time", []])],
        [b"topic", bytes(8), msgspec.msgpack.encode([1.0, 5])],
        [b"topic", bytes(8), b"x" * (codec.MAX_PAYLOAD_BYTES + 1)],
    ],
)
def test_invalid_batches(message: list[bytes]) -> None:
    """Refused before anything is allocated for it."""
    with pytest.raises(BadResponse):
        decode_batch(message)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "BlockMoved", "x": 1}, "unknown_type"),
        (["BlockMoved", 1], "unknown_type"),
        ({"no": "type"}, "malformed"),
        ({"type": 5}, "malformed"),
        ([], "malformed"),
        ([5], "malformed"),
        (5, "malformed"),
        (None, "malformed"),
        ({"type": "BlockStored"}, "malformed"),
        (["BlockStored", [1], None, [1]], "malformed"),
        (stored(1, token_ids=[-1]), "malformed"),
        (stored(1, token_ids=[1 << 63]), "malformed"),
        (stored(1, token_ids="abc"), "malformed"),
        (stored(1, token_ids=[[1, 2], 3]), "malformed"),
        (stored(1, token_ids=[[1, 2, 3]] * 16), "malformed"),
        (stored(1, token_ids=[[1, 2]] * ((1 << 16) + 1)), "malformed"),
        (stored(1, token_ids=b""), "malformed"),
        (stored(1, block_size=0), "malformed"),
        (stored(1, block_size=1 << 40), "malformed"),
        (stored(1, block_hashes=[1.5]), "malformed"),
        (stored(1, extra_keys=[["a"], ["b"]]), "malformed"),
        (stored(1, extra_keys=[{"a": 1}]), "malformed"),
        (stored(1, extra_keys=[[[[[["deep"]]]]]]), "malformed"),
    ],
)
def test_an_event_that_cannot_be_used_is_counted(event: Any, reason: str) -> None:
    """Its neighbours are not lost with it."""
    events, counts = events_of(frames(0, stored(1), event, stored(2)))
    assert [e.block_hashes for e in events if isinstance(e, BlockStored)] == [(1,), (2,)]
    assert counts == {reason: 1}


def test_blocks_that_were_copied_have_no_tokens() -> None:
    """Offloading by vLLM names the blocks alone, which is no fault of the event."""
    event = one(stored(5, parent_block_hash=None, token_ids=[], block_size=0, medium="CPU"))
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.block_tokens, len(event.token_ids), event.medium) == ((5,), 0, 0, "CPU")


@pytest.mark.parametrize("pairs", [False, True])
def test_ids_that_name_a_picture_are_folded(pairs: bool) -> None:
    """SGLang's have 62 bits: equal ones are equal and others differ, none is a token's, and the block counts."""
    wide = [(7 << 58) + number for number in range(4)]

    def tokens_of(ids: list[int]) -> list[int]:
        sent = [[one, one] for one in ids] if pairs else ids
        event = one(stored(1, token_ids=sent))
        assert isinstance(event, BlockStored)
        return event.token_ids.tolist()

    first = tokens_of([5, 6, *wide, *wide, *range(6)])
    assert first[:2] == [5, 6]
    assert first[2:6] == first[6:10]
    assert len(set(first[2:6])) == 4
    assert min(first[2:10]) >= 1 << 31
    assert tokens_of([5, 6, *wide, *wide, *range(6)]) == first
    assert tokens_of([5, 6, *[each + 9 for each in wide * 2], *range(6)]) != first


def test_an_event_that_is_not_even_readable_alone() -> None:
    """Text that is no UTF-8 spoils its event only; nesting without end the whole batch."""
    bad = msgspec.Raw(b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x90\xa6medium\xa1\xff")
    events, counts = events_of([b"", bytes(8), msgspec.msgpack.encode([0.0, [bad, CLEARED]])])
    assert events == [AllBlocksCleared()]
    assert counts["malformed"] == 1
    deep = msgspec.Raw(b"\x82\xa4type\xaaBlockMoved\xa1x" + b"\x91" * 100_000 + b"\xc0")
    with pytest.raises(BadResponse):
        events_of([b"", bytes(8), msgspec.msgpack.encode([0.0, [deep, CLEARED]])])


def test_extra_keys_become_hashable() -> None:
    """Nested lists as tuples, a bare value as a key of one."""
    event = one(stored(1, 2, 3, extra_keys=[None, ["mm", ["id", 5], b"x"], "salt"]))
    assert isinstance(event, BlockStored)
    assert event.extra == (None, ("mm", ("id", 5), b"x"), ("salt",))
    hash(event.extra)
    plain_event = one(stored(1, extra_keys=[None]))
    assert isinstance(plain_event, BlockStored)
    assert plain_event.extra is None


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_no_bytes_break_the_decoder(payload: bytes) -> None:
    """Anything is a batch or a BadResponse; its events are events or counted."""
    with contextlib.suppress(BadResponse):
        events_of([b"", bytes(8), payload])


def steps_of(event: Any) -> tuple[list[KvEvent], list[Effort], dict[str, int]]:
    """One event, the effort it took, and what was skipped."""
    skipped: Skipped = {}
    message = [b"", bytes(8), msgspec.msgpack.encode([0.0, [event]])]
    steps = [*decode_batch(message).steps(skipped)]
    efforts = [step for step in steps if isinstance(step, Effort)]
    return [step for step in steps if not isinstance(step, Effort)], efforts, skipped


def test_a_long_event_is_decoded_in_steps() -> None:
    """Between them others may run; what comes out is the same."""
    events, efforts, _ = steps_of(stored(*range(20_000), extra_keys=[["lora", n] for n in range(20_000)]))
    (event,) = events
    assert isinstance(event, BlockStored)
    assert event.blocks == 20_000
    assert event.extra is not None
    assert event.extra[19_999] == ("lora", 19_999)
    assert len(efforts) > 10


def test_an_ordinary_event_is_one_step() -> None:
    """No effort beyond its blocks."""
    assert steps_of(stored(*range(30), extra_keys=[["lora"]] * 30))[1] == []


@pytest.mark.parametrize(
    "event",
    [
        {**stored(1), "token_ids": [1] * (MAX_EVENT_TOKENS + 1)},
        {**stored(1), "block_hashes": [1] * (MAX_EVENT_BLOCKS + 1)},
        {**stored(1), "extra_keys": [None] * (MAX_EVENT_BLOCKS + 1)},
        {**stored(1), "medium": "x" * 2000},
        {**stored(1), "lora_name": "x" * 2000},
        {**stored(1), "block_hashes": [bytes(65)]},
        {**removed(1), "block_hashes": [1] * (MAX_EVENT_BLOCKS + 1)},
    ],
    ids=["tokens", "blocks", "extra", "medium", "lora", "hash", "removed"],
)
def test_an_event_beyond_its_bounds_is_malformed(event: Any) -> None:
    """Nothing is made of it, and nothing of it is kept."""
    events, _, counts = steps_of(event)
    assert (events, counts["malformed"]) == ([], 1)


def test_a_long_extra_key_goes_by_its_digest() -> None:
    """A client's long salt neither costs nor spoils anything; equal ones are equal."""
    _goes_by_its_digest(["x" * 5000], ["y" * 5000])


def test_an_extra_key_of_many_values_goes_by_its_digest() -> None:
    """Values cost more than bytes; engines send two or three."""
    _goes_by_its_digest([[]] * 40, [[]] * 39 + [1])


def _goes_by_its_digest(one: list[Any], other: list[Any]) -> None:
    ((event,), _, _) = steps_of(stored(1, 2, 3, extra_keys=[one, other, one]))
    assert isinstance(event, BlockStored)
    assert event.extra is not None
    first, second, third = event.extra
    assert first == third != second
    assert len(repr(first)) < 200


def sliced(events: Iterable[KvEvent | Effort], size: int) -> list[list[KvEvent]]:
    """Return the slices alone."""
    return [piece for piece, _ in wire.slice_events(events, size)]


def run(*hashes: int, parent: int | None = None, extra: bool = False) -> BlockStored:
    keys = tuple((number,) for number in hashes) if extra else None
    return BlockStored(hashes, parent, array("I", [h for h in hashes for _ in range(2)]), 2, extra=keys)


def test_events_are_grouped_up_to_the_bound() -> None:
    """Order is kept; small events share a slice; one without blocks costs one."""
    events: list[KvEvent] = [run(1, 2), BlockRemoved((3,)), AllBlocksCleared(), run(4)]
    assert list(sliced(events, 4)) == [events[:3], events[3:]]
    assert list(sliced([], 4)) == []


def test_effort_fills_slices_as_blocks_do() -> None:
    """A follower may pause after each, with events in it or without."""
    steps: list[KvEvent | Effort] = [Effort(), Effort(), run(1), Effort(9), Effort(), run(2)]
    assert [*wire.slice_events(steps, 4)] == [([run(1)], 12), ([run(2)], 2)]
    assert [*wire.slice_events([Effort()] * 10, 4)] == [([], 4), ([], 4), ([], 2)]


def test_a_long_run_is_cut_into_a_chain() -> None:
    """Each piece's parent is the block before it; tokens and extra keys go with their blocks."""
    ((first,), (second,), (third,)) = sliced([run(1, 2, 3, 4, 5, parent=9, extra=True)], 2)
    assert first == run(1, 2, parent=9, extra=True)
    assert second == run(3, 4, parent=2, extra=True)
    assert third == run(5, parent=4, extra=True)


def test_a_long_removal_is_cut() -> None:
    """Blocks leave one by one anyway."""
    assert list(sliced([BlockRemoved((1, 2, 3))], 2)) == [[BlockRemoved((1, 2))], [BlockRemoved((3,))]]


def test_a_run_whose_tokens_do_not_fit_stays_whole() -> None:
    """It is not known which tokens belong to which of its blocks."""
    odd = BlockStored((1, 2, 3), None, array("I", [1]), 2)
    assert list(sliced([odd], 2)) == [[odd]]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(min_value=0, max_value=9)), st.integers(min_value=1, max_value=5))
def test_nothing_is_lost_or_reordered(lengths: list[int], size: int) -> None:
    """The blocks of all slices are the blocks of all events."""
    counter = iter(range(1000))
    events = [run(*(next(counter) for _ in range(length))) for length in lengths]
    slices = list(sliced(events, size))
    assert [h for piece in slices for event in piece for h in event.block_hashes] == [  # type: ignore[union-attr]
        h for event in events for h in event.block_hashes
    ]
    assert all(sum(event.blocks for event in piece) <= size for piece in slices)
