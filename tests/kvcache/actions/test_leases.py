"""Which prompts are kept, for how long and within which budgets."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import EndpointId
from kvproxy.cache.action_settings import LeaseSettings
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.features.leases.conversations import FIRST_S, MAX_WAITING, Waiting, choose_duration
from kvproxy.features.leases.gaps import HORIZON_S, LEAST_SEEN, Gaps, PauseKind
from kvproxy.features.leases.leases import (
    MAX_RELEASED,
    Lease,
    LeaseBook,
    Lever,
    Why,
)

A = EndpointId("a")
CALLS, TALKS = ("codex", "bash"), ("codex", "")


def settings(**changes: Any) -> LeaseSettings:
    return LeaseSettings.model_validate({"enabled": True, "min_tokens": 1, **changes})


def waiting(
    key: int = 1, kind: PauseKind = CALLS, *, tenant: str = "t", asked_s: float | None = None, session: int = 0,
    endpoint: EndpointId = A, at: float = 0.0,
) -> Waiting:  # fmt: skip
    return Waiting(key, kind, at, endpoint, "default", tenant, session, asked_s)


def lease(
    of: Waiting, tokens: int = 1000, *, lever: Lever = Lever.PIN, held: bool = True, until: float = 60.0
) -> Lease:
    prefix = KnownPrefix(of.key, "m", "", deque(), whole=of.key, tokens=array("I", range(tokens)))
    return Lease(of, prefix, "a", lever, Why.TOOL_CALL, of.ended_at, until, of.ended_at, held)


def known(kind: PauseKind, seconds: float | None, *others: float | None) -> Gaps:
    """Enough pauses of a kind, as many of each."""
    gaps = Gaps()
    for each in (seconds, *others):
        for _ in range(int(LEAST_SEEN)):
            gaps.count(kind, each)
    return gaps


@pytest.mark.parametrize(
    ("of", "gaps", "expected_s"),
    [
        (waiting(kind=TALKS), Gaps(), None),  # nobody says that anyone comes back
        (waiting(), Gaps(), FIRST_S),
        (waiting(), known(CALLS, 4.0), 4.0),
        (waiting(), known(CALLS, 3000.0), None),  # nearly all come after the longest lease
        (waiting(), known(CALLS, 4.0, *[None] * 8), None),  # one in nine comes back
        (waiting(kind=TALKS, asked_s=300.0), Gaps(), 300.0),
        (waiting(kind=TALKS, asked_s=300.0), known(TALKS, 20.0), 20.0),
        (waiting(kind=TALKS, asked_s=86_400.0), Gaps(), 900.0),
        (waiting(asked_s=30.0), known(CALLS, 20.0, 80.0, 80.0), 30.0),  # the client's word is the bound
    ],
)
def test_a_lease_lasts_as_long_as_pauses_do(of: Waiting, gaps: Gaps, expected_s: float | None) -> None:
    duration_s = choose_duration(of, gaps, settings())
    assert duration_s == (None if expected_s is None else pytest.approx(expected_s, rel=0.2))


def test_a_return_ends_the_pause_and_takes_the_lease() -> None:
    """The next turn's prompt goes on from the last one; one of another conversation is none."""
    book = LeaseBook()
    book.waiting.add(waiting(7))
    assert book.grant(granted := lease(waiting(7)), settings()) == ""
    assert granted.known.promised_until == granted.until
    book.note_return([1, 2, 3], 5.0)
    assert book.take_returned([1, 2, 3]) is None
    book.note_return([5, 7, 8, 9], 5.0)
    assert not book.waiting
    assert book.take_returned([5, 7, 8, 9]) is granted
    assert (book.leases, dict(book.tenant_tokens), granted.known.promised_until) == ({}, {}, 0)
    assert list(book.released) == [("a", 7)]
    assert len(book.gaps) == 3


def test_what_is_learned_of_a_prompt_later_changes_no_lease() -> None:
    """It was seen to be the beginning of prompts that part before its end: budgets and pins go by what they were."""
    book, granted = LeaseBook(), lease(waiting(7))
    book.grant(granted, settings())
    granted.known.tokens = granted.known.tokens[:10]
    book.release(granted)
    assert (dict(book.tenant_tokens), len(book.released["a", 7].tokens)) == ({}, 1000)


