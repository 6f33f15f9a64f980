"""The router queue: order, bounds, fairness; time is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.routing.fair_queue import FairQueue, QueueSettings, Ticket

FREE, BUSY = 0.0, 5.0


def drained(queue: FairQueue[str], now: float) -> list[str]:
    """Everything released while an endpoint stays free."""
    released = []
    while (ticket := queue.poll(FREE, now)) is not None:
        released.append(ticket.item)
    return released


def held(queue: FairQueue[str], item: str, own_s: float = 1.0, now: float = 0.0, **how: int | str) -> Ticket[str]:
    ticket = queue.offer(item, own_s, now, **how)  # type: ignore[arg-type]
    assert ticket is not None
    return ticket


def test_nobody_waits_while_an_endpoint_is_free() -> None:
    """Under 0.3 s of pending prefill somewhere and no request ahead."""
    queue: FairQueue[str] = FairQueue()
    assert queue.admits(0.29)
    assert not queue.admits(0.3)
    held(queue, "first")
    assert not queue.admits(0.0)


def test_the_shortest_goes_first() -> None:
    """Least own work first keeps the mean short."""
    queue: FairQueue[str] = FairQueue()
    for item, own_s in (("long", 9.0), ("short", 0.1), ("middle", 2.0)):
        held(queue, item, own_s)
    assert drained(queue, 0.0) == ["short", "middle", "long"]


def test_waiting_counts_against_length() -> None:
    """A request of 3 s more is due 10 s earlier."""
    queue: FairQueue[str] = FairQueue()
    held(queue, "long", 3.2, now=0.0)
    held(queue, "late", 0.1, now=10.0)
    held(queue, "later", 0.1, now=10.5)
    assert drained(queue, 11.0) == ["late", "long", "later"]


def test_nothing_leaves_while_every_endpoint_is_busy() -> None:
    """That is what the queue is for."""
    queue: FairQueue[str] = FairQueue()
    held(queue, "a")
    assert queue.poll(BUSY, 29.9) is None
    assert len(queue) == 1


def test_after_the_longest_wait_it_goes_whatever_is_pending() -> None:
    """Hard release after 30 s, oldest first."""
    queue: FairQueue[str] = FairQueue()
    held(queue, "long", 99.0, now=0.0)
    held(queue, "short", 0.1, now=1.0)
    ticket = queue.poll(BUSY, 30.0)
    assert ticket is not None
    assert ticket.item == "long"
    assert queue.poll(BUSY, 30.0) is None


def test_a_full_queue_refuses() -> None:
    """The caller answers 429, and says when the oldest must be out."""
    queue: FairQueue[str] = FairQueue(QueueSettings(limit=1))
    assert queue.retry_after_s(0.0) == 1.0
    held(queue, "a", now=0.0)
    assert queue.offer("b", 0.1, 12.0) is None
    assert queue.retry_after_s(12.0) == 18.0
    assert queue.retry_after_s(29.9) == 1.0


def test_a_cancelled_request_is_never_released() -> None:
    """Cancelling makes room; twice, or after the release, does nothing."""
    queue: FairQueue[str] = FairQueue(QueueSettings(limit=2))
    gone, kept = held(queue, "gone", 0.1), held(queue, "kept")
    queue.cancel(gone)
    queue.cancel(gone)
    assert len(queue) == 1
    assert drained(queue, 0.0) == ["kept"]
    queue.cancel(kept)
    assert len(queue) == 0
    assert queue.poll(FREE, 99.0) is None


def test_the_overdue_oldest_may_be_cancelled() -> None:
    """The next oldest is looked at."""
    queue: FairQueue[str] = FairQueue()
    gone = held(queue, "gone", now=0.0)
    held(queue, "kept", now=1.0)
    queue.cancel(gone)
    assert queue.poll(BUSY, 30.0) is None
    ticket = queue.poll(BUSY, 31.0)
    assert ticket is not None
    assert ticket.item == "kept"


def test_priority_goes_before_length() -> None:
    """Within one tenant."""
    queue: FairQueue[str] = FairQueue()
    held(queue, "usual", 0.1)
    held(queue, "urgent", 9.0, priority=1)
    assert drained(queue, 0.0) == ["urgent", "usual"]


def test_tenants_take_turns_by_work() -> None:
    """One tenant's flood does not hold up another's few requests, however short its own are."""
    queue: FairQueue[str] = FairQueue()
    for number in range(6):
        held(queue, f"flood{number}", 0.5, tenant="flood")
    for number in range(2):
        held(queue, f"few{number}", 1.0, tenant="few")
    order = drained(queue, 0.0)
    assert order.index("few0") <= 1
    assert order.index("few1") <= 4


def test_a_newcomer_does_not_claim_the_past() -> None:
    """A tenant that comes late starts level with those that wait, not with all they were granted before."""
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        held(queue, f"old{number}", 1.0, tenant="old")
    for _ in range(6):
        queue.poll(FREE, 0.0)
    for number in range(4):
        held(queue, f"new{number}", 1.0, tenant="new")
    order = drained(queue, 0.0)
    assert {item[:3] for item in order[:3]} == {"old", "new"}


def test_next_poll_is_when_an_endpoint_will_be_free_or_the_oldest_due() -> None:
    """So that a timer, not a loop, drives it."""
    queue: FairQueue[str] = FairQueue()
    assert queue.next_poll_at(BUSY, 0.0) is None
    gone = held(queue, "gone", now=0.0)
    held(queue, "a", now=2.0)
    queue.cancel(gone)
    assert queue.next_poll_at(5.3, 3.0) == pytest.approx(8.0)
    assert queue.next_poll_at(500.0, 3.0) == pytest.approx(32.0)
    assert queue.next_poll_at(FREE, 3.0) == 3.0


@given(st.lists(st.tuples(st.sampled_from("oocp"), st.integers(0, 50), st.sampled_from(["a", "b", "c"])), max_size=150))
def test_everyone_leaves_exactly_once(steps: list[tuple[str, int, str]]) -> None:
    """Released or cancelled, never both, never lost, whatever the order; and what is dead does not pile up."""
    queue: FairQueue[int] = FairQueue(QueueSettings(limit=40))
    waiting: dict[int, Ticket[int]] = {}
    for now, (action, number, tenant) in enumerate(steps):
        if action == "o":
            ticket = queue.offer(now, number / 10, float(now), tenant=tenant)
            assert (ticket is None) == (len(waiting) == 40)
            if ticket is not None:
                waiting[now] = ticket
        elif action == "c" and waiting:
            queue.cancel(waiting.pop(list(waiting)[number % len(waiting)]))
        elif action == "p":
            released = queue.poll(FREE, float(now))
            assert (released is None) == (not waiting)
            if released is not None:
                del waiting[released.item]
        assert len(queue) == len(waiting)
    while (left := queue.poll(FREE, 0.0)) is not None:
        del waiting[left.item]
    assert not waiting


def test_cancelled_requests_do_not_pile_up() -> None:
    """Clients that come and go behind one that waits leave nothing behind."""
    queue: FairQueue[str] = FairQueue()
    held(queue, "stays", 0.1)
    for number in range(1000):
        queue.cancel(held(queue, f"goes{number}"))
    assert len(queue._arrivals) < 100
    assert len(queue._lines[""].heap) < 100


def test_the_oldest_wait_is_known() -> None:
    """Of those that still wait, whatever order they will go in."""
    queue: FairQueue[str] = FairQueue()
    assert queue.oldest_wait_s(5.0) == 0.0
    first = held(queue, "long", 9.0, now=1.0)
    held(queue, "short", 0.1, now=3.0)
    assert queue.oldest_wait_s(5.0) == 4.0
    queue.cancel(first)
    assert queue.oldest_wait_s(5.0) == 2.0


def test_other_settings_reorder_those_who_wait() -> None:
    """As if they had come under the new ageing; a smaller limit drops no request."""
    queue: FairQueue[str] = FairQueue(QueueSettings(ageing=0.0, limit=3))
    for item, own_s, now in (("long", 3.2, 0.0), ("late", 0.1, 10.0), ("later", 0.3, 10.5)):
        held(queue, item, own_s, now)
    queue.reconfigure(QueueSettings(ageing=0.3, limit=1))
    assert queue.offer("refused", 0.1, 10.5) is None
    assert drained(queue, 11.0) == ["late", "long", "later"]


def test_a_shorter_bound_counts_for_those_who_wait() -> None:
    """They are overdue at once."""
    queue: FairQueue[str] = FairQueue()
    held(queue, "a")
    assert queue.poll(BUSY, 10.0) is None
    queue.reconfigure(QueueSettings(max_wait_s=5.0))
    assert queue.poll(BUSY, 10.0) is not None
