"""A hash table from engines' names of blocks to rows, eight bytes a slot, one size for ever."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

#: In a slot: the name that was here is gone; no row is that small.
DEAD = 1
#: So few that collided are quicker one by one.
_FEW = 96
#: What a name leaves over when divided by it is its hash.
PRIME = 2**32 - 5
_ROW = 2**32 - 1
_HALF = np.uint64(32)

#: Names as a table holds them: the hash, by which it is placed, above its row.
Words = NDArray[np.uint64]


def words_of(names: array[int], rows: Sequence[range]) -> Words:
    """These names with these rows."""
    numbers = np.concatenate([np.arange(each.start, each.stop, dtype=np.uint64) for each in rows])
    hashes: Words = np.frombuffer(names, np.uint64) % np.uint64(PRIME)
    words: Words = hashes << _HALF | numbers
    return words


class NameTable:
    """Open addressing, at most half full, so that a search ends soon."""

    __slots__ = ("_name_of", "size", "slots", "used", "words")

    def __init__(self, size: int, name_of: Callable[[int], int | None]) -> None:
        self._name_of = name_of
        self.size = size
        self.words: Words = np.zeros(size, np.uint64)  # takes memory as it is written to
        self.slots = self.words.data  # the same; quicker one by one
        self.used = 0  # slots, dead ones included

    def find(self, hashed: int, name: int) -> int:
        """The name's row; 0 when it is not here."""
        slots, size = self.slots, self.size
        slot = hashed % size
        while word := slots[slot]:
            if word >> 32 == hashed and self._name_of(word & _ROW) == name:
                return word & _ROW
            slot = slot + 1 if slot + 1 < size else 0
        return 0

    def replace(self, word: int, by: int) -> bool:
        """False when it is not here."""
        slots, size = self.slots, self.size
        slot = (word >> 32) % size
        while here := slots[slot]:
            if here == word:
                slots[slot] = by
                return True
            slot = slot + 1 if slot + 1 < size else 0
        return False

    def put_each(self, names: array[int], rows: Sequence[int]) -> bool:
        """False, and nothing put, where one of the names is here already."""
        slots, size = self.slots, self.size
        for name, row in zip(names, rows, strict=True):
            hashed = name % PRIME
            slot = hashed % size
            while here := slots[slot]:
                if here >> 32 == hashed and self._name_of(here & _ROW) == name:
                    for each in reversed(range(rows.index(row))):
                        self.replace(names[each] % PRIME << 32 | rows[each], 0)
                    return False
                slot = slot + 1 if slot + 1 < size else 0
            slots[slot] = hashed << 32 | row
        self.used += len(names)
        return True

    def put_all(self, words: Words) -> bool:
        """As `put_each`, together."""
        every, at, left, put = self.words, self.homes(words), words, []
        known = False
        while not known:
            free = every[at] == 0
            spots = at[free]
            every[spots] = left[free]  # of several for one slot, one
            put.append(spots)
            found = every[at]
            crowded = (found != left).nonzero()[0]
            at, left = at[crowded], left[crowded]
            if len(left) <= _FEW:
                known = not self._put_crowded(at.tolist(), left.tolist(), put)
                break
            known = self._meet(left, found[crowded])
            at += 1
            at[at == self.size] = 0
        if known:
            for spots in put:
                every[spots] = 0
            return False
        self.used += len(words)
        return True

    def holds_any(self, words: Words) -> bool:
        """Whether one of these names is here."""
        at = self.homes(words)
        while len(words):
            found = self.words[at]
            taken = found.nonzero()[0]
            at, words = at[taken], words[taken]
            if self._meet(words, found[taken]):
                return True
            at += 1
            at[at == self.size] = 0
        return False

    def homes(self, words: Words) -> NDArray[np.intp]:
        """The slots where they would be if nobody else was."""
        return ((words >> _HALF) % np.uint64(self.size)).view(np.intp)

    def _put_crowded(self, at: list[int], words: list[int], put: list[NDArray[np.intp]]) -> bool:
        """One by one, from slots on that others have. Where they went is added to `put`."""
        slots, size, name_of = self.slots, self.size, self._name_of
        for done, (slot, word) in enumerate(zip(at, words, strict=True)):
            while here := slots[slot]:
                if (here ^ word) <= _ROW and name_of(here & _ROW) == name_of(word & _ROW):
                    put.append(np.array(at[:done], np.intp))
                    return False
                slot = slot + 1 if slot + 1 < size else 0
            slots[slot] = word
            at[done] = slot
        return True

    def _meet(self, words: Words, found: Words) -> bool:
        """Whether one of the words stands for the same name as what was found for it."""
        alike = ((words ^ found) <= _ROW).nonzero()[0]
        return any(
            self._name_of(int(words[each]) & _ROW) == self._name_of(int(found[each]) & _ROW) for each in alike.tolist()
        )
