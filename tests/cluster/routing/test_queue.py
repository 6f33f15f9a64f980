"""The router queue: order, bounds, fairness, and while what it holds requests; time is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.cluster.routing.fair_queue import FairQueue, QueueSettings
from kvproxy.cluster.routing.waiting_lines import AGEING, LEVEL_S, Ticket

BUSY = 5.0


class World:
    """A queue, and the least that is pending in any endpoint of each model."""

    def __init__(self, settings: QueueSettings = QueueSettings()) -> None:
        self.queue: FairQueue[str] = FairQueue(settings)
        self.waits = {"": 0.0}

    def hold(self, item: str, own_s: float = 1.0, now: float = 0.0, **how: float | str) -> Ticket[str]:
        ticket = self.queue.offer(item, own_s, now, **how)  # type: ignore[arg-type]
        assert ticket is not None
        return ticket

    def poll(self, now: float = 0.0, least_s: float | None = None, **waits: float) -> str | None:
        """One release, with these seconds pending from now on, by model."""
        self.waits.update(waits if least_s is None else {"": least_s})
        ticket = self.queue.poll(self.waits.__getitem__, now)
        return None if ticket is None else ticket.let_go()

    def drained(self, now: float = 0.0, least_s: float | None = None, **waits: float) -> list[str]:
        """Everything released while nothing changes."""
        released = []
        while (item := self.poll(now, least_s, **waits)) is not None:
            released.append(item)
        return released


def test_an_endpoint_with_little_pending_has_room() -> None:
    """Under 0.3 s."""
    world = World()
    world.hold("request")
    assert world.poll(least_s=0.3) is None
    assert world.poll(least_s=0.29) == "request"


def test_the_shortest_goes_first() -> None:
    """Least own work first keeps the mean short."""
    world = World()
    for item, own_s in (("long", 9.0), ("short", 0.1), ("middle", 2.0)):
        world.hold(item, own_s)
    assert world.drained() == ["short", "middle", "long"]


def test_waiting_counts_against_length() -> None:
    """A request of 3 s more is due 10 s earlier."""
    world = World()
    world.hold("long", 3.2, now=0.0)
    world.hold("late", 0.1, now=10.0)
    world.hold("later", 0.1, now=10.5)
    assert world.drained(11.0) == ["late", "long", "later"]


def test_nothing_leaves_while_every_endpoint_is_busy() -> None:
    """That is what the queue is for."""
    world = World()
    world.hold("a")
    assert world.poll(29.9, BUSY) is None
    assert len(world.queue) == 1
    assert world.poll(29.9, 0.29) == "a"


def test_one_idle_model_does_not_let_go_what_waits_for_another() -> None:
    """A model's endpoint is idle all the time; requests for the other model stay in the order of their own."""
    world = World()
    for number, own_s in enumerate((3.0, 1.0, 2.0)):
        world.hold(f"busy{number}", own_s, model="busy")
    world.hold("idle", 9.0, model="idle")
    assert world.drained(busy=BUSY, idle=0.0) == ["idle"]
    assert world.drained(busy=0.0) == ["busy1", "busy2", "busy0"]


def test_tenants_take_turns_over_all_models() -> None:
    """Seconds granted to a tenant with one model count with the other, too."""
    world = World()
    world.hold("a0", 5.0, tenant="a", model="x")
    world.hold("a1", 0.1, tenant="a", model="y")
    world.hold("b0", 3.0, tenant="b", model="y")
    assert world.drained(x=0.0, y=BUSY) == ["a0"]
    assert world.drained(x=BUSY, y=0.0) == ["b0", "a1"]


def test_nothing_starves() -> None:
    """A long request among an endless flow of short ones: only those that came less than own work / AGEING seconds
    after it go before it."""
    own_s = 6.0
    world = World(QueueSettings(max_wait_s=10_000.0))
    world.hold("long", own_s)
    before, now = 0, 0.0
    while True:
        for _ in range(2):  # twice as much as is served
            world.hold(f"{before}", 0.0, now=now)
            before += 1
        if world.poll(now) == "long":
            break
        now += 0.1
    came_until = own_s / AGEING
    assert now == pytest.approx(came_until * 2, rel=0.05)  # so long takes what came until then
    assert world.drained(now)[0] == f"{round(came_until * 20)}"


