from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from kvproxy.base.types import EndpointId, Tier
from kvproxy.cache.indexes.beginnings import PreciseMatch
from kvproxy.cache.indexes.block_events import AllBlocksCleared, BlockRemoved, BlockStored
from kvproxy.cache.indexes.precise import PreciseIndex, precise_root
from kvproxy.cache.prefix.hashing import token_blocks
from tests.cache.indexes.support import A, B, engine_hash, prompt_of, removed, stored

PATH = (1, 2, 3, 4)


def device(index: PreciseIndex, path: tuple[int, ...] = PATH) -> dict[str, int]:
    return {endpoint: match.device_tokens for endpoint, match in index.match_prompt(prompt_of(path)).items()}


def test_engines_need_not_agree_on_hashes() -> None:
    """The same tokens match on both, whatever each engine calls them."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH, engine=1)])
    index.apply_events(B, 0, [stored(PATH[:2], engine=2), stored(PATH[:3], 2, engine=2)])
    assert device(index) == {A: 8, B: 6}


def test_whole_digests_and_signed_integers_are_names_too() -> None:
    """Engines publish bytes where told to; old ones negative integers."""
    index = PreciseIndex()
    event = replace(stored((1, 2)), block_hashes=(b"\x01" * 32, -5))
    index.apply_events(A, 0, [event, BlockRemoved((-5,))])
    assert device(index) == {A: 2}


def test_a_store_told_twice_is_told_once() -> None:
    """Engines report hits again on request; one removal ends it all the same."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH), stored(PATH), removed(PATH)])
    assert device(index) == {A: 6}


def test_a_removal_on_the_device_keeps_the_host_copy() -> None:
    """Each medium is a residency of its own; the match goes on there."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH), stored(PATH, medium="CPU"), removed(PATH, PATH[:3])])
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(4, ((Tier.HOST, 4),), 0)}
    index.apply_events(A, 0, [removed(PATH[:3], medium="CPU")])
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(4, (), 0)}


def copied(path: tuple[int, ...]) -> BlockStored:
    """Return the event of vLLM's offloading for the last block, which it names and no more."""
    event = stored(path, len(path) - 1, medium="CPU")
    return replace(event, parent=None, token_ids=array("I"), block_tokens=0)


def test_a_copy_is_known_by_its_name() -> None:
    """Offloading by vLLM reports no tokens, but the name under which it reported the block before; others are left
    out."""
    index = PreciseIndex()
    index.apply_events(B, 0, [copied(PATH)])
    index.apply_events(A, 0, [stored(PATH), copied(PATH[:3]), copied(PATH), copied((8,)), removed(PATH[:3], PATH)])
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(4, ((Tier.HOST, 4),), 0)}
    index.apply_events(A, 0, [removed(PATH, medium="CPU")])
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(4, ((Tier.HOST, 2),), 0)}


def test_a_copy_under_one_of_several_names() -> None:
    """It ends by a removal under this name, and the block stays while it is there under another."""
    index = PreciseIndex()
    index.apply_events(
        A, 0, [stored(PATH), stored(PATH, engine=2), copied(PATH), removed(PATH), removed(PATH, engine=2)]
    )
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(6, ((Tier.HOST, 2),), 0)}
    index.apply_events(A, 0, [removed(PATH, medium="CPU")])
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(6, (), 0)}


def test_lower_tiers_extend_each_other() -> None:
    """Beyond the device a block may be on any lower tier."""
    index = PreciseIndex()
    index.apply_events(
        A, 0, [stored(PATH[:1]), stored(PATH[:2], 1, medium="cpu"), stored(PATH[:3], 2, medium="STORAGE")]
    )
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(2, ((Tier.HOST, 2), (Tier.DISK, 2)), 0)}


def test_a_gap_ends_the_match_until_it_is_filled() -> None:
    """Blocks below a removed one stay known and count again once it is back."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH), removed(PATH[:2])])
    assert device(index) == {A: 2}
    index.apply_events(A, 0, [stored(PATH[:2], 1)])
    assert device(index) == {A: 8}


def test_a_child_of_a_removed_block_is_placed() -> None:
    """An engine with two copies of a block reports one removed and goes on storing below the other."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH[:3]), removed(PATH[:3]), stored(PATH, 3)])
    assert device(index) == {A: 4}
    index.apply_events(A, 0, [stored(PATH[:3])])
    assert device(index) == {A: 8}
    assert index.counts.orphaned == 0


