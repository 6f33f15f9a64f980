"""A hybrid model's other layers: a prefix counts as far as every group has what it needs at its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from kvproxy.base.types import Tier
from kvproxy.cache.indexes import layer_groups
from kvproxy.cache.indexes.beginnings import PreciseMatch
from kvproxy.cache.indexes.block_events import AllBlocksCleared, BlockRemoved, BlockStored
from kvproxy.cache.indexes.precise import PreciseIndex
from tests.cache.indexes.support import A, B, engine_hash, prompt_of, removed, stored

PATH = tuple(range(1, 13))


def layers(
    ends: Iterable[int], *, kind: str = "mamba", group: int = 1, size: int = 2, window: int | None = None, **more: int
) -> BlockStored:
    """Return a group's event of the whole path, with the blocks that end after so many elements, as vLLM sends it."""
    whole = stored(PATH)
    names = tuple(engine_hash(PATH[:end]) for end in ends)
    return replace(whole, block_hashes=names, block_tokens=size, group=group, spec_kind=kind, window=window, **more)


def tokens(index: PreciseIndex, path: tuple[int, ...] = PATH) -> int:
    """Return the tokens matched at A."""
    match = index.match_prompt(prompt_of(path)).get(A)
    return 0 if match is None else match.tokens


@pytest.fixture
def index() -> PreciseIndex:
    """Return an index in which A holds the whole path with its full attention."""
    index = PreciseIndex()
    index.apply_events(A, 0, [replace(stored(PATH, group=0), spec_kind="full_attention")])
    return index


def test_the_longest_prefix_with_a_state_at_its_end_counts(index: PreciseIndex) -> None:
    index.apply_events(A, 0, [layers((4, 9))])
    assert [tokens(index, PATH[:n]) for n in (12, 9, 8, 4, 3)] == [18, 18, 8, 8, 0]


def test_a_state_is_of_the_path_it_ends(index: PreciseIndex) -> None:
    """Another prompt has left the path before."""
    index.apply_events(A, 0, [stored((*PATH[:5], 77, 78)), layers((4, 9))])
    assert tokens(index, (*PATH[:5], 77, 78)) == 8


def test_a_state_that_left_does_not_count(index: PreciseIndex) -> None:
    index.apply_events(A, 0, [layers((4, 9)), removed(PATH[:9], group=1)])
    assert tokens(index) == 8
    assert index.counts.removed == 1
    index.apply_events(A, 0, [removed(PATH[:9], group=1)])
    assert index.counts.removed_unknown == 1


def test_states_may_come_before_the_blocks() -> None:
    """Groups are announced in the order of their numbers."""
    index = PreciseIndex()
    index.apply_events(A, 0, [layers((4,), group=0)])
    assert index.lacks_prefixes(A, 0)
    index.apply_events(A, 0, [stored(PATH, group=1)])
    assert (tokens(index), index.lacks_prefixes(A, 0)) == (8, False)


@pytest.mark.parametrize(
    ("window", "kept", "reusable"),
    [
        (2, (1, 2, 9), 18),  # one block before the end
        (5, (7, 8, 9, 11), 18),  # two blocks
        (5, (7, 9, 11), 0),
        (5, (1, 3), 2),  # the whole prefix is shorter than the window
        (1, (3,), 6),  # a window of itself alone
        (100, range(1, 13), 24),
        (100, (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12), 6),
    ],
)
def test_a_window_needs_the_blocks_before_the_end(
    index: PreciseIndex, window: int, kept: Iterable[int], reusable: int
) -> None:
    index.apply_events(A, 0, [layers(kept, kind="sliding_window", window=window)])
    assert tokens(index) == reusable


def test_every_group_has_its_say(index: PreciseIndex) -> None:
    """Ends that one group has and another has not are none."""
    index.apply_events(A, 0, [layers((3, 6, 9)), layers((6, 12), group=2, kind="sliding_window", window=2)])
    assert tokens(index) == 12


def test_groups_of_longer_blocks_end_where_both_do(index: PreciseIndex) -> None:
    """Their blocks bear the hash of the shorter block that ends with them."""
    index.apply_events(A, 0, [layers((4, 8), size=8)])
    assert (tokens(index), index.step_tokens(A)) == (16, 8)
    index.apply_events(A, 0, [layers((8,), size=4, group=2, kind="sliding_window", window=8)])
    assert tokens(index) == 0  # its window has two blocks, and one is there
    index.apply_events(A, 0, [layers((6,), size=4, group=2, kind="sliding_window", window=8)])
    assert tokens(index) == 16


