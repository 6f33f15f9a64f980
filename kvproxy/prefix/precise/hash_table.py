"""A hash table from engines' names of blocks to rows, eight bytes a slot, one size for ever."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

#: In a slot: the name that was here is gone; no row is that small.
DEAD = 1
#: So few that collided are quicker one by one.
_FEW = 96
#: Slots from which on a table's memory is cleared in small pages.
_LARGE = 1 << 17
_ROW = 2**32 - 1
_U64 = 2**64 - 1
_HALF = np.uint64(32)

#: Names as a table holds them: the hash, by which it is placed, above its row.
Words = NDArray[np.uint64]


def hash_of(name: int, factor: int) -> int:
    """32 bits. `factor` is odd and random: names in sequence do not come together, nor any an engine could choose."""
    return (name * factor & _U64) >> 32


def words_of(names: array[int], rows: Sequence[range], factor: int) -> Words:
    """These names with these rows."""
    numbers = np.concatenate([np.arange(each.start, each.stop, dtype=np.uint64) for each in rows])
    products: Words = np.frombuffer(names, np.uint64) * np.uint64(factor)
    words: Words = products >> _HALF << _HALF | numbers
    return words


def _zeros(size: int) -> Words:
    """Takes memory as it is written to, a small page at a time: numpy would ask for huge pages, and the first names,
    which go everywhere, would wait until all of a large table is cleared.
    """
    if size < _LARGE:
        return np.zeros(size, np.uint64)
    memory = mmap.mmap(-1, 8 * size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint64)


class HashTable:
    """Open addressing, at most half full, so that a search ends soon."""

    __slots__ = ("_factor", "_name_of", "size", "slots", "used", "words")

    def __init__(self, size: int, name_of: Callable[[int], int | None], factor: int) -> None:
        self._name_of = name_of
        self._factor = factor
        self.size = size
        self.words = _zeros(size)
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
        slots, size, factor = self.slots, self.size, self._factor
        for name, row in zip(names, rows, strict=True):
            hashed = (name * factor & _U64) >> 32  # hash_of, without a call a name
            slot = hashed % size
            while here := slots[slot]:
                if here >> 32 == hashed and self._name_of(here & _ROW) == name:
                    for each in reversed(range(rows.index(row))):
                        self.replace(hash_of(names[each], factor) << 32 | rows[each], 0)
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
