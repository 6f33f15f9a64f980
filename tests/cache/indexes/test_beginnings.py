"""Kept beginnings of prompts give the matches that a question to every source gives."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes import beginnings
from kvproxy.cache.indexes.beginnings import Beginnings
from kvproxy.cache.indexes.block_table import BlockTable
from kvproxy.cache.indexes.precise import PreciseIndex
from tests.cache.indexes.support import prompt_of, removed, stored
from tests.support.examples import examples

Path = tuple[int, ...]
FLEET = [EndpointId(name) for name in "abcd"]
COMMON = (0, 0, 0)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda rest: (*COMMON, *rest))
ENDPOINTS = st.sampled_from(FLEET)
MEDIA = st.sampled_from(["GPU", "GPU", "GPU", "CPU"])


class BeginningsAgainstEverySource(RuleBasedStateMachine):
    """Four engines that nearly always hold the common beginning, and more of some prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PreciseIndex(many_sources=2)
        self.plain = PreciseIndex(many_sources=100)
        self.seen: set[Path] = {COMMON, (0,), (1, 1)}
        for endpoint in FLEET:
            self.store(endpoint, (*COMMON, 1), 0, "GPU", 0)

    @rule(endpoint=ENDPOINTS, path=PATHS, start=st.integers(0, 5), medium=MEDIA, name=st.integers(0, 1))
    def store(self, endpoint: EndpointId, path: Path, start: int, medium: str, name: int) -> None:
        self.seen.add(path)
        for index in (self.index, self.plain):
            event = stored(path, min(start, len(path) - 1), engine=name, medium=medium)
            index.apply_events(endpoint, 0, [event])

    @rule(endpoint=ENDPOINTS, path=PATHS, cut=st.integers(0, 3), medium=MEDIA, name=st.integers(0, 1))
    def remove(self, endpoint: EndpointId, path: Path, cut: int, medium: str, name: int) -> None:
        for index in (self.index, self.plain):
            index.apply_events(endpoint, 0, [removed(path[: len(path) - cut], engine=name, medium=medium)])

    @rule(endpoint=ENDPOINTS)
    def clear(self, endpoint: EndpointId) -> None:
        for index in (self.index, self.plain):
            index.clear_rank(endpoint, 0)

    @invariant()
    def same_matches(self) -> None:
        for path in [*self.seen, *self.seen]:
            assert self.index.match_prompt(prompt_of(path)) == self.plain.match_prompt(prompt_of(path))


BeginningsAgainstEverySource.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30)
test_kept_beginnings_change_no_match = BeginningsAgainstEverySource.TestCase


def make_fleet(size: int) -> tuple[PreciseIndex, list[EndpointId]]:
    """Return an index of engines that hold the common beginning and a chat of their own."""
    index = PreciseIndex(many_sources=size)
    fleet = [EndpointId(f"e{number}") for number in range(size)]
    for number, endpoint in enumerate(fleet):
        index.apply_events(endpoint, 0, [stored((*COMMON, 100 + number), 0)])
    return index, fleet


def looked_at(index: PreciseIndex, path: Path) -> list[EndpointId]:
    """Return the endpoints whose tables a prompt asks."""
    known = index.matcher.beginnings
    assert isinstance(known, Beginnings)
    asked: list[EndpointId] = []
    tables = known._tables

    class Watched(dict[EndpointId, BlockTable]):
        def __getitem__(self, endpoint: EndpointId) -> BlockTable:
            asked.append(endpoint)
            return tables[endpoint]

    known._tables = Watched(tables)
    index.match_prompt(prompt_of(path))
    known._tables = tables
    return asked


def test_a_prompt_asks_the_holders_of_more_and_those_that_changed() -> None:
    """All others hold the common beginning as they did before."""
    index, fleet = make_fleet(8)
    for chat in (1, 2, 3):
        index.match_prompt(prompt_of((*COMMON, chat)))
    assert looked_at(index, (*COMMON, 7, 7)) == []
    assert looked_at(index, (*COMMON, 103, 7)) == [fleet[3]]  # in the run that begins the prompt
    index.apply_events(fleet[5], 0, [stored((*COMMON, 7), 3)])
    assert looked_at(index, (*COMMON, 9)) == [fleet[5]]  # once, since it changed
    assert looked_at(index, (*COMMON, 9)) == []
    assert looked_at(index, (*COMMON, 7, 8)) == [fleet[5]]  # in a run of its own


def test_of_prompts_with_nothing_in_common_only_the_holders_are_asked() -> None:
    """An engine without the first block of a prompt holds nothing of it."""
    index, fleet = make_fleet(8)
    index.apply_events(fleet[2], 0, [stored((5, 6), 0)])
    index.match_prompt(prompt_of((5, 6)))
    assert looked_at(index, (5, 6, 7)) == [fleet[2]]
    assert looked_at(index, (8, 9)) == []


def test_the_longest_unused_beginnings_are_forgotten() -> None:
    """Memory is bounded, however many beginnings a fleet shares."""
    index, fleet = make_fleet(2)
    for beginning in range(2 * beginnings.MAX_KEPT):
        for endpoint in fleet:
            index.apply_events(endpoint, 0, [stored((1000 + beginning,), 0)])
        for _ in range(3):
            index.match_prompt(prompt_of((1000 + beginning, 1)))
    known = index.matcher.beginnings
    assert known is not None
    assert len(known._kept) == beginnings.MAX_KEPT
    assert looked_at(index, (1000 + 2 * beginnings.MAX_KEPT - 1, 1)) == []
    assert looked_at(index, (1000, 1)) == fleet


def test_an_endpoint_that_comes_or_leaves_counts_at_once() -> None:
    """Matches are those of the endpoints there are."""
    index, fleet = make_fleet(4)
    for _ in range(3):
        index.match_prompt(prompt_of((*COMMON, 7)))
    index.apply_events(EndpointId("new"), 0, [stored(COMMON, 0)])
    assert set(index.match_prompt(prompt_of((*COMMON, 7)))) == {*fleet, "new"}
    index.remove_endpoint(fleet[0])
    assert set(index.match_prompt(prompt_of((*COMMON, 7)))) == {*fleet[1:], "new"}
