"""A priority is an integer within bounds, or none."""

from __future__ import annotations

import pytest

from kvproxy.proxy.placement import priority_of


@pytest.mark.parametrize(
    ("value", "expected"),
    [(b"5", 5), (b"-3", -3), (b"1000000", 100), (b"-1000000", -100), (b"high", 0), (b"", 0), (b"9" * 5000, 0)],
)
def test_priority_of(value: bytes, expected: int) -> None:
    """Numbers are clamped; nonsense, absurdly long numbers included, counts as none."""
    assert priority_of([(b"x-priority", value)], b"x-priority") == expected


def test_without_the_header_all_are_alike() -> None:
    """Zero."""
    assert priority_of([(b"other", b"5")], b"x-priority") == 0
