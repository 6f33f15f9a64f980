"""Bit positions for members (endpoints, event sources) that come and go."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)
V = TypeVar("V")

#: Bits that are looked up one by one.
_FEW = 6


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
        self._groups: dict[int, tuple[M, ...]] = {}  # owners by eight slots and which of them; while none changes

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
        """The owner of an active slot."""
        member = self._members[slot]
        assert member is not None
        return member

    def members(self, mask: int) -> list[M]:
        """The owners of these active slots."""
        found = []
        while mask:
            low = mask & -mask
            member = self._members[low.bit_length() - 1]
            assert member is not None
            found.append(member)
            mask ^= low
        return found

    def assign_all(self, values: dict[M, V], mask: int, value: V) -> None:
        """Set `value` for the owners of these active slots.

        Many bits are looked up eight at a time, since nearly all members of a large fleet hold a common prefix.
        """
        if mask.bit_count() <= _FEW:
            while mask:
                low = mask & -mask
                values[self._members[low.bit_length() - 1]] = value  # type: ignore[index]
                mask ^= low
            return
        for group, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")):
            if byte:
                members = self._groups.get(group << 8 | byte)
                if members is None:
                    members = self._groups[group << 8 | byte] = tuple(self.members(byte << 8 * group))
                values.update(dict.fromkeys(members, value))

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
        self._groups.clear()
        self._slot[member] = slot
        self._members[slot] = member
        self.active |= 1 << slot
        return slot

    def retire(self, member: M) -> int | None:
        """Take the member's bit out of `active` and return its slot; `release` it once the bit is set nowhere."""
        slot = self._slot.pop(member, None)
        if slot is not None:
            self._groups.clear()
            self._members[slot] = None
            self.active &= ~(1 << slot)
        return slot

    def release(self, slot: int) -> None:
        """The retired slot's bit is set nowhere any more."""
        assert not self.active >> slot & 1
        self._free.append(slot)