@pytest.mark.parametrize("kind", ["chunked_local_attention", "cross_attention", "unknown"])
def test_kinds_that_tell_nothing_are_left_out(index: PreciseIndex, kind: str) -> None:
    index.apply_events(A, 0, [layers((4,), kind=kind), layers((4,), kind="sliding_window", window=None)])
    assert tokens(index) == 24


@pytest.mark.parametrize("kind", ["mla_attention", "sink_full_attention", None])
def test_other_names_of_full_attention(kind: str | None) -> None:
    index = PreciseIndex()
    index.apply_events(A, 0, [replace(stored(PATH), spec_kind=kind)])
    assert tokens(index) == 24


def test_lower_tiers_of_a_group_are_left_out(index: PreciseIndex) -> None:
    """So much less is predicted."""
    index.apply_events(A, 0, [layers((4,)), replace(layers((9,)), medium="CPU")])
    assert tokens(index) == 8
    index.apply_events(A, 0, [removed(PATH[:4], group=1, medium="CPU")])
    assert tokens(index) == 8


def test_a_match_on_lower_tiers_ends_at_a_state_too() -> None:
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH[:6]), stored(PATH, 6, medium="CPU"), layers((4, 9))])
    assert index.match_prompt(prompt_of(PATH)) == {A: PreciseMatch(12, ((Tier.HOST, 6),), 0)}


def test_clearing_and_leaving_forget_states() -> None:
    index = PreciseIndex()
    for endpoint in (A, B):
        index.apply_events(endpoint, 0, [stored(PATH), layers((4,))])
    index.apply_events(A, 0, [AllBlocksCleared(), stored(PATH)])
    assert {endpoint: match.tokens for endpoint, match in index.match_prompt(prompt_of(PATH)).items()} == {A: 24, B: 8}
    index.apply_events(A, 0, [layers((4,))])
    index.remove_endpoint(A)
    assert (tokens(index), index.step_tokens(A)) == (0, 1)
    assert index.sweep_rows()


def test_a_group_of_another_kind_begins_again(index: PreciseIndex) -> None:
    """The engine was restarted with another model."""
    index.apply_events(A, 0, [layers((9,)), layers((4,), size=4)])
    assert tokens(index) == 8


def test_ranks_have_states_of_their_own(index: PreciseIndex) -> None:
    index.apply_events(A, 1, [stored(PATH), layers((4,))])
    assert tokens(index) == 24


def test_groups_and_their_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_groups, "MAX_GROUPS", 1)
    index = PreciseIndex(max_blocks=12, max_sources=1)
    index.apply_events(A, 0, [stored(PATH, group=0), layers(range(1, 13)), layers((1,), group=2)])
    index.apply_events(A, 0, [layers((12,), group=1), replace(layers(()), block_hashes=(5, 6), group=1)])
    index.apply_events(B, 0, [layers((1, 2), group=1)])
    assert tokens(index) == 24
    index.apply_events(A, 0, [removed(PATH[:1], group=2), BlockRemoved((5, 6), group=1)])
    index.apply_events(B, 0, [removed(PATH[:1], PATH[:2], group=1)])
    assert index.counts.removed_unknown == 5


def test_a_long_search_ends(index: PreciseIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt holds the loop up, whatever an engine said it keeps."""
    monkeypatch.setattr(layer_groups, "MAX_LOOKS", 5)
    index.apply_events(A, 0, [layers((1,))])
    assert tokens(index) == 0


@pytest.mark.parametrize("seed", range(20))
def test_like_a_search_of_every_end(seed: int) -> None:
    """Against the rule written down plainly."""
    rng = Random(seed)
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(PATH)])
    states = {end for end in range(1, 13) if rng.random() < 0.5}
    windowed = {end for end in range(1, 13) if rng.random() < 0.7}
    need = rng.randint(1, 4)
    window = layers(windowed, group=2, kind="sliding_window", window=2 * need + 1)
    index.apply_events(A, 0, [layers(states), window])
    for length in range(13):
        naive = max(
            (end for end in range(1, length + 1)
             if end in states and all(each in windowed for each in range(max(0, end - need) + 1, end + 1))),
            default=0,
        )  # fmt: skip
        assert tokens(index, PATH[:length]) == 2 * naive


def test_removals_of_unknown_groups_are_counted() -> None:
    index = PreciseIndex()
    index.apply_events(A, 0, [layers((4,)), BlockRemoved((1, 2), group=3)])
    assert index.counts.removed_unknown == 2