def test_who_comes_back_late_finds_no_promise() -> None:
    """The pause is learned all the same."""
    book = LeaseBook()
    book.waiting.add(waiting(7))
    book.grant(lease(waiting(7), until=10.0), settings())
    book.note_return([7, 8], 11.0)
    assert book.take_returned([7, 8]) is None
    assert [result for _, result in book.take_expired(11.0)] == ["expired"]
    assert len(book.gaps) == 3


def test_what_no_engine_confirms_ends_and_is_not_taken_back() -> None:
    book = LeaseBook()
    book.grant(lease(waiting(7), held=False, until=900.0), settings())
    assert book.take_expired(59.0) == []
    assert [result for _, result in book.take_expired(61.0)] == ["no_effect"]
    assert not book.released


def test_a_return_whose_end_is_never_heard_of_ends_at_last() -> None:
    """Else its budget would be held for ever."""
    book = LeaseBook()
    book.waiting.add(waiting(7))
    book.grant(lease(waiting(7)), settings())
    book.note_return([7, 8], 5.0)
    assert book.take_expired(5.0 + HORIZON_S) == []
    assert [result for _, result in book.take_expired(6.0 + HORIZON_S)] == ["expired"]
    assert not book.tenant_tokens


def test_pins_that_cannot_be_taken_back_are_bounded() -> None:
    book = LeaseBook()
    for key in range(MAX_RELEASED + 10):
        book.grant(one := lease(waiting(key), 1), settings())
        book.release(one)
    assert len(book.released) == MAX_RELEASED


def test_conversations_that_do_not_go_on_are_learned_once() -> None:
    book = LeaseBook()
    for key in range(10):
        book.waiting.add(waiting(key))
    book.take_expired(HORIZON_S + 1)
    book.take_expired(2 * HORIZON_S)
    pauses = book.gaps.find(CALLS)
    assert pauses is not None
    assert (pauses.seen, pauses.never, len(book.waiting)) == (10, 10, 0)


def test_those_waited_for_are_bounded() -> None:
    """The longest waiting is forgotten, and nothing is learned of it."""
    book = LeaseBook()
    for key in range(MAX_WAITING + 10):
        book.waiting.add(waiting(key))
    assert len(book.waiting) == MAX_WAITING
    assert 9 not in book.waiting
    assert len(book.gaps) == 0


def test_the_end_of_a_session_releases_what_was_kept_for_it() -> None:
    """And nothing of a request without a session."""
    book = LeaseBook()
    for key, session in ((1, 5), (2, 6), (3, 0)):
        book.waiting.add(waiting(key, session=session))
        book.grant(lease(waiting(key, session=session)), settings())
    assert [one.of.key for one in book.end_session(5)] == [1]
    assert book.end_session(0) == []
    assert (sorted(book.leases), len(book.waiting)) == ([2, 3], 2)


@pytest.mark.parametrize(
    ("limits", "held", "one", "refusal"),
    [
        ({"min_tokens": 1001}, [], lease(waiting()), "short"),
        ({"max_leases": 1}, [lease(waiting(2))], lease(waiting()), "max_leases"),
        ({"tenant_tokens": 1500}, [lease(waiting(2))], lease(waiting()), "tenant_budget"),
        ({"tenant_tokens": 1500}, [lease(waiting(2, tenant="u"))], lease(waiting()), ""),
        ({"tenants": [{"tenant": "t", "tokens": 0}]}, [], lease(waiting()), "tenant_budget"),
        ({"endpoint_tokens": 1500}, [lease(waiting(2, tenant="u"))], lease(waiting()), "endpoint_budget"),
        ({"endpoint_tokens": 1500}, [lease(waiting(2, endpoint=EndpointId("b")))], lease(waiting()), ""),
        ({}, [lease(waiting())], lease(waiting()), "duplicate"),
    ],
)
def test_each_bound_refuses(limits: dict[str, Any], held: list[Lease], one: Lease, refusal: str) -> None:
    book = LeaseBook()
    for each in held:
        assert book.grant(each, settings(**limits)) == ""
    assert book.grant(one, settings(**limits)) == refusal


def test_an_engines_own_memory_is_never_held_by_more_than_half() -> None:
    book = LeaseBook()
    assert book.grant(lease(waiting(1), lever=Lever.TOUCH), settings(), capacity_tokens=3000) == ""
    assert book.grant(lease(waiting(2), lever=Lever.TOUCH), settings(), capacity_tokens=3000) == "endpoint_budget"