def test_a_removed_parent_is_forgotten_in_the_end() -> None:
    """The names of removed blocks are kept for a bounded number of them."""
    index = PreciseIndex(max_ghosts=1)
    index.apply_events(A, 0, [stored(PATH[:3]), removed(PATH[:3]), stored((8,)), removed((8,)), stored(PATH, 3)])
    assert index.counts.orphaned == 1


def test_an_orphan_is_left_out() -> None:
    """Below a block that was never reported nothing is found, until the engine reports it again."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH, 3), stored(PATH[:3], 2), stored(PATH[:2])])
    assert (device(index), index.counts.orphaned) == ({A: 4}, 2)
    index.apply_events(A, 0, [stored(PATH, 2)])
    assert device(index) == {A: 8}


def test_lora_and_salt_are_part_of_the_key() -> None:
    """Blocks match only under the same LoRA and cache salt."""
    index = PreciseIndex()
    salted = ("tenant-a",), None
    index.apply_events(A, 0, [stored((1, 2), engine=1, lora="l", extra=(("l",), ("l",)))])
    index.apply_events(B, 0, [stored((1, 2), engine=1, extra=salted), stored((1, 2, 3), 2, engine=1)])
    assert set(index.match_prompt(prompt_of(PATH, lora="l"))) == {A}
    assert index.match_prompt(prompt_of(PATH, cache_salt="tenant-a")) == {B: PreciseMatch(6, (), 0)}
    assert (
        index.match_prompt(prompt_of(PATH))
        == index.match_prompt(prompt_of(PATH, lora="l", cache_salt="tenant-a"))
        == {}
    )


def test_a_lora_known_by_number_only_is_not_the_base_model() -> None:
    """Old engines do not say its name: those blocks match no request rather than every one."""
    index = PreciseIndex()
    index.apply_events(A, 0, [replace(stored(PATH), lora_id=1)])
    assert device(index) == {}


def test_media_keys_separate_blocks() -> None:
    """Equal placeholder tokens of different pictures are different blocks."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH, extra=(None, ("picture", 3), None, None))])
    assert device(index) == {A: 2}


def test_the_best_rank_counts() -> None:
    """Ranks have caches of their own; the match says which rank."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH[:2])])
    index.apply_events(A, 1, [stored(PATH[:3])])
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(6, (), 1)}
    index.clear_rank(A, 1)
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(4, (), 0)}


def test_all_full_attention_groups_must_hold_a_block() -> None:
    """A hybrid model can reuse only what every one of them has; other groups do not count."""
    index = PreciseIndex()
    window = replace(stored(PATH, group=2, engine=5), spec_kind="sliding_window")
    index.apply_events(A, 0, [stored(PATH, group=0), stored(PATH[:3], group=1, engine=3), window])
    assert device(index) == {A: 6}
    index.apply_events(A, 0, [removed(PATH[:2], group=1, engine=3)])
    assert device(index) == {A: 2}


def test_all_blocks_cleared_clears_one_rank() -> None:
    """Other endpoints stay."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH), stored(PATH, medium="CPU"), stored((9, 9), 1), AllBlocksCleared()])
    index.apply_events(B, 0, [stored(PATH)])
    assert (device(index), index.count_rows(A)) == ({B: 8}, 0)
    index.apply_events(A, 0, [stored(PATH[:1])])
    assert device(index) == {A: 2, B: 8}


def test_a_removed_endpoint_is_unknown_at_once_and_swept_in_steps() -> None:
    """No call takes long, and a bit is reused only when nothing carries it any more."""
    index = PreciseIndex(max_sources=1)
    long = tuple(range(3000))
    index.apply_events(A, 0, [stored(long)])
    index.remove_endpoint(A)
    assert index.match_prompt(prompt_of(long)) == {}
    index.apply_events(B, 0, [stored(PATH)])
    assert index.count_rows(B) == 0
    assert index.sweep_rows(100_000)
    index.apply_events(B, 0, [stored(long[:5])])
    assert device(index, long) == {B: 10}


