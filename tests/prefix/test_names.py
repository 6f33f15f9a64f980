"""The hash table of names against a dictionary."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvproxy.prefix.precise.engine_hash_map import STEP_SLOTS, EngineHashMap

FIRST_ROW = 512
FACTOR = 0x9E3779B97F4A7C15
INVERSE = pow(FACTOR, -1, 2**64)


class Column:
    """Names by row, and what is known of each."""

    def __init__(self, factor: int = FACTOR) -> None:
        self.by_row: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.names = EngineHashMap(self.by_row.get, factor=factor)
        self._next = FIRST_ROW

    def add(self, names: Sequence[int], *, pieces: int = 1) -> bool:
        """To so many rows one after another, in so many ranges apart."""
        taken = bool(self.rows.keys() & set(names)) or len(set(names)) < len(names)
        size = -(-len(names) // pieces)
        rows = []
        for start in range(0, len(names), size):
            part = names[start : start + size]
            rows.append(range(self._next, self._next + len(part)))
            self.by_row.update(zip(rows[-1], part, strict=True))
            self._next += len(part) + 7
        added = self.names.add(array("Q", names), rows)
        assert added is not taken
        for row in (row for each in rows for row in each):
            if added:
                self.rows[self.by_row[row]] = row
            else:
                del self.by_row[row]
        return added

    def drop(self, name: int) -> None:
        row = self.rows.pop(name)
        self.names.drop(name, row)
        del self.by_row[row]

    def redirect(self, name: int) -> None:
        row = self.rows[name]
        self.by_row[self._next] = name
        self.names.redirect(name, row, self._next)
        del self.by_row[row]
        self.rows[name] = self._next
        self._next += 1

    def check(self, *others: int) -> None:
        assert {name: self.names.find(name) for name in self.rows} == self.rows
        assert not any(self.names.find(name) for name in others if name not in self.rows)


def fresh(count: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(count)]


@pytest.mark.parametrize("size", [1, 5, 31, 32, 33, 500, 3000])
def test_every_name_leads_to_its_row(size: int) -> None:
    """However many come at once, and while the table is followed by a larger one."""
    column, every = Column(), fresh(40_000 // max(1, 500 // size), seed=size)
    for at in range(0, len(every), size):
        assert column.add(every[at : at + size], pieces=1 + size // 600)
        column.check(*every[at + size : at + size + 3])
        if at > 20 * size:
            column.rows = dict(list(column.rows.items())[-200:])
    for name, row in list(column.rows.items()):
        assert column.names.find(name) == row


RANDOM, SEQUENCE = fresh(120_000, seed=1), [*range(1, 120_001)]


@pytest.mark.parametrize(
    "every",
    [RANDOM, SEQUENCE, SEQUENCE[::-1], [n << 20 for n in SEQUENCE], [n << 44 for n in SEQUENCE]],
    ids=["random", "sequence", "downwards", "strides", "upper bits"],
)
@pytest.mark.parametrize("factor", [FACTOR, fresh(1, seed=4)[0] | 1])
def test_an_addition_clears_a_bounded_part_of_the_former_table(every: list[int], factor: int) -> None:
    """No addition moves all names, whatever an engine calls its blocks; for a while some are in either table."""
    column = Column(factor)
    both, cleared = 0, []
    for at in range(0, len(every), 400):
        before = column.names.moving
        assert column.add(every[at : at + 400])
        after = column.names.moving
        both += after > 0
        cleared.append(before - after)
    assert max(cleared) <= STEP_SLOTS + 500  # to the next empty slot
    assert both > 5
    column.check(*fresh(50, seed=2))


def on_the_move() -> Column:
    """Between two tables, with most names in the former one."""
    column = Column()
    for seed in range(1000):
        column.add(fresh(500, seed=1000 + seed))
        if column.names.moving:
            break
    assert column.names.moving
    return column


@pytest.mark.parametrize("size", [3, 40, 700])
@pytest.mark.parametrize("moving", [False, True])
def test_a_taken_name_undoes_the_whole_addition(size: int, moving: bool) -> None:
    """Known already in either table, or twice among the new ones: nothing is added, and all of it can be afterwards."""
    for attempt in range(8):
        column = on_the_move() if moving else Column()
        column.add(fresh(10, seed=3))
        every = list(column.rows)
        new = fresh(size, seed=100 + attempt)
        assert not column.add([*new, every[attempt * 1000 % len(every)]])
        assert not column.add([*new, new[0]])
        assert not any(map(column.names.find, new))
        assert column.add(new)
        column.check()


@pytest.mark.parametrize("what", ["drop", "redirect"])
def test_names_between_two_tables_can_change(what: str) -> None:
    """Whether they moved yet or not; the move goes on with what is left."""
    column = on_the_move()
    known = list(column.rows)
    for name in known[::3]:
        getattr(column, what)(name)
    column.check(*known)
    while column.names.moving:
        column.add(fresh(1, seed=len(column.rows)))
    column.check(*known)


def test_a_table_that_fills_before_the_former_is_empty_moves_the_rest() -> None:
    """No addition is too large."""
    column = on_the_move()
    assert column.add(fresh(60_000, seed=8))
    column.check()


def test_names_of_one_hash_are_told_apart() -> None:
    """Also among those added together, and by a name that is not there."""
    column = Column()
    same = [((7 << 32) + n) * INVERSE % 2**64 for n in range(300)]
    assert column.add(same[:150])
    for name in same[150:160]:
        assert column.add([name])
    assert not column.add([*fresh(40, seed=5), same[3]])
    column.drop(same[0])
    column.check(*same[160:], same[0])


@pytest.mark.parametrize("stride", [1, 1 << 16, 1 << 40])
def test_regular_names_are_spread(stride: int) -> None:
    """Counters and names that differ in their upper bits only are found in a few steps, like any."""
    column = Column()
    asked = 0

    def counting(row: int) -> int | None:
        nonlocal asked
        asked += 1
        return column.by_row.get(row)

    column.names = EngineHashMap(counting, factor=FACTOR)
    every = [n * stride for n in range(1, 20_000)]
    for at in range(0, len(every), 500):
        column.add(every[at : at + 500])
    asked = 0
    column.check()
    assert asked < 2 * len(every)


def test_a_table_of_gone_names_is_followed_by_a_smaller_one() -> None:
    """Names that come and go for ever take no more room than those there at once."""
    column = Column()
    for turn in range(400):
        new = fresh(300, seed=turn)
        column.add(new)
        for name in new:
            column.drop(name)
    assert column.names.slots < 20_000
    column.check(*fresh(300, seed=3))


class NamesAgainstDictionary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.column = on_the_move()
        self.seed = 0

    @rule(count=st.sampled_from([1, 2, 30, 40, 2000]), pieces=st.integers(1, 3))
    def add(self, count: int, pieces: int) -> None:
        self.seed += 1
        self.column.add(fresh(count, seed=self.seed), pieces=min(count, pieces))

    @rule(count=st.sampled_from([1, 40]), which=st.integers(0))
    def add_known(self, count: int, which: int) -> None:
        if self.column.rows:
            self.seed += 1
            known = list(self.column.rows)[which % len(self.column.rows)]
            self.column.add([*fresh(count, seed=self.seed), known])

    @rule(which=st.integers(0), count=st.sampled_from([1, 300]))
    def drop(self, which: int, count: int) -> None:
        names = list(self.column.rows)
        for name in names[which % max(1, len(names)) :][:count]:
            self.column.drop(name)

    @rule(which=st.integers(0), count=st.sampled_from([1, 300]))
    def redirect(self, which: int, count: int) -> None:
        names = list(self.column.rows)
        for name in names[which % max(1, len(names)) :][:count]:
            self.column.redirect(name)

    @invariant()
    def agree(self) -> None:
        names = list(self.column.rows)
        step = max(1, len(names) // 200)
        for name in names[::step]:
            assert self.column.names.find(name) == self.column.rows[name]
        assert not self.column.names.find(12345)


NamesAgainstDictionary.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
test_names_agree_with_a_dictionary = NamesAgainstDictionary.TestCase