class News:
    """What another process would hear."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def waits(self, waiting: Waiting) -> None:
        self.heard.append(("waits", waiting.key))

    def returned(self, key: int) -> None:
        self.heard.append(("returned", key))

    def leased(self, lease: Lease) -> None:
        self.heard.append(("held" if lease.held else "leased", lease.of.key))

    def over(self, key: int) -> None:
        self.heard.append(("over", key))


def told(of: Waiting, tokens: int = 1000, *, until: float = 60.0) -> Lease:
    """By another process."""
    made = lease(of, 0, until=until)
    made.told_tokens = tokens
    return made


def test_another_process_lease_counts_and_ends_without_an_act_here() -> None:
    """It takes its part of the budgets, and neither its time nor its return makes this process take anything back."""
    book, limits = LeaseBook(), settings(tenant_tokens=2500)
    book.adopt(told(waiting(1)))
    book.adopt(told(waiting(2), until=5.0))
    assert book.grant(lease(waiting(1)), limits) == "duplicate"
    assert book.grant(lease(waiting(3)), limits) == "tenant_budget"
    assert book.take_expired(6.0) == []
    assert (list(book.leases), dict(book.tenant_tokens)) == ([1], {"t": 1000})
    assert book.grant(lease(waiting(3)), limits) == ""
    book.waiting.add(waiting(1))
    book.note_return([1], 7.0)
    assert book.take_returned([1]) is not None
    assert (list(book.leases), list(book.released)) == ([3], [])


def test_a_lease_of_ones_own_is_not_replaced_by_another_process() -> None:
    """Both granted it at once: here it stays one's own, and the pin is taken back when it ends by that one's word."""
    book = LeaseBook()
    book.grant(own := lease(waiting(1)), settings())
    book.adopt(told(waiting(1), 5000))
    assert list(book.leases.values()) == [own]
    assert book.tenant_tokens == {"t": 1000}
    book.release(own, told=True)
    assert [key for _, key in book.released] == [1]


def test_what_happens_here_is_told_once_and_what_is_heard_is_not() -> None:
    """Nor that a lease is confirmed which ended meanwhile: others would take it for a new one."""
    book = LeaseBook()
    book.news = news = News()
    book.expect(waiting(1))
    book.grant(first := lease(waiting(1), held=False), settings())
    book.confirm(first, 1.0)
    book.note_return([1], 2.0)
    book.take_returned([1])
    book.confirm(first, 3.0)
    assert news.heard == [("waits", 1), ("leased", 1), ("held", 1), ("returned", 1), ("over", 1)]
    news.heard.clear()
    book.waiting.add(waiting(2))
    book.adopt(told(waiting(2), until=9.0))
    book.note_return([2], 4.0, told=True)
    book.adopt(third := told(waiting(3), until=9.0))
    book.release(third, told=True)
    book.adopt(told(waiting(4), until=9.0))
    book.take_expired(10.0)
    assert news.heard == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grant", "return", "end", "expire"]),
            st.integers(1, 8),  # key
            st.sampled_from(["t", "u", ""]),
            st.integers(1, 900),
        ),
        max_size=60,
    )
)
def test_a_tenant_never_holds_more_than_its_budget(steps: list[tuple[str, int, str, int]]) -> None:
    """Whatever comes in which order; what is counted is what is held."""
    limits = settings(tenant_tokens=2000, endpoint_tokens=4000, max_leases=5, tenants=[{"tenant": "u", "tokens": 700}])
    book = LeaseBook()
    for now, (step, key, tenant, tokens) in enumerate(steps):
        of = waiting(key, tenant=tenant, session=key, at=float(now))
        if step == "grant":
            book.waiting.add(of)
            book.grant(lease(of, tokens, until=now + 10.0), limits)
        elif step == "return":
            book.note_return([key], float(now))
            book.take_returned([key])
        elif step == "end":
            book.end_session(key)
        else:
            book.take_expired(float(now))
        held = dict.fromkeys(book.tenant_tokens, 0)
        for one in book.leases.values():
            held[one.of.tenant] += one.tokens
        assert held == dict(book.tenant_tokens)
        assert all(tokens <= limits.tenant_budget(name) for name, tokens in held.items())
        assert len(book.leases) <= 5
