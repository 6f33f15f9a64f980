"""Random digits from a stock."""

from __future__ import annotations

from kvproxy.proxy.request.exchange import RandomHex


def test_nothing_is_handed_out_twice() -> None:
    """Every draw of the system's is used from its start, and once."""
    draws = iter(range(256))
    digits = RandomHex(lambda size: bytes([next(draws)]) * size)
    first, rest = digits.take(4000), digits.take(96)
    assert (first, rest) == ("00" * 2000, "00" * 48)
    assert digits.take(32) == "01" * 16


def test_a_leftover_stock_is_not_made_up_for_by_less() -> None:
    """A name that is shorter could be guessed, or be another's: a draw that does not suffice is left for a new one."""
    draws = iter(range(256))
    digits = RandomHex(lambda size: bytes([next(draws)]) * size)
    assert digits.take(4000) == "00" * 2000
    assert digits.take(200) == "01" * 100
    assert digits.take(3896) == "01" * 1948
    assert digits.take(32) == "02" * 16


def test_digits_are_the_systems() -> None:
    """As many as asked for, hexadecimal, and different."""
    digits = RandomHex()
    taken = [digits.take(32) for _ in range(1000)]
    assert all(len(one) == 32 and set(one) <= set("0123456789abcdef") for one in taken)
    assert len(set(taken)) == 1000