def test_sweeping_goes_on_with_every_store() -> None:
    """No caller has to remember to do it."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(tuple(range(3000))), AllBlocksCleared(), stored(PATH), stored(PATH)])
    assert index.sweep_rows(0)


def test_another_block_size_is_another_engine_run() -> None:
    """A restart with other flags voids what was stored; each size is looked up in its own hashes."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH), stored((1, 1, 3), size=1)])
    index.apply_events(B, 0, [stored(PATH)])
    assert index.block_sizes == {1, 2}
    assert device(index) == {A: 4 // 2, B: 8}


@pytest.mark.parametrize("wrong", ["tokens", "extra", "tier", "twice", "below itself"])
def test_malformed_events_are_counted_not_believed(wrong: str) -> None:
    """Some groups report blocks whose tokens do not add up; media beyond the bound have no tier."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored((9,), medium=f"M{n}") for n in range(7)])
    event = {
        "tokens": replace(stored(PATH), block_tokens=3),
        "extra": replace(stored(PATH), extra=(None,)),
        "tier": stored(PATH, medium="M8"),
        "twice": replace(stored(PATH), block_hashes=(1, 2, 1, 3)),
        "below itself": replace(stored(PATH), block_hashes=(1, 2, 3, 4), parent=3),
    }[wrong]
    index.apply_events(A, 0, [event, removed(PATH, medium="M8")])
    unusable = index.counts.malformed + bool(index.counts.orphaned)
    assert (device(index), unusable, index.counts.removed_unknown) == ({}, 1, 1)


def test_rows_are_bounded() -> None:
    """Rows over the bound are not stored; the beginning of a run is worth most."""
    index = PreciseIndex(max_blocks=3)
    index.apply_events(A, 0, [stored(PATH)])
    assert (device(index), index.count_rows(A)) == ({A: 6}, 3)
    index.apply_events(A, 0, [removed(PATH[:3]), stored((1, 2, 5), 2)])
    assert device(index, (1, 2, 5)) == {A: 6}


def test_removals_of_unknown_blocks_are_counted() -> None:
    """Of an engine never heard of, and of blocks never stored."""
    index = PreciseIndex()
    index.apply_events(A, 0, [removed(PATH), stored(PATH), removed((9,)), removed(PATH, medium="CPU")])
    assert (index.counts.removed_unknown, device(index)) == (3, {A: 8})


def test_two_names_of_one_block_are_two_copies() -> None:
    """Old engines do not report salts: the block is there until its last name is removed."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH, engine=1), stored(PATH, engine=2), stored(PATH, engine=3)])
    for engine, left in ((1, 8), (2, 8), (3, 6)):
        index.apply_events(A, 0, [removed(PATH, engine=engine)])
        assert device(index) == {A: left}
    assert index.count_rows(A) == 3 * 3  # a row a name, and none of those that were removed


def test_a_block_told_below_another_copy_hangs_there() -> None:
    """Which copy is removed first decides whether there is a gap."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH, engine=1), stored(PATH[:2], engine=2)])
    index.apply_events(A, 0, [stored(PATH, 2, engine=1, parent=engine_hash(PATH[:2], 2))])
    index.apply_events(A, 0, [removed(PATH[:2], engine=1)])
    assert device(index) == {A: 8}
    index.apply_events(A, 0, [removed(PATH[:2], engine=2)])
    assert device(index) == {A: 2}
    index.apply_events(A, 0, [stored(PATH[:2], 1, engine=2)])
    assert device(index) == {A: 8}


def test_a_name_given_to_another_block_is_that_block() -> None:
    """Names are 64 bits at most: on a clash the later store is right, and what hung below stays a gap away."""
    index = PreciseIndex()
    clash = replace(stored((5, 6)), block_hashes=(engine_hash((5,)), engine_hash((1, 2))))
    index.apply_events(A, 0, [stored(PATH), clash])
    assert device(index, (5, 6)) == {A: 4}
    assert device(index) == {A: 2}
    index.apply_events(A, 0, [removed(PATH), removed(PATH[:3]), removed((5,)), BlockRemoved((engine_hash((1, 2)),))])
    assert (device(index), device(index, (5, 6)), index.count_rows(A)) == ({A: 2}, {}, 1)


@pytest.mark.parametrize("first", [0, 1])
def test_a_name_of_several_given_to_another_block_leaves_the_others(first: int) -> None:
    """Whichever name came first: what only the lost name vouched for is gone, and the rest goes by those left."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH, engine=first), stored(PATH, engine=1 - first), stored(PATH, engine=2)])
    index.apply_events(
        A, 0, [stored(PATH, engine=0, medium="CPU"), removed(PATH[:3], engine=1), removed(PATH[:3], engine=2)]
    )
    clash = replace(stored((5, 6)), block_hashes=(engine_hash((5,)), engine_hash(PATH[:3])))
    index.apply_events(A, 0, [clash])
    assert index.match_prompt(prompt_of((5, 6))) == {A: PreciseMatch(4, (), 0)}
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(4, (), 0)}
    index.apply_events(A, 0, [stored(PATH, engine=2)])
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(8, (), 0)}
    again = replace(stored((7,)), block_hashes=(engine_hash(PATH),))
    index.apply_events(A, 0, [again, removed(PATH, engine=1)])
    assert device(index) == {A: 8}
    index.apply_events(A, 0, [removed(PATH, engine=2), removed((7,), engine=9)])
    assert device(index) == {A: 6}
    for engine in (0, 1, 2):
        index.apply_events(A, 0, [removed(*(PATH[:n] for n in range(4, 0, -1)), engine=engine)])
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(0, ((Tier.HOST, 4),), 0)}


