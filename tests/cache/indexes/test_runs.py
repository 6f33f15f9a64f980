"""Runs long enough to be cut, moved and renumbered, against a dictionary."""

from __future__ import annotations

import random
from array import array

import pytest

from kvproxy.cache.indexes.run_matches import match_prompt
from kvproxy.cache.indexes.runs import KEY_BITS, SPAN, Run, Runs

GPU, CPU = 1, 2


def names(count: int, *, seed: int) -> array[int]:
    rng = random.Random(seed)
    return array("Q", [rng.getrandbits(KEY_BITS) for _ in range(count)])


def filled(count: int, *, seed: int = 1) -> tuple[Runs, array[int], array[int]]:
    """One chain, and its names by the engine's word and by ours."""
    runs, keys, blocks = Runs(), names(count, seed=seed), names(count, seed=seed + 100)
    assert runs.append_blocks(keys, blocks, None, GPU) is not None
    return runs, keys, blocks


def check(runs: Runs, left: dict[int, int], gone: array[int]) -> None:
    """Every name left leads to its block, none other leads anywhere, and each block is in one run."""
    assert runs.blocks == len(left)
    for key, block in left.items():
        place = runs.find_key(key)
        assert place is not None
        assert place[0].blocks[place[1]] == block
    assert not any(runs.find_key(key) for key in gone if key not in left)
    listed = [block for first, run in runs.firsts.items() for block in run.blocks[run.start :]]
    assert sorted(listed) == sorted(left.values())
    assert all(run.blocks[run.start] == first for first, run in runs.firsts.items())


