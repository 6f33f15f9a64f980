from __future__ import annotations

import pytest

from kvproxy.cache.indexes.bit_allocator import BitAllocator, slots_of


def test_slots_of_a_mask() -> None:
    """Lowest bit first, at any width."""
    assert list(slots_of(0b1010_0001 | 1 << 511)) == [0, 5, 7, 511]
    assert list(slots_of(0)) == []


def test_a_member_keeps_its_slot() -> None:
    """Assigning again changes nothing."""
    slots: BitAllocator[str] = BitAllocator(limit=4)
    assert slots.assign("a") == slots.assign("a") == slots.get("a") == 0
    assert slots.assign("b") == 1
    assert (slots.active, len(slots), list(slots), slots.members(0b10)) == (0b11, 2, ["a", "b"], ["b"])


def test_a_retired_bit_is_not_reused_before_its_release() -> None:
    """Stored masks may still carry it."""
    slots: BitAllocator[str] = BitAllocator(limit=2)
    slots.assign("a")
    slots.assign("b")
    assert slots.retire("a") == 0
    assert slots.active == 0b10
    assert "a" not in slots
    assert slots.assign("c") is None
    slots.release(0)
    assert slots.assign("c") == 0
    assert slots.active == 0b11


def test_a_member_that_returns_gets_a_fresh_bit() -> None:
    """Its old entries stay meaningless."""
    slots: BitAllocator[str] = BitAllocator(limit=4)
    slots.assign("a")
    slots.retire("a")
    assert slots.assign("a") == 1
    assert slots.retire("nobody") is None


def test_releasing_an_active_slot_is_a_mistake() -> None:
    """Two members would share a bit."""
    slots: BitAllocator[str] = BitAllocator(limit=4)
    slots.assign("a")
    with pytest.raises(AssertionError):
        slots.release(0)


def test_five_hundred_and_twelve_members() -> None:
    """As many endpoints as the index is asked for."""
    slots: BitAllocator[int] = BitAllocator(limit=512)
    assert [slots.assign(member) for member in range(512)] == list(range(512))
    assert slots.assign(512) is None


def test_a_value_is_set_for_the_owners_of_a_mask() -> None:
    """However many there are; once a slot changes its owner, the new one gets it."""
    slots: BitAllocator[str] = BitAllocator(limit=20)
    for member in "abcdefghijkl":
        slots.assign(member)
    values = {"z": 1}
    slots.assign_all(values, 0b101, 2)
    assert values == {"z": 1, "a": 2, "c": 2}
    slots.assign_all(values, slots.active & ~1, 3)
    assert values == {"z": 1, "a": 2} | dict.fromkeys("bcdefghijkl", 3)
    slots.release(slots.retire("b") or 0)
    slots.assign("m")
    again: dict[str, int] = {}
    slots.assign_all(again, slots.active & ~1, 4)
    assert again == dict.fromkeys("cdefghijklm", 4)
