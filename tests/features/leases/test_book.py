"""Which prompts are kept, for how long and within which budgets."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.features.leases import leases
from kvproxy.features.leases.leases import (
    HORIZON_S,
    MAX_RELEASED,
    MAX_WAITING,
    IdleConversation,
    Lease,
    LeaseBook,
    LeaseReason,
    LeaseState,
    choose_duration,
)
from kvproxy.features.leases.settings import LeaseSettings
from kvproxy.operate.config.load import check_config

A = EndpointId("a")


def settings(**changes: Any) -> LeaseSettings:
    return LeaseSettings.model_validate({"enabled": True, "min_tokens": 1, **changes})


def waiting(
    key: int = 1,
    *,
    tenant: str = "t",
    asked_s: float | None = None,
    session: int = 0,
    endpoint: EndpointId = A,
    at: float = 0.0,
    calls_tool: bool = True,
) -> IdleConversation:
    return IdleConversation(key, at, endpoint, "default", tenant, session, calls_tool, asked_s)


def lease(of: IdleConversation, tokens: int = 1000, *, held: bool = True, until: float = 60.0) -> Lease:
    prefix = KnownPrefix(of.key, "m", "", deque(), whole=of.key, tokens=array("I", range(tokens)))
    return Lease(of, prefix, "a", of.ended_at, until, of.ended_at, held)


@pytest.mark.parametrize(
    ("of", "expected_s"),
    [(waiting(), 900.0), (waiting(asked_s=300.0, calls_tool=False), 300.0), (waiting(asked_s=86_400.0), 900.0)],
)
def test_a_lease_lasts_as_long_as_settings_and_client_allow(of: IdleConversation, expected_s: float) -> None:
    """The client's own wish is the bound, whether its answer calls a tool or not."""
    assert choose_duration(of, settings()) == expected_s


def test_a_lease_has_its_reason() -> None:
    assert (lease(waiting()).why, lease(waiting(calls_tool=False)).why) == (LeaseReason.TOOL_CALL, LeaseReason.CLIENT)


@pytest.mark.parametrize("name", ["touch", "share", "max_leases"])
def test_a_setting_that_is_gone_is_a_warning_with_the_reason(name: str) -> None:
    """The rest of the file is used."""
    filters = ["inference_request", {"kvcache": {"leases": {name: True, "tenant_tokens": 7}}}, "router"]
    config, problems = check_config({"endpoints": ["http://127.0.0.1:1"], "filters": filters})
    assert config is not None
    (gone,) = (one for one in problems if one.path == f"filters[1].kvcache.leases.{name}")
    assert (gone.severity, gone.message) == ("warning", "ignored: no longer a setting")


def test_another_lmcache_has_another_book() -> None:
    """Conversations that are waited for are known in both."""
    state = LeaseState()
    first = state.book_at("http://one")
    first.waiting.add(waiting(7))
    first.grant(lease(waiting(7)), settings())
    assert state.book_at("http://one") is first
    second = state.book_at("http://other")
    assert (second.leases, 7 in second.waiting, len(first.leases)) == ({}, True, 1)


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


def test_late_facts_about_a_prompt_change_no_lease() -> None:
    """It was seen to be the beginning of prompts that part before its end: budgets and pins go by what they were."""
    book, granted = LeaseBook(), lease(waiting(7))
    book.grant(granted, settings())
    granted.known.tokens = granted.known.tokens[:10]
    book.release(granted)
    assert (dict(book.tenant_tokens), len(book.released["a", 7].tokens)) == ({}, 1000)


def test_a_late_return_finds_no_promise() -> None:
    book = LeaseBook()
    book.waiting.add(waiting(7))
    book.grant(lease(waiting(7), until=10.0), settings())
    book.note_return([7, 8], 11.0)
    assert book.take_returned([7, 8]) is None
    assert [result for _, result in book.take_expired(11.0)] == ["expired"]


def test_an_unconfirmed_lease_ends_and_is_not_taken_back() -> None:
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


def test_conversations_that_do_not_go_on_are_forgotten() -> None:
    """Those that still may go on stay."""
    book = LeaseBook()
    book.waiting.add(waiting(1))
    book.waiting.add(waiting(2, at=5.0))
    book.take_expired(HORIZON_S + 1)
    assert (1 in book.waiting, 2 in book.waiting) == (False, True)


def test_those_waited_for_are_bounded() -> None:
    """The longest waiting is forgotten."""
    book = LeaseBook()
    for key in range(MAX_WAITING + 10):
        book.waiting.add(waiting(key))
    assert len(book.waiting) == MAX_WAITING
    assert 9 not in book.waiting


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
        ({"tenant_tokens": 1500}, [lease(waiting(2))], lease(waiting()), "tenant_budget"),
        ({"tenant_tokens": 1500}, [lease(waiting(2, tenant="u"))], lease(waiting()), ""),
        ({"tenant_tokens": 0}, [], lease(waiting()), "tenant_budget"),
        ({}, [lease(waiting())], lease(waiting()), "duplicate"),
    ],
)
def test_each_bound_refuses(limits: dict[str, Any], held: list[Lease], one: Lease, refusal: str) -> None:
    book = LeaseBook()
    for each in held:
        assert book.grant(each, settings(**limits)) == ""
    assert book.grant(one, settings(**limits)) == refusal


def test_tokens_at_one_endpoint_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all tenants together; another endpoint has its own."""
    monkeypatch.setattr(leases, "ENDPOINT_TOKENS", 1500)
    book = LeaseBook()
    assert book.grant(lease(waiting(1)), settings()) == ""
    assert book.grant(lease(waiting(2, tenant="u")), settings()) == "endpoint_budget"
    assert book.grant(lease(waiting(3, endpoint=EndpointId("b"))), settings()) == ""


def test_leases_at_once_are_bounded() -> None:
    book = LeaseBook(most=1)
    assert [book.grant(lease(waiting(key)), settings()) for key in (1, 2)] == ["", "max_leases"]


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
    limits = settings(tenant_tokens=2000)
    book = LeaseBook(most=5)
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
        assert all(tokens <= limits.tenant_tokens for tokens in held.values())
        assert len(book.leases) <= 5