def test_after_the_longest_wait_it_goes_whatever_is_pending() -> None:
    """The bound for clients that would give up, oldest first."""
    world = World(QueueSettings(max_wait_s=30.0))
    world.hold("long", 99.0, now=0.0)
    world.hold("short", 0.1, now=1.0)
    assert world.poll(30.0, BUSY) == "long"
    assert world.poll(30.0) is None


def test_overload_does_not_turn_the_order_into_that_of_arrival() -> None:
    """Everything has waited over 30 s, and the short ones still go first."""
    world = World()
    for number in range(20):
        world.hold(f"{number}", 20.0 - number, now=float(number) / 10)
    assert world.drained(120.0) == [f"{number}" for number in reversed(range(20))]


def test_a_full_queue_refuses() -> None:
    """The caller answers 429, and says when the oldest must be out."""
    world = World(QueueSettings(limit=1, max_wait_s=30.0))
    assert world.queue.retry_after_s(0.0) == 1.0
    world.hold("a", now=0.0)
    assert world.queue.offer("b", 0.1, 12.0) is None
    assert world.queue.retry_after_s(12.0) == 18.0
    assert world.queue.retry_after_s(29.9) == 1.0


def test_a_cancelled_request_is_never_released() -> None:
    """Cancelling makes room; twice, or after the release, does nothing."""
    world = World(QueueSettings(limit=2))
    gone, kept = world.hold("gone", 0.1), world.hold("kept")
    world.queue.cancel(gone)
    world.queue.cancel(gone)
    assert len(world.queue) == 1
    assert world.drained() == ["kept"]
    world.queue.cancel(kept)
    assert len(world.queue) == 0
    assert world.poll(99.0) is None


def test_the_overdue_oldest_may_be_cancelled() -> None:
    """The next oldest is looked at."""
    world = World(QueueSettings(max_wait_s=30.0))
    gone = world.hold("gone", now=0.0)
    world.hold("kept", now=1.0)
    world.queue.cancel(gone)
    assert world.poll(30.0, BUSY) is None
    assert world.poll(31.0) == "kept"


def test_a_higher_level_goes_before_length() -> None:
    """Each is worth so many seconds of work; more work than that is not."""
    world = World()
    world.hold("usual", 0.1)
    world.hold("urgent", 0.9 * LEVEL_S, level=1)
    world.hold("long", 1.1 * LEVEL_S + 0.1, level=1)
    assert world.drained() == ["urgent", "usual", "long"]


def test_tenants_take_turns_by_work() -> None:
    """One tenant's flood does not hold up another's few requests, however short its own are."""
    world = World()
    for number in range(6):
        world.hold(f"flood{number}", 0.5, tenant="flood")
    for number in range(2):
        world.hold(f"few{number}", 1.0, tenant="few")
    order = world.drained()
    assert order.index("few0") <= 1
    assert order.index("few1") <= 4


def test_one_that_has_waited_before_keeps_its_time() -> None:
    """It is due as if it had waited on."""
    world = World(QueueSettings(max_wait_s=30.0))
    world.hold("first", now=10.0)
    world.hold("second", now=20.0)
    world.hold("again", now=5.0)
    assert world.poll(35.0, BUSY) == "again"
    assert world.drained(60.0) == ["first", "second"]


def test_tenants_share_by_weight() -> None:
    """One of 3 gets three times the work of one of 1 while both wait."""
    world = World()
    for number in range(12):
        world.hold(f"heavy{number}", 1.0, tenant="heavy", weight=3.0)
        world.hold(f"light{number}", 1.0, tenant="light")
    order = [item[:5] for item in world.drained()[:12]]
    assert order.count("heavy") == 9


def test_a_newcomer_does_not_claim_the_past() -> None:
    """A tenant that comes late starts level with those that wait, not with all they were granted before."""
    world = World()
    for number in range(10):
        world.hold(f"old{number}", 1.0, tenant="old")
    for _ in range(6):
        world.poll()
    for number in range(4):
        world.hold(f"new{number}", 1.0, tenant="new")
    order = world.drained()
    assert {item[:3] for item in order[:3]} == {"old", "new"}


