"""Distinct prompt blocks of what is in flight."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvproxy.cluster.routing.load import EndpointLoad, LiveBlocks, count_live_blocks


def test_a_shared_prefix_counts_once_until_its_last_request_ends() -> None:
    """Two requests share two blocks; each end takes away what no other request has."""
    live = LiveBlocks()
    live.add([1, 2, 3])
    live.add([1, 2, 30])
    assert (len(live), live.count_leading([1, 2, 30, 31])) == (4, 3)
    assert repr(live) == "<LiveBlocks 4 distinct of 6>"
    live.remove([1, 2, 3])
    assert (len(live), live.count_leading([1, 2, 3])) == (3, 2)
    live.remove([1, 2, 30])
    assert (len(live), live.count_leading([1, 2, 30])) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_it_counts_what_a_plain_union_counts(seed: int) -> None:
    """Random requests of a random tree of prompts, by the definition."""
    rng, live, running = random.Random(seed), LiveBlocks(), list[Sequence[int]]()
    for _ in range(300):
        if running and rng.random() < 0.45:
            live.remove(running.pop(rng.randrange(len(running))))
        else:
            prompt, node = [], 1
            for _ in range(rng.randrange(12)):
                node = node * 3 + rng.randrange(2)  # a chained hash: it names the whole path
                prompt.append(node)
            running.append(prompt)
            live.add(prompt)
        union = set().union(*map(set, running))
        assert len(live) == len(union)
        for prompt in running[:5]:
            longer = [*prompt, -1]
            assert live.count_leading(longer) == len(prompt)


def test_a_load_counts_them_only_where_wanted() -> None:
    """Without, there is nothing to hold and nothing to say; asked to count, it begins with the next request."""
    load = EndpointLoad()
    early = load.reserve(10, 0, 0.0, blocks=[1, 2])
    assert (load.live, early.live) == (None, None)
    count_live_blocks(load, True)
    later = load.reserve(10, 0, 0.0, blocks=[1, 2, 3])
    count_live_blocks(load, True)  # as a reload that changes nothing here
    assert load.live is not None
    assert (len(load.live), load.live.count_leading([1, 2, 4])) == (3, 2)
    load.release(early, 1.0)
    load.release(later, 1.0)
    load.release(later, 1.0)
    assert load.live is not None
    assert len(load.live) == 0


def test_a_request_of_an_earlier_count_does_not_touch_the_present_one() -> None:
    """A reload may end the count and a later one begin it again while requests of the first are in flight."""
    load = EndpointLoad()
    count_live_blocks(load, True)
    old = load.reserve(10, 0, 0.0, blocks=[1, 2])
    count_live_blocks(load, False)
    count_live_blocks(load, True)
    load.reserve(10, 0, 0.0, blocks=[1])
    load.release(old, 1.0)
    assert load.live is not None
    assert len(load.live) == 1
