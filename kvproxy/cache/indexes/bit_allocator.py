"""Bit positions for members (endpoints, event sources) that come and go."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)
V = TypeVar("V")

#: Bits resolved one by one, those that are missing as well: in a large fleet nearly all hold a common prefix, and
#: mostly all but the few that hold more of a chat. The owners of many are cached by mask, for this many masks.
_FEW = 6
_KNOWN_MASKS = 1024


def slots_of(mask: int) -> Iterator[int]:
    """Positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class BitAllocator(Generic[M]):
    """Assignment of bits to members. A retired bit is no longer `active` and is reused only after `release`."""

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self.active = 0  # mask of the bits that mean something; AND every stored mask with it
        self._slot: dict[M, int] = {}
        self._members: list[M | None] = []
        self._free: list[int] = []
        #: As long as no slot changes its owner. A dict, and it starts over when full: every lookup reads it.
        self._known_masks: dict[int, tuple[M, ...]] = {}

    def __len__(self) -> int:
        return len(self._slot)

    def __contains__(self, member: M) -> bool:
        return member in self._slot

    def __iter__(self) -> Iterator[M]:
        return iter(self._slot)

    def get(self, member: M) -> int | None:
        """Return the member's slot."""
        return self._slot.get(member)

    def members(self, mask: int) -> list[M]:
        """Return the owners of these active slots."""
        found = []
        while mask:
            low = mask & -mask
            member = self._members[low.bit_length() - 1]
            assert member is not None
            found.append(member)
            mask ^= low
        return found

    def assign_all(self, values: dict[M, V], mask: int, value: V) -> None:
        """Set `value` for the owners of these active slots."""
        if mask.bit_count() <= _FEW:
            while mask:
                low = mask & -mask
                values[self._members[low.bit_length() - 1]] = value  # type: ignore[index]
                mask ^= low
            return
        members = self._known_masks.get(mask)
        if members is None:
            if len(self._known_masks) >= _KNOWN_MASKS:
                self._known_masks.clear()
            members = self._known_masks[mask] = self._owners_of(mask)
        values.update(dict.fromkeys(members, value))

    def _owners_of(self, mask: int) -> tuple[M, ...]:
        missing = self.active & ~mask
        if missing.bit_count() > _FEW:
            return tuple(self.members(mask))
        owners = dict.fromkeys(self._slot)
        for member in self.members(missing):
            del owners[member]
        return tuple(owners)

    def assign(self, member: M) -> int | None:
        """Return the member's slot, a fresh one if it has none; None when all are taken or not yet released."""
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
        self._known_masks.clear()
        self._slot[member] = slot
        self._members[slot] = member
        self.active |= 1 << slot
        return slot

    def retire(self, member: M) -> int | None:
        """Take the member's bit out of `active` and return its slot; `release` it once the bit is set nowhere."""
        slot = self._slot.pop(member, None)
        if slot is not None:
            self._known_masks.clear()
            self._members[slot] = None
            self.active &= ~(1 << slot)
        return slot

    def release(self, slot: int) -> None:
        """Release a retired bit that is no longer set anywhere."""
        assert not self.active >> slot & 1
        self._free.append(slot)
