"""From engines' names of blocks to rows, in a hash table that never grows in one go."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from random import SystemRandom

import numpy as np

from kvproxy.prefix.precise.hash_table import DEAD, HashTable, hash_of, words_of

#: Names from which on they are taken together: numpy costs microseconds a call and nanoseconds a name.
_TOGETHER = 32
#: Slots of the former table that are cleared with every addition while there is one: at least so many, and so many a
#: name, so that it is empty before a new table of a quarter of its size (see `_renew`) is half full.
STEP_SLOTS, _SLOTS_CLEARED_A_NAME = 8192, 16

_SMALLEST = 61
_SLOTS_A_NAME = 6  # of a new table; down to two before the next one


class EngineHashMap:
    """No name has two rows. `name_of` says which name a row has, of rows that are being added as well. `factor`, odd
    and 64 bits long, is random unless given.

    A table that gets half full is followed by another, into which its names move some at a time.
    """

    def __init__(self, name_of: Callable[[int], int | None], *, factor: int | None = None) -> None:
        self._name_of = name_of
        self._factor = SystemRandom().getrandbits(64) | 1 if factor is None else factor
        self._live = 0
        self._table = HashTable(_SMALLEST, name_of, self._factor)
        self._former: HashTable | None = None
        self._start = 0  # a slot of the former table that was empty when it became that
        self._moved = 0  # slots from there on that were cleared; no search begins among them and ends beyond

    @property
    def slots(self) -> int:
        """Of the table, and of the former one while there is one."""
        return self._table.size + (0 if self._former is None else self._former.size)

    @property
    def moving(self) -> int:
        """Slots of the former table yet to be cleared."""
        return 0 if self._former is None else self._former.size - self._moved

    def find(self, name: int) -> int:
        """Its row; 0 when it is not known."""
        hashed = hash_of(name, self._factor)
        row = self._table.find(hashed, name)
        if not row and self._former is not None and self._waits(self._former, hashed):
            row = self._former.find(hashed, name)
        return row

    def add(self, names: array[int], rows: Sequence[range]) -> bool:
        """New names with their rows. False, and nothing changed, when one of them is taken or comes twice."""
        count = len(names)
        if 2 * (self._table.used + count) > self._table.size:
            self._renew(count)
        if self._former is not None:
            self._move(self._former, max(STEP_SLOTS, _SLOTS_CLEARED_A_NAME * count))
        if count < _TOGETHER:
            added = self._add_each(names, rows[0] if len(rows) == 1 else [*chain(*rows)])
        else:
            added = self._add_all(names, rows)
        self._live += count * added
        return added

    def redirect(self, name: int, row: int, to: int) -> None:
        """The name with this row has another row from now on."""
        hashed = hash_of(name, self._factor) << 32
        if not self._table.replace(hashed | row, hashed | to) and self._former is not None:
            self._former.replace(hashed | row, hashed | to)

    def drop(self, name: int, row: int) -> None:
        """The name with this row is not known any more."""
        word = hash_of(name, self._factor) << 32 | row
        if not self._table.replace(word, DEAD) and self._former is not None:
            self._former.replace(word, DEAD)
        self._live -= 1

    def _add_each(self, names: array[int], rows: Sequence[int]) -> bool:
        former = self._former
        if former is not None:
            for name in names:
                hashed = hash_of(name, self._factor)
                if self._waits(former, hashed) and former.find(hashed, name):
                    return False
        return self._table.put_each(names, rows)

    def _add_all(self, names: array[int], rows: Sequence[range]) -> bool:
        words = words_of(names, rows, self._factor)
        former = self._former
        if former is not None:
            waiting = (former.homes(words) - self._start) % former.size >= self._moved
            if former.holds_any(words[waiting]):
                return False
        return self._table.put_all(words)

    def _waits(self, former: HashTable, hashed: int) -> bool:
        """Whether a name with this hash is still in the former table if it was."""
        return (hashed % former.size - self._start) % former.size >= self._moved

    def _renew(self, count: int) -> None:
        """Another table with room for so many more; a smaller one where many are gone."""
        if self._former is not None:
            self._move(self._former, self._former.size)
        former = self._former = self._table
        size = max(_SMALLEST, _SLOTS_A_NAME * (self._live + count), former.size // 4)
        self._table = HashTable(size | 1, self._name_of, self._factor)
        self._start = next(slot for slot, word in enumerate(former.slots) if not word)
        self._moved = 0

    def _move(self, former: HashTable, slots: int) -> None:
        """Clear so many slots, and those up to the next empty one."""
        size, begin = former.size, self._start + self._moved
        end = min(begin + slots, self._start + size)
        while former.slots[end % size]:
            end += 1
        words = former.words.take(np.arange(begin, end), mode="wrap")
        self._table.put_all(words[words > DEAD])
        self._moved = end - self._start
        if self._moved == size:
            self._former = None
