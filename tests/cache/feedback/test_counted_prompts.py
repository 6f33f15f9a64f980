"""CountedPrompts: how long a chat's next turn is, by what its engine counted in the one before."""

from __future__ import annotations

import pytest

from kvproxy.cache.feedback import token_counts
from kvproxy.cache.feedback.token_counts import CountedPrompts
from kvproxy.cache.overlap.facts import Result
from tests.cache.support import A, chat, engine, long_text, world


async def test_a_next_turn_is_as_long_as_its_last_one_says() -> None:
    """Others of the model have words of another length; what its own chat had counts."""
    async with world({"a": engine()}) as service:
        for number in range(20):
            other = await service.ask(chat(long_text(f"w{number}-")))
            service.kv.finished(other, Result(A, True, prompt_tokens=100))
        first = await service.ask(chat(long_text("x", 1000)))
        service.kv.placed(first, A)
        service.kv.finished(first, Result(A, True, prompt_tokens=1000))
        facts = await service.ask(chat(long_text("x", 1000), "I see", "and now?"))
    assert facts.overlaps.by_endpoint[A].tokens == pytest.approx(1000, rel=0.05)
    assert facts.overlaps.prompt_tokens == pytest.approx(1010, rel=0.02)


def test_the_longest_beginning_says_it() -> None:
    """And none that ends very many messages before, which says little of so much more."""
    counted = CountedPrompts()
    counted.note_prompt([1], 300, 100)
    counted.note_prompt([1, 2, 3], 500, 100)
    assert counted.find_ratio([1, 2, 3, 4]) == 5
    assert counted.find_ratio([1, 2]) == 3
    assert counted.find_ratio([7, 8]) is None
    assert counted.find_ratio([1, *range(100, 120)]) is None
    assert counted.find_ratio([]) is None


def test_uninformative_counts_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short prompt is mostly template; the least recently counted is forgotten, and none is beyond belief."""
    monkeypatch.setattr(token_counts, "_MAX_COUNTED", 2)
    counted = CountedPrompts()
    counted.note_prompt([], 300, 100)
    counted.note_prompt([1], 30, 10)
    assert len(counted) == 0
    for key in (1, 2, 3):
        counted.note_prompt([key], 10**6, 100)
    assert [counted.find_ratio([key]) for key in (1, 2, 3)] == [None, 64, 64]
