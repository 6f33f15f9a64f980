"""Bit positions for members (endpoints, event sources) that come and go."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)


def slots_of(mask: int) -> Iterator[int]:
    """Positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class BitAllocator(Generic[M]):
    """Which member owns which bit. A retired bit is not `active` any more and is reused only after `release`."""

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self.active = 0  # mask of the bits that mean something; AND every stored mask with it
        self._slot: dict[M, int] = {}
        self._members: list[M | None] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slot)

    def __contains__(self, member: M) -> bool:
        return member in self._slot

    def __iter__(self) -> Iterator[M]:
        return iter(self._slot)

    def get(self, member: M) -> int | None:
        """The member's slot."""
        return self._slot.get(member)

    def member(self, slot: int) -> M:
        """Who owns an active slot."""
        member = self._members[slot]
        assert member is not None
        return member

    def members(self, mask: int) -> list[M]:
        """Who own these active slots."""
        found = []
        while mask:
            low = mask & -mask
            member = self._members[low.bit_length() - 1]
            assert member is not None
            found.append(member)
            mask ^= low
        return found

    def assign(self, member: M) -> int | None:
        """The member's slot, a fresh one if it has none; None when all are taken or not yet released."""
        slot = self._slot.get(member)
        if slot is not None:
            return slot
        if self._free:
            slot = self._free.pop()
        elif len(self._members) < self.limit:
            slot = len(self._members)
            self._members.append(None)
        else:
            return None
        self._slot[member] = slot
        self._members[slot] = member
        self.active |= 1 << slot
        return slot

    def retire(self, member: M) -> int | None:
        """Take the member's bit out of `active` and return its slot, which the caller releases once it is clear."""
        slot = self._slot.pop(member, None)
        if slot is not None:
            self._members[slot] = None
            self.active &= ~(1 << slot)
        return slot

    def release(self, slot: int) -> None:
        """The retired slot's bit is set nowhere any more."""
        assert not self.active >> slot & 1
        self._free.append(slot)