def test_next_poll_is_when_an_endpoint_will_have_room_or_the_oldest_is_due() -> None:
    """So that a timer, not a loop, drives it: an endpoint of any model that requests wait for."""
    world = World(QueueSettings(max_wait_s=30.0))
    waits = {"x": 7.3, "y": 5.3, "z": 0.0}
    assert world.queue.next_poll_at(waits.__getitem__, 0.0) is None
    gone = world.hold("gone", now=0.0, model="z")
    world.hold("a", now=2.0, model="x")
    world.hold("b", now=2.5, model="y")
    world.queue.cancel(gone)
    assert world.queue.next_poll_at(waits.__getitem__, 3.0) == pytest.approx(8.0)
    waits.update(x=500.0, y=500.0)
    assert world.queue.next_poll_at(waits.__getitem__, 3.0) == pytest.approx(32.0)
    waits.update(x=0.0)
    assert world.queue.next_poll_at(waits.__getitem__, 3.0) == 3.0


@given(
    st.lists(
        st.tuples(st.sampled_from("oocp"), st.integers(0, 50), st.sampled_from(["a", "b", "c"]), st.booleans()),
        max_size=150,
    )
)
def test_everyone_leaves_exactly_once(steps: list[tuple[str, int, str, bool]]) -> None:
    """Released or cancelled, never both, never lost, whatever the order and whichever model has room."""
    world = World(QueueSettings(limit=40))
    waiting: dict[str, Ticket[str]] = {}
    for now, (action, number, tenant, first) in enumerate(steps):
        item, model = str(now), "x" if first else "y"
        if action == "o":
            ticket = world.queue.offer(item, number / 10, float(now), tenant=tenant, model=model)
            assert (ticket is None) == (len(waiting) == 40)
            if ticket is not None:
                waiting[item] = ticket
        elif action == "c" and waiting:
            world.queue.cancel(waiting.pop(list(waiting)[number % len(waiting)]))
        elif action == "p":
            released = world.poll(float(now), x=BUSY if first else 0.0, y=0.0 if number % 2 else BUSY)
            if released is not None:
                assert world.waits[waiting.pop(released).model] == 0.0
        assert len(world.queue) == len(waiting)
        assert len(world.queue._lines) <= 2 * len(waiting) + 64
    for item in world.drained(0.0, x=0.0, y=0.0):
        del waiting[item]
    assert not waiting
    assert not world.queue._lines.heads()


def test_cancelled_requests_do_not_pile_up() -> None:
    """Clients that come and go behind one that waits leave nothing behind."""
    world = World()
    world.hold("stays", 0.1)
    for number in range(1000):
        world.queue.cancel(world.hold(f"goes{number}"))
    assert len(world.queue._arrivals) < 100
    assert len(world.queue._lines) < 100


def test_the_oldest_wait_is_known() -> None:
    """Of those that still wait, whatever order they will go in."""
    world = World()
    assert world.queue.oldest_wait_s(5.0) == 0.0
    first = world.hold("long", 9.0, now=1.0)
    world.hold("short", 0.1, now=3.0)
    assert world.queue.oldest_wait_s(5.0) == 4.0
    world.queue.cancel(first)
    assert world.queue.oldest_wait_s(5.0) == 2.0


def test_a_smaller_limit_drops_none_that_waits() -> None:
    """Only further ones are refused."""
    world = World(QueueSettings(limit=3))
    for item, own_s, now in (("long", 3.2, 0.0), ("late", 0.1, 10.0), ("later", 0.3, 10.5)):
        world.hold(item, own_s, now)
    world.queue.reconfigure(QueueSettings(limit=1))
    assert world.queue.offer("refused", 0.1, 10.5) is None
    assert world.drained(11.0, 0.0) == ["late", "long", "later"]


def test_a_shorter_bound_counts_for_those_that_wait() -> None:
    """They are overdue at once."""
    world = World()
    world.hold("a")
    assert world.poll(10.0, BUSY) is None
    world.queue.reconfigure(QueueSettings(max_wait_s=5.0))
    assert world.poll(10.0) == "a"
