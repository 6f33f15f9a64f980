"""Others' load on one endpoint: what the engine is at, and since when, when several proxies send to it."""

from __future__ import annotations

import pytest

from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.remote_load import LoadRow, RemoteLoad
from kvproxy.cluster.routing.work import NO_WORK, Features

SECONDS: Features = (0.01, 1e-3, 0.0, 0.0)
ONE: Features = (1.0, 100.0, 0.0, 0.0)


def row(
    *, pending: Features = NO_WORK, busy_s: float = 0.0, shown_s: float = 0.0, prefilled: Features = NO_WORK
) -> LoadRow:
    """Return one router's report: a request in flight for each that is pending."""
    return LoadRow(int(pending[0]), int(pending[1]), pending, busy_s, shown_s, prefilled)


@pytest.fixture
def load() -> EndpointLoad:
    """Return a ledger that others share."""
    found = EndpointLoad()
    found.remote_load = RemoteLoad(found)
    return found


def test_work_that_others_showed_is_taken_once(load: EndpointLoad) -> None:
    """Up to the very end of a sample, and what came after it with the next one."""
    elsewhere = load.remote_load
    assert elsewhere is not None
    elsewhere.tell("one", row(), 100.0)
    elsewhere.tell("one", row(prefilled=ONE), 101.0)
    elsewhere.tell("one", row(prefilled=(3.0, 300.0, 0.0, 0.0)), 102.0)
    assert elsewhere.take_prefilled(100.9) == NO_WORK
    assert elsewhere.take_prefilled(101.0) == ONE
    assert elsewhere.take_prefilled(101.0) == NO_WORK
    assert elsewhere.take_prefilled(200.0) == (2.0, 200.0, 0.0, 0.0)


def test_an_engine_is_at_what_its_hidden_requests_left(load: EndpointLoad) -> None:
    """The first one's time is over: it is at the next one since then, and not since the work of all began."""
    assert load.remote_load is not None
    load.remote_load.tell("one", row(pending=ONE, busy_s=1.0, shown_s=0.5), 100.0)
    for _ in range(2):
        load.reserve(100, 0, 100.0, hidden=True)
    backlog = load.backlog(SECONDS, 1.0, 100.15)
    assert backlog.elapsed_s == pytest.approx(0.04)
    assert backlog.work[:2] == (2.0, 200.0)


def test_the_share_of_a_departed_peer_is_dropped(load: EndpointLoad) -> None:
    """Of the counts, of the work and of the time since when; what the others said stays."""
    elsewhere = load.remote_load
    assert elsewhere is not None
    elsewhere.tell("one", row(pending=ONE, busy_s=5.0), 100.0)
    elsewhere.tell("two", row(pending=ONE, busy_s=1.0), 100.0)
    assert (load.in_flight, load.pending_tokens, load.resident_tokens, elsewhere.busy_at) == (2, 200, 200, 95.0)
    assert elsewhere.tell("one", None, 101.0) == row(pending=ONE, busy_s=5.0)
    assert (load.in_flight, load.pending_tokens, load.resident_tokens, elsewhere.busy_at) == (1, 100, 100, 99.0)
    assert elsewhere.tell("one", None, 101.0) is None
    elsewhere.tell("two", None, 101.0)
    assert (load.in_flight, load.pending_tokens, load.resident_tokens) == (0, 0, 0)
    assert elsewhere.pending == NO_WORK