@pytest.mark.parametrize("order", ["last first", "first first", "random", "every other", "from the middle"])
def test_every_order_of_dropping_leaves_the_rest(order: str) -> None:
    """Cutting at the end, at the start and in between, over several runs, down to nothing; numbers are used again."""
    runs, keys, blocks = filled(3 * SPAN + 100)
    left = dict(zip(keys, blocks, strict=True))
    sequence = list(keys)
    if order == "last first":
        sequence.reverse()
    elif order == "random":
        random.Random(5).shuffle(sequence)
    elif order == "every other":
        sequence = sequence[::2] + sequence[1::2]
    elif order == "from the middle":
        sequence = sequence[SPAN // 2 :] + sequence[: SPAN // 2]
    for count, key in enumerate(sequence):
        place = runs.find_key(key)
        assert place is not None
        runs.drop_block(*place)
        del left[key]
        if not count % 211:
            check(runs, left, keys)
    check(runs, {}, keys)
    again = names(700, seed=9)
    assert runs.append_blocks(again, again, None, GPU) is not None
    check(runs, dict(zip(again, again, strict=True)), keys)


def test_dead_places_do_not_pile_up() -> None:
    """A run whose beginning left is moved to one of its size, so that a block never pins a whole run's memory."""
    runs, keys, _ = filled(SPAN)
    for key in keys[:-1]:
        place = runs.find_key(key)
        assert place is not None
        runs.drop_block(*place)
    (run,) = runs.firsts.values()
    assert len(run.keys) < SPAN // 4


def test_a_name_is_not_found_where_it_was_before() -> None:
    """A run may hold the name of a block that left, and the same name again for another block."""
    runs, keys, blocks = filled(8)
    for key in keys[:3]:
        place = runs.find_key(key)
        assert place is not None
        runs.drop_block(*place)
    again, other = names(4, seed=5), names(4, seed=6)
    again[0] = keys[1]
    assert runs.append_blocks(again, other, runs.find_key(keys[-1]), GPU) is not None
    for key, block in ((keys[3], blocks[3]), (again[0], other[0])):  # far from each other
        place = runs.find_key(key)
        assert place is not None
        assert place[0].blocks[place[1]] == block
    left = dict(zip([*keys[3:], *again], [*blocks[3:], *other], strict=True))
    check(runs, left, keys)


@pytest.mark.parametrize("count", [1, 2, 700])
def test_a_taken_name_undoes_the_whole_append(count: int) -> None:
    """However many runs it had filled by then, the one it went on from included."""
    runs, keys, blocks = filled(count)
    end = runs.find_key(keys[-1])
    more = names(2 * SPAN, seed=3) + keys[:1]
    assert runs.append_blocks(more, names(len(more), seed=4), end, CPU) is None
    twice = names(10, seed=6)
    assert runs.append_blocks(twice + twice[:1], names(11, seed=7), None, GPU) is None
    check(runs, dict(zip(keys, blocks, strict=True)), more[:-1])
    assert match_prompt(runs.firsts, blocks)[0] == count
    assert runs.append_blocks(more[:-1], names(2 * SPAN, seed=4), runs.find_key(keys[-1]), GPU) is not None


def test_a_chain_told_block_by_block_is_few_runs() -> None:
    """A growing answer is one run, not one a block."""
    runs, keys, blocks, above = Runs(), names(1200, seed=1), names(1200, seed=2), None
    for at in range(1200):
        above = runs.append_blocks(keys[at : at + 1], blocks[at : at + 1], above, GPU)
    check(runs, dict(zip(keys, blocks, strict=True)), array("Q"))
    assert len(runs.firsts) == 3


def test_another_name_leads_to_the_same_block() -> None:
    """The former name leads nowhere."""
    runs, keys, blocks = filled(600)
    left = dict(zip(keys, blocks, strict=True))
    for number, key in enumerate(keys[::7]):
        place = runs.find_key(key)
        assert place is not None
        runs.rename_block(*place, number + 1)
        left[number + 1] = left.pop(key)
    check(runs, left, keys)


@pytest.mark.parametrize("seed", range(3))
def test_tiers_of_a_run_are_those_of_its_blocks(seed: int) -> None:
    """Said once while they agree, for each block while they do not, whatever the order."""
    rng = random.Random(seed)
    run = Run(names(40, seed=1), names(40, seed=2), GPU)
    run.start = 5
    tiers = [GPU] * 40
    for _ in range(400):
        at = rng.randrange(5, 40)
        end = rng.randint(at + 1, 40)
        if rng.random() < 0.5:
            bits = rng.choice([GPU, CPU, GPU | CPU])
            run.set_tiers(at, end, bits)
            tiers[at:end] = [bits] * (end - at)
        else:
            run.add_tier(at, end, CPU)
            tiers[at:end] = [each | CPU for each in tiers[at:end]]
        assert [run.tiers_at(place) for place in range(5, 40)] == tiers[5:]
        assert (run.mixed is None) == (len(set(tiers[5:])) == 1)


@pytest.mark.parametrize("guess", [0, 1, 300, 511, 512, 900, 5000])
def test_a_guess_changes_nothing_about_a_match(guess: int) -> None:
    """Where the last source's match ended says nothing certain about this one's."""
    runs, keys, blocks = filled(1500)
    branch = runs.find_key(keys[700])
    others = names(50, seed=8)
    assert runs.append_blocks(names(50, seed=7), others, branch, CPU) is not None
    for length in (1, 299, 300, 301, 511, 512, 513, 701, 1499, 1500):
        prompt = blocks[:length] + names(20, seed=length + 1000)
        assert match_prompt(runs.firsts, prompt, guess)[:2] == (length, length)
    assert match_prompt(runs.firsts, blocks[:701] + others + blocks[:9], guess)[:2] == (701, 751)
    assert match_prompt(runs.firsts, array("Q"), guess)[:2] == (0, 0)


def test_a_chain_is_swept_in_steps() -> None:
    """The memory of many blocks is freed a part at a time; the remainder shows when it is done."""
    runs, _, _ = filled(20 * SPAN)
    steps = 1
    while runs.sweep_rows(1000) <= 0:
        steps += 1
    assert steps == 20 * SPAN // 1000 + 1


def test_neighbours_are_found_in_either_order() -> None:
    """Blocks removed one by one from the middle of a run, and one looked for again."""
    runs, keys, blocks = filled(SPAN)
    for at in (*range(300, 200, -1), *range(50, 150), 150, 150, 3, SPAN - 1, 4):
        place = runs.find_key(keys[at])
        assert place is not None
        assert place[0].blocks[place[1]] == blocks[at]
    for at in (299, 300, 298, 301):
        place = runs.find_key(keys[at])
        assert place is not None
        runs.drop_block(*place)
    gone = {*keys[298:302]}
    check(runs, {key: block for key, block in zip(keys, blocks, strict=True) if key not in gone}, keys)


@pytest.mark.parametrize("stride", [1, 1 << 16, 1 << 40, 263])
def test_regular_keys_are_spread(stride: int) -> None:
    """Counters, and keys that differ in their upper bits only, make no dict large that others leave empty."""
    runs = Runs(shards=257)
    for start in range(1, 20_000, 500):
        keys = array("Q", range(start * stride, (start + 500) * stride, stride))
        assert runs.append_blocks(keys, keys, None, GPU) is not None
    assert max(map(len, runs._by_key)) < 2 * 20_000 / 257


def test_a_block_leads_up_to_the_first() -> None:
    """Over runs and branches, whatever was dropped elsewhere; not where a block above it is gone."""
    runs, keys, blocks = filled(2 * SPAN + 50)
    middle = runs.find_key(keys[SPAN // 2])
    branch, branched = names(40, seed=7), names(40, seed=8)
    end = runs.append_blocks(branch, branched, middle, GPU)
    assert end is not None
    wanted = blocks[: SPAN // 2 + 1] + branched
    assert runs.walk_up(end) == wanted
    for key in reversed(keys[SPAN // 2 + 1 :]):
        place = runs.find_key(key)
        assert place is not None
        assert runs.walk_up(place) == blocks[: keys.index(key) + 1]
        runs.drop_block(*place)
    assert runs.walk_up(end) == wanted
    for gone in (keys[3], branch[20]):
        place = runs.find_key(gone)
        assert place is not None
        runs.drop_block(*place)
        last = runs.find_key(branch[-1])
        assert last is not None
        assert runs.walk_up(last) is None