def test_a_parent_by_a_former_name_is_the_same_block() -> None:
    """Blocks stored below a removed name join those under the other name, and are one block with them."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH, engine=1), removed(*(PATH[:n] for n in range(4, 0, -1)), engine=1)])
    index.apply_events(A, 0, [stored(PATH), stored(PATH, 2, engine=1)])
    assert (device(index), index.count_rows(A)) == ({A: 8}, 6)
    index.apply_events(A, 0, [removed(PATH[:2]), removed(PATH[:3]), removed(PATH)])
    assert device(index) == {A: 2}
    index.apply_events(A, 0, [stored(PATH[:2], 1)])
    assert device(index) == {A: 8}


@pytest.mark.parametrize("stride", [1, -1, 1 << 16, 1 << 40, 257])
def test_regular_engine_hashes_are_hashes(stride: int) -> None:
    """Counters, and hashes that differ in their upper bits only, are found and removed like any."""
    index = PreciseIndex()
    for at in range(1, 20_000, 500):
        hashes = tuple(range(at * stride, (at + 500) * stride, stride))
        index.apply_events(A, 0, [BlockStored(hashes, None, array("I", range(1000 * at, 1000 * (at + 1))), 2)])
    assert index.count_rows(A) == 20_000
    index.apply_events(A, 0, [BlockRemoved((at * stride,)) for at in range(1, 20_001)])
    assert (index.count_rows(A), index.counts.removed_unknown) == (0, 0)


def page(tokens: range, parent: int | None = None, **fields: Any) -> BlockStored:
    """One page as SGLang stores it: an event of its own, its hash signed."""
    return BlockStored((-tokens[0] - 1,), parent, array("I", tokens), len(tokens), **fields)


def tokens_held(index: PreciseIndex, tokens: range, salt: str | None = None) -> tuple[int, int]:
    """On the device and below, of a prompt of these tokens."""
    prompt = array("I", tokens)
    found = index.match_prompt(lambda size: token_blocks(prompt, size, precise_root(size, cache_salt=salt)))
    match = found.get(A, PreciseMatch(0, (), 0))
    return match.device_tokens, match.tokens - match.device_tokens


def test_pages_come_one_an_event() -> None:
    """Three events make one prefix, and the removal of a node one hole."""
    index = PreciseIndex()
    index.apply_events(A, 0, [page(range(4)), page(range(4, 8), -1), page(range(8, 12), -5)])
    assert tokens_held(index, range(14)) == (12, 0)
    index.apply_events(A, 0, [BlockRemoved((-5, -9))])
    assert tokens_held(index, range(14)) == (4, 0)


def test_the_rest_of_a_node_is_no_new_block_size() -> None:
    """Its event has a block size of its own; what is known of whole pages stays, and a real change still counts."""
    index = PreciseIndex()
    index.apply_events(A, 0, [page(range(4)), page(range(4, 7), -1), page(range(4, 8), -1)])
    assert tokens_held(index, range(9)) == (8, 0)
    index.apply_events(A, 0, [page(range(2))])
    assert (tokens_held(index, range(9)), index.block_sizes) == ((2, 0), {2})


def test_a_page_s_copy_on_the_host_outlives_that_on_the_device() -> None:
    """SGLang stores on the host before it removes from the device, and loads back; each medium has its own events."""
    index = PreciseIndex()
    host = [page(range(4), medium="CPU_PINNED"), page(range(4, 8), -1, medium="CPU_PINNED")]
    index.apply_events(A, 0, [page(range(4)), page(range(4, 8), -1), *host, BlockRemoved((-1, -5))])
    assert tokens_held(index, range(9)) == (0, 8)
    index.apply_events(A, 0, [page(range(4)), BlockRemoved((-1, -5), "CPU_PINNED")])
    assert tokens_held(index, range(9)) == (4, 0)


def test_a_salted_chain_is_held_for_its_salt_alone() -> None:
    """As the prompt's own root has it."""
    index = PreciseIndex()
    index.apply_events(A, 0, [page(range(4), extra=(("s",),)), page(range(4, 8), -1)])
    assert (tokens_held(index, range(9)), tokens_held(index, range(9), "s")) == ((0, 0), (8, 0))


