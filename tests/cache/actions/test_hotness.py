"""Prefixes that come again and again, counted within a window and within bounds."""

from __future__ import annotations

from array import array

from kvproxy.cache.actions.hotness import Hotness, KnownPrefix, common_tokens
from tests.cache.support import tokens


def hotness(
    *, window_s: float = 300, max_records: int = 100, max_keys: int = 100, max_token_bytes: int = 1 << 20
) -> Hotness:
    return Hotness(window_s=window_s, max_records=max_records, max_keys=max_keys, max_token_bytes=max_token_bytes)


def use(under_test: Hotness, keys: list[int], now: float = 0.0, instance: str = "a") -> list[KnownPrefix]:
    return under_test.count_use(keys, model="m", cache_salt="", instance=instance, now=now)


def test_a_shared_system_prompt_becomes_hot() -> None:
    """Prefixes are counted, not only whole prompts: three chats under one system prompt are three uses of it."""
    under_test = hotness()
    for number in range(3):
        used = use(under_test, [1, 100 + number])
    assert under_test.count_recent_uses(used[0], 0.0) == 3
    assert under_test.count_recent_uses(used[1], 0.0) == 1


def test_a_prefix_ends_where_two_prompts_part() -> None:
    """The tokens of a shared beginning are known once two prompts that differ after it were seen."""
    under_test = hotness()
    first = use(under_test, [1, 100])
    under_test.learn_tokens(first, array("I", [7, 8, 9, 1, 2, 3]))
    assert not first[0].actionable
    assert first[1].actionable
    second = use(under_test, [1, 101])
    under_test.learn_tokens(second, array("I", [7, 8, 9, 4, 5]))
    assert second[0].actionable
    assert second[0].tokens == array("I", [7, 8, 9])


def test_the_same_prompt_twice_does_not_end_its_prefixes() -> None:
    under_test = hotness()
    for _ in range(2):
        used = use(under_test, [1, 100])
        under_test.learn_tokens(used, tokens(50))
    assert not used[0].actionable
    assert used[1].actionable


def test_uses_leave_the_window() -> None:
    under_test = hotness(window_s=10)
    for now in (0.0, 5.0, 9.0):
        used = use(under_test, [1], now)
    assert under_test.count_recent_uses(used[0], 10.0) == 3
    assert under_test.count_recent_uses(used[0], 12.0) == 2
    assert under_test.count_recent_uses(used[0], 100.0) == 0


def test_records_per_prefix_are_bounded() -> None:
    under_test = hotness(max_records=5)
    for _ in range(50):
        used = use(under_test, [1])
    assert under_test.count_recent_uses(used[0], 0.0) == 5


def test_keys_at_their_bound_drop_the_longest_unused() -> None:
    """A key that keeps coming stays, however many others pass by."""
    under_test = hotness(max_keys=10)
    for number in range(1000):
        use(under_test, [number + 10])
        hot = use(under_test, [1])
    assert len(under_test) == 10
    assert under_test.count_recent_uses(hot[0], 0.0) == 100  # as many as records allow


def test_tokens_are_bounded_in_bytes() -> None:
    under_test = hotness(max_token_bytes=4 * 1000)
    for number in range(50):
        under_test.learn_tokens(use(under_test, [number]), tokens(100))
        assert under_test.held_bytes <= 4000
    assert len(under_test) == 10


def test_a_prefix_that_was_dropped_learns_nothing() -> None:
    """Tokens may come long after the use they belong to."""
    under_test = hotness(max_keys=1)
    old = use(under_test, [1])
    use(under_test, [2])
    under_test.learn_tokens(old, tokens(100))
    under_test.learn_tokens([], tokens(100))
    assert under_test.held_bytes == 0


def test_of_a_long_chat_the_edges_count() -> None:
    """A chat of a hundred messages costs eight entries, not a hundred."""
    under_test = hotness()
    used = use(under_test, list(range(1, 101)))
    assert [one.key for one in used] == [1, 2, 3, 4, 97, 98, 99, 100]


def test_the_coldest_come_first_and_only_where_they_were_served() -> None:
    under_test = hotness()
    for key, instance in ((1, "a"), (2, "b"), (3, "a")):
        under_test.learn_tokens(use(under_test, [key], instance=instance), tokens(10, start=key))
    use(under_test, [1], instance="a")
    assert [one.key for one in under_test.walk_coldest("a")] == [3, 1]
    next(under_test.walk_coldest("a")).instances.discard("a")
    assert [one.key for one in under_test.walk_coldest("a")] == [1]
    under_test.note_emptied("a")
    assert not list(under_test.walk_coldest("a"))
    assert [one.key for one in under_test.walk_coldest("b")] == [2]


def test_the_end_of_a_session_cools_what_it_alone_asked_for() -> None:
    """Hot no longer, and the first to go. What a sub-agent or another session asked for too stays as it is."""
    under_test = hotness()

    def asked(session: int, *keys: int) -> list[KnownPrefix]:
        used = under_test.count_use(keys, model="m", cache_salt="", instance="a", now=0.0, session=session)
        under_test.learn_tokens(used, tokens(50))
        return used

    asked(9, 5)
    system, own, *_ = asked(1, 100, 101)
    asked(1, 100, 101, 102)
    asked(2, 100, 200)
    under_test.end_session(1, [100, 101, 102, 999])
    assert (under_test.count_recent_uses(system, 0.0), under_test.count_recent_uses(own, 0.0)) == (3, 0)
    assert [prefix.key for prefix in under_test.walk_coldest("a")][:2] == [102, 101]
    asked(0, 300)
    under_test.end_session(0, [300])
    [unnamed] = [prefix for prefix in under_test.walk_coldest("a") if prefix.key == 300]
    assert under_test.count_recent_uses(unnamed, 0.0) == 1


def test_the_common_beginning_of_tokens() -> None:
    a = tokens(1000)
    for length in (0, 1, 2, 3, 499, 500, 999, 1000):
        b = a[:length] + array("I", [0] * 5)
        assert common_tokens(a, b) == common_tokens(b, a) == length
    assert common_tokens(a, array("I")) == 0
