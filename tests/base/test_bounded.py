"""The mapping with a bound by count and by bytes."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.bounded import BoundedMapping


def test_the_least_recently_used_leaves_first() -> None:
    """Reading by key or `get` is use; asking `in` is not."""
    cache: BoundedMapping[str, int] = BoundedMapping(2)
    cache["a"], cache["b"] = 1, 2
    assert (cache.get("a"), "b" in cache) == (1, True)
    cache["c"] = 3
    assert sorted(cache) == ["a", "c"]


def test_a_value_over_the_bound_in_bytes_is_not_kept() -> None:
    """Nor what its key held before, which it was to replace; the rest stays."""
    cache: BoundedMapping[str, bytes] = BoundedMapping(10, max_bytes=8, size_of=len)
    cache["a"], cache["b"] = b"1234", b"12"
    cache["a"] = b"123456789"
    assert (dict(cache), cache.held_bytes) == ({"b": b"12"}, 2)


def test_a_value_that_grows_makes_room_for_itself() -> None:
    """Bytes are counted by what is held now."""
    cache: BoundedMapping[str, bytes] = BoundedMapping(10, max_bytes=8, size_of=len)
    cache["a"], cache["b"] = b"1234", b"1234"
    cache["b"] = b"12345"
    assert (dict(cache), cache.held_bytes) == ({"b": b"12345"}, 5)


def test_without_sizes_the_count_alone_bounds() -> None:
    """And `held_bytes` counts entries."""
    cache: BoundedMapping[int, str] = BoundedMapping(3)
    for key in range(10):
        cache[key] = "x" * 1000
    assert (sorted(cache), cache.held_bytes) == ([7, 8, 9], 3)


def test_forgetting_and_clearing_free_the_bytes() -> None:
    """Whichever way an entry leaves."""
    cache: BoundedMapping[int, bytes] = BoundedMapping(9, max_bytes=100, size_of=len)
    for key in range(4):
        cache[key] = b"12345"
    del cache[0]
    assert cache.pop(1) == b"12345"
    assert cache.pop(1, None) is None
    assert cache.held_bytes == 10
    cache.clear()
    assert (len(cache), cache.held_bytes) == (0, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 6)), max_size=80))
def test_holds_what_a_naive_model_holds(steps: list[tuple[bool, int, int]]) -> None:
    """Any mix of reads and writes against an order of use kept by hand, under both bounds."""
    cache: BoundedMapping[int, bytes] = BoundedMapping(4, max_bytes=12, size_of=len)
    model: OrderedDict[int, bytes] = OrderedDict()
    for writes, key, size in steps:
        if not writes:
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
            continue
        value = bytes(size)
        cache[key] = value
        if key not in model and len(model) >= 4:
            model.popitem(last=False)
        _write(model, key, value)
        assert set(cache) == set(model)
        assert cache.held_bytes == sum(map(len, model.values())) <= 12


def _write(model: OrderedDict[int, bytes], key: int, value: bytes) -> None:
    """Room is made from the oldest on, the key's own old value included when it is its turn."""
    while sum(len(held) for name, held in model.items() if name != key) + len(value) > 12:
        model.popitem(last=False)
    model[key] = value
    model.move_to_end(key)