#: As LMCache's server announces through its engine: chunks of 8 blocks under hashes of their own, in host memory.
CHUNK = 16


def chunks(tokens: range) -> list[BlockStored]:
    """One event a chunk, each below the one before."""
    starts = range(tokens[0], tokens[-1] + 1, CHUNK)
    return [
        BlockStored((10**9 + at,), None if at == starts[0] else 10**9 + at - CHUNK, array("I", range(at, at + CHUNK)),
                    CHUNK, medium="CPU")
        for at in starts
    ]  # fmt: skip


def test_a_store_behind_an_engine_has_blocks_of_its_own_size() -> None:
    """Chunks in the engine's stream neither end nor replace what it says of its own memory; the longer one counts."""
    index, prompt = PreciseIndex(), range(1, 65)
    index.apply_events(A, 0, [stored_run(prompt[:20]), *chunks(prompt[:48])])
    assert tokens_by_tier(index, prompt) == {A: PreciseMatch(20, ((Tier.HOST, 28),), 0)}
    index.apply_events(A, 0, [BlockRemoved((10**9 + 33,), medium="CPU")])
    assert tokens_by_tier(index, prompt) == {A: PreciseMatch(20, ((Tier.HOST, 12),), 0)}
    assert index.step_tokens(A) == 2


def test_a_cleared_engine_cache_leaves_the_store_behind_it() -> None:
    """`/reset_prefix_cache` is about engine memory, and the store does not announce again what it keeps; an engine that
    is another process has neither."""
    index, prompt = PreciseIndex(), range(1, 65)
    index.apply_events(A, 0, [stored_run(prompt[:20]), *chunks(prompt[:32]), AllBlocksCleared()])
    assert tokens_by_tier(index, prompt) == {A: PreciseMatch(0, ((Tier.HOST, 32),), 0)}
    index.apply_events(A, 0, [stored_run(prompt[:40])])
    assert tokens_by_tier(index, prompt) == {A: PreciseMatch(40, (), 0)}
    index.clear_rank(A, 0)
    assert tokens_by_tier(index, prompt) == {}


def test_a_salted_prompt_is_not_found_in_a_store() -> None:
    """Its events lose the salt: they prove that some salt has these tokens, and not which."""
    index, prompt = PreciseIndex(), range(1, 65)
    index.apply_events(A, 0, [stored_run(prompt[:4]), *chunks(prompt[:32])])
    assert tokens_held(index, prompt, "tenant-a") == (0, 0)


def stored_run(tokens: range) -> BlockStored:
    """Blocks of two tokens in engine memory."""
    names = tuple(range(5 * 10**8 + tokens[0], 5 * 10**8 + tokens[-1], 2))
    return BlockStored(names, None, array("I", tokens), 2)


def tokens_by_tier(index: PreciseIndex, tokens: range) -> dict[EndpointId, PreciseMatch]:
    """Of a prompt of these tokens."""
    prompt = array("I", tokens)
    return index.match_prompt(lambda size: token_blocks(prompt, size, precise_root(size)))
